"""b4's first practice: from sequence numbers to the ranks that never came."""

from __future__ import annotations

from ...practice import Answer, Exercise, Mistake, ask, proven, right, wrong
from .runs import Stopped, stop


def who_never_came(entries, members):
    """{group: ranks} of the groups in which ranks have not called what others have called. Ranks rise.

    entries[rank]: its flight record, a list of dicts, oldest first: entry["process_group"][0] is the group,
    entry["collective_seq_id"] the sequence number, entry["state"] "completed" if it has ended. Old entries
    may have been overwritten. members[group]: its ranks.
    """
    missing = {}
    for group, ranks in members.items():
        numbers = {
            rank: [e["collective_seq_id"] for e in entries[rank] if e["process_group"][0] == group]
            for rank in ranks
        }
        last = {rank: max(mine, default=0) for rank, mine in numbers.items()}
        behind = [rank for rank in ranks if last[rank] < max(last.values())]
        if behind:
            missing[group] = behind
    return missing


HIDDEN = 51  # a seed that no cell shows


def _last(entries, members, ended=False, groups=True) -> dict[str, dict[int, int]]:
    """Group -> rank -> its last number; ended: of those that have ended; groups: of this group alone."""
    mine = lambda r, g: [
        e["collective_seq_id"]
        for e in entries[r]
        if (not groups or e["process_group"][0] == g) and (not ended or e["state"] == "completed")
    ]
    return {g: {r: max(mine(r, g), default=0) for r in ranks} for g, ranks in members.items()}


def _behind(last) -> dict[str, list[int]]:
    found = {g: [r for r in mine if mine[r] < max(mine.values())] for g, mine in last.items()}
    return {g: ranks for g, ranks in found.items() if ranks}


def _waiting(entries, members) -> dict[str, list[int]]:
    found = {
        g: [
            r
            for r in ranks
            if any(e["process_group"][0] == g and e["state"] != "completed" for e in entries[r])
        ]
        for g, ranks in members.items()
    }
    return {g: ranks for g, ranks in found.items() if ranks}


def _waiting_anywhere(entries, members) -> dict[str, list[int]]:
    waits = [r for r in entries if any(e["state"] != "completed" for e in entries[r])]
    found = {g: [r for r in ranks if r in waits] for g, ranks in members.items()}
    return {g: ranks for g, ranks in found.items() if ranks}


def _foremost(entries, members) -> dict[str, list[int]]:
    last = _last(entries, members)
    return {g: [r for r in members[g] if r not in late] for g, late in _behind(last).items() if last[g]}


def _counted(entries, members) -> dict[str, list[int]]:
    count = lambda r, g: sum(e["process_group"][0] == g for e in entries[r])
    return _behind({g: {r: count(r, g) for r in ranks} for g, ranks in members.items()})


def _everybody(entries, members) -> dict[str, list[int]]:
    return _behind(_last(entries, dict.fromkeys(members, list(entries))))


BLAMED = (
    "These ranks wait: they have called the highest number, and report a timeout because somebody else has"
    " not. Look for the members of the group that have no entry of that number."
)
MISTAKES = [
    Mistake("blaming the rank that timed out", BLAMED, _waiting),
    Mistake("blaming the rank that timed out", BLAMED, _waiting_anywhere),
    Mistake("blaming the rank that timed out", BLAMED, _foremost),
    Mistake(
        "numbers of two groups compared",
        "Each group counts for itself. Number 5 of one group says nothing of number 4 of another.",
        lambda entries, members: _behind(_last(entries, members, groups=False)),
    ),
    Mistake(
        "only what has ended",
        "What ended, ended on every rank of the group: there all have the same last number. Look at what was"
        " called.",
        lambda entries, members: _behind(_last(entries, members, ended=True)),
    ),
    Mistake(
        "entries counted",
        "Old entries are overwritten: two records of the same length may end at different numbers. Compare"
        " the numbers.",
        _counted,
    ),
    Mistake(
        "ranks that are not in the group",
        "A rank that is no member has no number in a group, and nobody waits for it there. Ask the ranks of"
        " members[group].",
        _everybody,
    ),
]


def _case(stopped: Stopped, kept: int | None = None) -> tuple[dict, dict]:
    """(entries, members) of a run; kept: the entries that a small buffer still has."""
    entries = {r: record["entries"] for r, record in stopped.dumps.items()}
    return {r: mine[-(kept or len(mine)) :] for r, mine in entries.items()}, stopped.groups


def _judge(attempt) -> Answer:
    runs = [stop(number, HIDDEN) for number in (4, 5, 3)]
    cases = [*map(_case, runs), _case(runs[0], kept=2)]
    said, truth = ask(attempt, cases), [who_never_came(*case) for case in cases]
    for stopped, answer in zip((*runs, runs[0]), said):
        if not isinstance(answer, dict) or not all(
            isinstance(v, (list, tuple, set)) for v in answer.values()
        ):
            return wrong(
                "no ranks by group", f"For run {stopped.number} you return {answer!r}; {{group: ranks}}."
            )
    mine = [{g: sorted(ranks) for g, ranks in answer.items() if ranks} for answer in said]
    figures = [
        (f"run {stopped.number} with other ranks", str(a), str(b)) for stopped, a, b in zip(runs, mine, truth)
    ]
    if mine == truth:
        return right(
            "Right on runs that you have not seen, also where a small buffer has lost the beginning. (Where"
            " all came and the numbers are the same, as in run 3, compare the names.)",
            *figures,
        )
    if mistake := proven(mine, cases, MISTAKES, lambda a, b: a == {g: sorted(r) for g, r in b.items() if r}):
        return wrong(mistake.name, mistake.text, *figures)
    return wrong(
        "other ranks",
        "In each group, take the highest number that any member has called. Missing are the members that have"
        " not called it.",
        *figures,
    )


never = Exercise(
    "who never came",
    who_never_came,
    _judge,
    hints=[
        "Go group by group. What is the last collective_seq_id of each member in this group?",
        "The highest of these is where the others wait. Who is below it?",
        "max((e['collective_seq_id'] for e in entries[rank] if e['process_group'][0] == group), default=0)",
    ],
)
