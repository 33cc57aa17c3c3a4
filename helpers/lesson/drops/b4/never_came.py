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


def _last(
    entries, members, ended=False, groups=True, pick=max, number="collective_seq_id"
) -> dict[str, dict[int, int]]:
    """Group -> rank -> its last number; ended: of those that have ended; groups: of this group alone; pick:
    min for the first one; number: which of an entry's.
    """
    mine = lambda r, g: [
        e[number]
        for e in entries[r]
        if (not groups or e["process_group"][0] == g) and (not ended or e["state"] == "completed")
    ]
    return {g: {r: pick(mine(r, g), default=0) for r in ranks} for g, ranks in members.items()}


def _behind(last) -> dict[str, list[int]]:
    behind = {g: [r for r in mine if mine[r] < max(mine.values())] for g, mine in last.items()}
    return {g: ranks for g, ranks in behind.items() if ranks}


def _waiting(entries, members) -> dict[str, list[int]]:
    waiting = {
        g: [
            r
            for r in ranks
            if any(e["process_group"][0] == g and e["state"] != "completed" for e in entries[r])
        ]
        for g, ranks in members.items()
    }
    return {g: ranks for g, ranks in waiting.items() if ranks}


def _waiting_anywhere(entries, members) -> dict[str, list[int]]:
    waits = [r for r in entries if any(e["state"] != "completed" for e in entries[r])]
    waiting = {g: [r for r in ranks if r in waits] for g, ranks in members.items()}
    return {g: ranks for g, ranks in waiting.items() if ranks}


def _foremost(entries, members) -> dict[str, list[int]]:
    last = _last(entries, members)
    return {g: [r for r in members[g] if r not in late] for g, late in _behind(last).items() if last[g]}


def _all_foremost(entries, members) -> dict[str, list[int]]:
    last = _last(entries, members)
    return {g: [r for r in mine if last[g][r] == max(last[g].values())] for g, mine in members.items()}


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
    Mistake("blaming the rank that timed out", BLAMED, _all_foremost),
    Mistake(
        "nobody is missing",
        "You name no rank in any run. In two of them a group has a member that has not called the last"
        " number.",
        lambda entries, members: {},
    ),
    Mistake(
        "every rank",
        "You name all members of every group. Those with the highest number have come.",
        lambda entries, members: members,
    ),
    Mistake(
        "the first group alone",
        "Right for the first group. The ranks wait in the others too: look at all of them.",
        lambda entries, members: _behind(_last(entries, dict(list(members.items())[:1]))),
    ),
    Mistake(
        "the last group alone",
        "Right for the last group in which somebody is missing. Keep what you found in those before it.",
        lambda entries, members: dict(list(_behind(_last(entries, members)).items())[-1:]),
    ),
    Mistake(
        "the first number, not the last",
        "Entries are oldest first. Who is behind is told by the last number that each has called.",
        lambda entries, members: _behind(_last(entries, members, pick=min)),
    ),
    Mistake(
        "numbers of two groups compared",
        "Each group counts for itself. Number 5 of one group says nothing of number 4 of another.",
        lambda entries, members: _behind(_last(entries, members, groups=False)),
    ),
    Mistake(
        "entries' own numbers compared",
        "record_id counts all that a rank has called, in whatever group. What the members of a group have in"
        " common is its collective_seq_id.",
        lambda entries, members: _behind(_last(entries, members, number="record_id")),
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


def _made_up(groups: dict[str, list[int]], called: list[str]) -> tuple[dict, dict]:
    """(entries, members) from a line for each rank: 'a1 a2 b1…' called numbers 1 and 2 of group a, then 1 of
    b, which has not ended.
    """
    entries = {
        rank: [
            {
                "process_group": (word[0], "made up"),
                "collective_seq_id": int(word[1]),
                "record_id": place,
                "state": "scheduled" if word.endswith("…") else "completed",
            }
            for place, word in enumerate(line.split())
        ]
        for rank, line in enumerate(called)
    }
    return entries, groups


# Rare in runs, and each parts two ways of counting that are alike elsewhere: ranks behind in several groups,
# records that begin later, a dump taken a moment before another, a member that has called nothing.
MADE_UP = [
    _made_up(
        {"a": [0, 1, 2, 3], "b": [0, 1], "c": [2, 3]},
        ["a1 b1 a2 b2…", "a1 b1 a2 a3…", "c1 c2 c3 c4 a2 a3…", "a1 a2… c4 c5…"],
    ),
    _made_up({"a": [0, 1, 2, 3], "b": [0, 1]}, ["a1 a2 b1…", "a1 a2", "a1 a2", "a2"]),
    _made_up({"a": [0, 1, 2], "b": [0, 1]}, ["a1 b1 b2 a2…", "b1 b2 b3… ", "a1 a2…"]),
]


def _judge(attempt) -> Answer:
    runs = [stop(number, HIDDEN) for number in (4, 5, 3)]
    cases = [*map(_case, runs), _case(runs[0], kept=2), *MADE_UP]
    answers, truth = ask(attempt, cases), [who_never_came(*case) for case in cases]
    names = [*(f"run {stopped.number} with other ranks" for stopped in runs), "run 4 in a small buffer"]
    names += [f"made-up record {i}" for i in range(1, len(MADE_UP) + 1)]
    for name, answer in zip(names, answers):
        if not isinstance(answer, dict) or not all(
            isinstance(v, (list, tuple, set)) for v in answer.values()
        ):
            return wrong("no ranks by group", f"For {name} you return {answer!r}; {{group: ranks}}.")
    mine = [{g: sorted(ranks) for g, ranks in answer.items() if ranks} for answer in answers]
    figures = [(name, str(a), str(b)) for name, a, b in zip(names, mine, truth)]
    figures = [figure for figure in figures if figure[1] != figure[2]][:3] or figures[:3]
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
    minutes=8,
    hints=[
        "Go group by group. What is the last collective_seq_id of each member in this group?",
        "The highest of these is where the others wait. Who is below it?",
        "max((e['collective_seq_id'] for e in entries[rank] if e['process_group'][0] == group), default=0)",
    ],
)
