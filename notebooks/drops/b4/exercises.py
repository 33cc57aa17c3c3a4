"""Beyond, b4: jobs that hang: which rank never called a collective, on which line, and why."""

from __future__ import annotations

import torch
import torch.distributed as dist

from drops.b4.runs import RANKS, RUNS, SHOWN, SLOW, Stopped, odd_one, seed_of, source, stop
from drops.b4.runs import verdict as verdict
from helpers.practice import (
    Answer,
    Asked,
    Exercise,
    OnRanks,
    Run,
    facts_so_far,
    first,
    noting_help,
    right,
    wrong,
)

from . import cells
from .cells import deal

# -- practice: who never came ---------------------------------------------------------------------


def who_never_came(entries, members):
    """Return {group: ranks}: the ranks, in rising order, that have not called what others of the group have.

    entries: a dict, rank -> its flight record, a list of dicts, oldest first: entry["process_group"][0] is
    the group, entry["collective_seq_id"] the sequence number, entry["state"] "completed" if it has ended. Old
    entries may have been overwritten. members[group]: its ranks.
    """
    missing = {}
    for group, ranks in members.items():
        numbers = {
            rank: [e["collective_seq_id"] for e in entries[rank] if e["process_group"][0] == group]
            for rank in ranks
        }
        # The latest number, whatever its state: a rank that waits in a collective has called it.
        last = {rank: max(mine, default=0) for rank, mine in numbers.items()}
        behind = [rank for rank in ranks if last[rank] < max(last.values())]
        if behind:
            missing[group] = behind
    return missing


HIDDEN = 51  # a seed that no cell shows


def _case(stopped: Stopped, kept: int | None = None) -> tuple[dict, dict]:
    """(entries, members) of a run. kept: the number of entries that a small buffer still has; None: all."""
    entries = {r: record["entries"] for r, record in stopped.dumps.items()}
    return {r: mine[-(kept or len(mine)) :] for r, mine in entries.items()}, stopped.groups


def _made_up(groups: dict[str, list[int]], called: list[str]) -> tuple[dict, dict]:
    """(entries, members) from a line for each rank: 'a1 a2 b1…' called numbers 1 and 2 of group a, then 1 of
    b, which has not ended.
    """

    def entry(place: int, word: str) -> dict:
        state = "scheduled" if word.endswith("…") else "completed"
        names = {"process_group": (word[0], "made up"), "collective_seq_id": int(word[1])}
        return names | {"record_id": place, "state": state}

    return {r: [entry(*one) for one in enumerate(line.split())] for r, line in enumerate(called)}, groups


# Records that are rare in runs, on which some wrong ways of counting fail.
MADE_UP = {
    "ranks behind in three groups": _made_up(
        {"a": [0, 1, 2, 3], "b": [0, 1], "c": [2, 3]},
        ["a1 b1 a2 b2…", "a1 b1 a2 a3…", "c1 c2 c3 c4 a2 a3…", "a1 a2… c4 c5…"],
    ),
    "a member that called nothing; a record that begins later": _made_up(
        {"a": [0, 1, 2, 3], "b": [0, 1]}, ["a1 a2 b1…", "a1 a2", "a1 a2", "a2"]
    ),
    "the last entries are of different groups": _made_up(
        {"a": [0, 1, 2], "b": [0, 1]}, ["a1 b1 b2 a2…", "b1 b2 b3… ", "a1 a2…"]
    ),
    "two ranks behind, not equally far": _made_up({"a": [0, 1, 2]}, ["a1 a2 a3…", "a1 a2…", "a1 a2 a3 a4…"]),
}
CASES = [
    "run 4 with other ranks",
    "run 5, which has two groups",
    "run 3, where all numbers are equal",
    "run 4 in a small buffer",
    *MADE_UP,
]


def _records() -> list[tuple[dict, dict]]:
    runs = [stop(number, HIDDEN) for number in (4, 5, 3)]
    return [*map(_case, runs), _case(runs[0], kept=2), *MADE_UP.values()]


def _by_group(answer) -> dict[str, list[int]]:
    if not all(isinstance(ranks, (list, tuple, set)) for ranks in answer.values()):
        raise TypeError("no ranks by group")
    return {group: sorted(ranks) for group, ranks in answer.items() if ranks}


def _three_records(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    """The first three records with another answer than the solution's; if there are none, the first three."""
    rows = [(name, str(a), str(b)) for name, a, b in zip(CASES, run.values, truth.values)]
    return ([row for row in rows if row[1] != row[2]] or rows)[:3]


def _named(run: Run, truth: Run) -> tuple[str, str] | None:
    """(which ranks are named and should not be, or the reverse, the first of them with its numbers)."""
    extra, left_out = [], []
    for case, (entries, members), mine, meant in zip(CASES, _records(), run.values, truth.values):
        for group, ranks in members.items():
            named, behind = (set(answer.get(group, ())) for answer in (mine, meant))
            numbers = [
                [e["collective_seq_id"] for e in entries[r] if e["process_group"][0] == group] for r in ranks
            ]
            last = dict(zip(ranks, (max(of_rank, default=0) for of_rank in numbers)))
            says = f"{case}, group {group}: last numbers by rank are {last}, and you name {sorted(named)}."
            extra += [says] if named - behind else []
            left_out += [says] if behind - named else []
    if not extra and not left_out:
        return None
    if extra and left_out:
        return "not the ranks that are behind", extra[0]
    return ("ranks named that are not behind", extra[0]) if extra else ("behind, and not named", left_out[0])


never = Asked(
    "who never came",
    who_never_came,
    minutes=8,
    hints=[
        "Go group by group. What is the last collective_seq_id of each member in this group?",
        "The highest of these is where the others wait. Who is below it?",
        "max((e['collective_seq_id'] for e in entries[rank] if e['process_group'][0] == group), default=0)",
    ],
    cases=_records,
    reads=_by_group,
    praise="Right on runs that you have not seen, also where a small buffer has lost the beginning. (Where"
    " all came and the numbers are the same, as in run 3, compare the names.)",
    figures=_three_records,
    finds=_named,
)


# -- practice: the hang clinic --------------------------------------------------------------------

CAUSES = (
    "a branch on one rank's data",
    "a save on one rank only",
    "an exception swallowed",
    "batches of unequal number",
    "two orders on two groups",
    "a wrong split",
    "only slow",
    "the timeout is too short",
    "the network",
)
TOO_SHORT, NETWORK = CAUSES[-2:]
# For each of the first six causes the sign that a run with this cause has, and no other run.
SIGNS = (
    "an `if` on x or y",
    "a save",
    "an `except`",
    "a rank whose loop is over",
    "a second group",
    "an all-to-all",
)
# Run -> texts in the lines that send a rank another way. Ranks wait in none of them.
LINES = {
    1: ("if (y > 0).any()",),
    2: ("if step == save_at",),
    3: ("except OSError", "read(seed"),  # the call that fails, and the clause that hides it
    4: ("in shard(",),
    5: ("in ready(",),
    6: ("route(seed",),
    7: ("fetch(seed",),
}
ENOUGH = 3  # runs that a reader must name


def ward() -> dict[int, Stopped]:
    """Number -> the record of each of the seven runs, with the seed in use."""
    return {number: stop(number, deal()) for number in RUNS}


def truth(number: int, seed: int | None = None) -> tuple[int, int, str]:
    """(rank, line, cause) of a run, with this seed; None: with the seed in use."""
    rank, _ = odd_one(seed_of(number, deal() if seed is None else seed))
    return rank, lines_of(number)[0], CAUSES[number - 1]


def lines_of(number: int) -> list[int]:
    """The numbers of the lines that may be named, the best first."""
    text = source(number).splitlines()
    return [
        i for part in LINES[number] for i, line in enumerate(text, 1) if part in line and "import" not in line
    ]


def diagnoses():
    """{run: (rank, line, cause)} of at least three of the runs, without the one that was shown.

    rank: the one that caused it. line: of the script, one that sends this rank another way: an `if`, a
    `for`, a call, an `except`; not one in which ranks wait. Of a call that fails and the `except` around it
    either is right. cause: of b4.CAUSES.
    """
    from collections import Counter

    from drops import b4

    def odd(stopped):
        # The last number of each rank, and the name under it: three of four have the same.
        last = {}
        for rank, record in stopped.dumps.items():
            entry = record["entries"][-1]
            last[rank] = entry["collective_seq_id"], entry["profiling_name"]
        (most, _), *_ = Counter(last.values()).most_common()
        return next(rank for rank in last if last[rank] != most)

    # Read in each script: the line that can send one rank another way, and what it depends on.
    read = {
        1: (7, "a branch on one rank's data"),  # y of this rank's batch
        2: (10, "a save on one rank only"),  # rank == writer
        3: (11, "an exception swallowed"),  # this rank goes to the barrier without its all_reduce
    }
    ward = b4.ward()
    return {run: (odd(ward[run]), *read[run]) for run in read}


def _diagnosed(attempt) -> Answer:
    helped: list[str] = []
    try:
        known = noting_help(attempt, truth, False, helped)()
    except Exception as e:  # noqa: BLE001  the reader's code
        return Answer("crashed", f"{type(e).__name__}: {e}")
    if malformed := _malformed(known):
        return wrong("no diagnoses", malformed)
    known = {number: answer for number, answer in known.items() if number != SHOWN}
    as_dealt = lambda seed: all(truth(number, seed)[0] == rank for number, (rank, *_) in known.items())
    if len(cells._deals) > 1 and not as_dealt(deal()) and as_dealt(cells._deals[-2]):
        return wrong(
            "an answer of the last deal",
            "The ranks were dealt anew. Run ward = b4.ward() again, and look at the runs again.",
        )
    for number, answer in known.items():
        if mistaken := _mistaken(stop(number, deal()), *answer):
            cells._deals.append(deal() + 1)
            name, text = mistaken
            again = "The ranks are now dealt anew: run ward = b4.ward() and look again."
            return wrong(name, f"Run {number}: {text} {again}")
    all_ = len(RUNS) - 1
    answer = right(
        f"{len(known)} of {all_} runs named. "
        + ("The others wait for you." if len(known) < all_ else "The ward is empty."),
        *((f"run {n}", f"rank {rank}, line {line}: {cause}", "") for n, (rank, line, cause) in known.items()),
    )
    answer.helped = helped[0] if helped else ""
    return answer


def _malformed(answered) -> str:
    """What is wrong with the form of an answer; '' if nothing is."""
    if not isinstance(answered, dict):
        return f"You return {answered!r}; return {{run: (rank, line, cause)}}."
    for number, answer in answered.items():
        if number not in RUNS:
            return f"There is no run {number!r}: they are 1 to 7."
        if not (isinstance(answer, (tuple, list)) and len(answer) == 3 and answer[0] in range(RANKS)):
            return f"Run {number}: {answer!r} is not (rank, line, cause), with a rank from 0 to 3."
        if answer[2] not in CAUSES:
            return f"Run {number}: {answer[2]!r} is none of b4.CAUSES: {', '.join(CAUSES)}."
    named = len(answered.keys() - {SHOWN})
    without = f", without {SHOWN}, which was shown" if SHOWN in answered else ""
    return f"You name {named} of the runs{without}. Name {ENOUGH} of the others." if named < ENOUGH else ""


def _mistaken(stopped: Stopped, rank, line, cause) -> tuple[str, str] | None:
    """(name, text) of what is wrong with a diagnosis; None if nothing is."""
    number, (guilty, _, why) = stopped.number, truth(stopped.number)
    see = f"b4.look_twice({number}) shows how far the ranks come in three times as long."
    waits_in = {s.where["line"].number for s in stopped.seen if s.where and s.where["in"]}
    if cause == TOO_SHORT and stopped.dead:
        return "raising the timeout", f"rank {stopped.dead[0]} died. No timeout was reached."
    if cause == TOO_SHORT and number == SLOW:
        text = "given longer it ends, and will be late again. Which rank is slow, where?"
        return "raising the timeout", text
    if cause == TOO_SHORT:
        return "raising the timeout", f"nobody is on the way, so no timeout is long enough. {see}"
    if cause == NETWORK:
        return (
            "blaming the network",
            "over this network the ranks met in every number before. Now one of them calls something else, or"
            " nothing. Look at the names and numbers first.",
        )
    if rank != guilty and rank in stopped.dead:
        return (
            "blaming the rank that died",
            f"rank {rank} died because more rows came than it had room for. Who sent too many? Look at the"
            " sizes in the records.",
        )
    if rank != guilty and rank in stopped.dumps and stopped.waits(rank):
        return (
            "blaming the rank that timed out",
            f"rank {rank} waits in {stopped.doing(rank)}, where its script had to bring it. Ask who is not"
            " there: a number that is missing, or another name than most have.",
        )
    if rank != guilty:
        return (
            "a rank that did as the others",
            f"rank {rank!r} did what the others did. Compare the last numbers and names.",
        )
    if number == SLOW and cause != why:
        return "slow taken for stopped", f"rank {rank} is on its way: given longer, it comes. {see}"
    if cause == CAUSES[SLOW - 1] != why:
        return "stopped taken for slow", f"rank {rank} will never come, however long you wait. {see}"
    if line not in lines_of(number) and line in waits_in:
        return (
            "the line where ranks wait",
            f"in line {line} ranks wait. Which line before it sends rank {rank} another way?",
        )
    if line not in lines_of(number):
        return (
            "a line at which the rank does not part",
            f"rank {rank} it is. But line {line!r} does not send this rank another way.",
        )
    if cause == why:
        return None
    sign = SIGNS[CAUSES.index(cause)]
    text = f"rank and line are right. But {cause!r} needs {sign}, and this run has none."
    return "a cause without its sign", text


clinic = Exercise(
    "the hang clinic",
    diagnoses,
    _diagnosed,
    minutes=10,
    hints=[
        "Show a run with ward[3]. First the table: is a number missing, or does a name differ?",
        "The rank that differs is the one to look at. In the script, which line can send this rank another"
        " way than the others?",
        "The cause is what that line depends on: data, a rank's number, an exception, a length, an order, a"
        " count. b4.CAUSES lists them.",
    ],
)


# -- practice: a loop that all leave together -----------------------------------------------------


def train(batches, step):
    """Call step(batch), which sums gradients over all ranks, until any rank has no batch left.

    batches: an iterator, of more than fit in memory together. How many each rank has is not known.
    """
    while True:
        batch = next(batches, None)
        # Nobody may begin a step that not all can end: one number says whether all have a batch.
        left = torch.tensor(float(batch is not None))
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        if not left:
            return
        step(batch)


BATCHES = [(6, 6, 4, 6), (3, 3, 3, 3), (2, 5, 5, 4), (3, 0, 1, 3)]  # on each rank


def _to_train(rank: int, n: int, *numbers: int) -> list[tuple]:
    facts_so_far().update(done=(done := []), ahead=0)

    def batches():
        for batch in range(numbers[rank]):
            facts_so_far()["ahead"] = max(facts_so_far()["ahead"], batch - len(done))
            yield batch

    def step(batch):
        if batch is None:
            raise ValueError("step() was called with None, which is no batch")
        done.append(batch)
        dist.all_reduce(torch.ones(8))

    return [(batches(), step)]


def _done(run: Run) -> list[list[int]]:
    """The batches that each rank has trained on, in order."""
    return [facts["values"][0] for facts in run.ranks]


def _left_out(run: Run, truth: Run) -> bool:
    """Whether a rank did not do the steps that all ranks can do together, each with its next batch. It is
    right too if each rank does all its batches, and ranks without one still take part, as with DDP's join().
    """
    return _done(run) != _done(truth) and _done(run) != [list(range(number)) for number in run.tried[1:]]


def _says_timeout(function) -> bool:
    """Whether a name or a string in the function's code contains "timeout"."""
    code = getattr(function, "__code__", None)
    return bool(code) and "timeout" in str((code.co_names, code.co_consts))


def _found(run: Run, truth: Run) -> tuple[str, str] | None:
    if run.error:
        return _found_in_hang(run) if run.error.kind in ("timeout", "deadlock") else _do_not_match(run)
    return first(
        {
            "a batch trained on twice": any(len({*mine}) < len(mine) for mine in _done(run)),
            "batches left out": _left_out(run, truth),
            "all batches read before the first step": any(facts["ahead"] > 2 for facts in run.ranks),
        }
    )


def _do_not_match(run: Run) -> tuple[str, str] | None:
    return first({"two collectives that meet": "tensors that do not match" in str(run.error)})


def _found_in_hang(run: Run) -> tuple[str, str]:
    """The mistake, and a text on the batches with which the ranks hang."""
    inside = [s.where["in"] for s in run.error.seen if s.where and s.where["in"]]
    several = len({(at["op"], str(at["shape"])) for at in inside}) > 1
    name, _ = first(
        {
            "raising the timeout": _says_timeout(run.attempt),
            "a barrier more": any(at["op"] == "barrier" for at in inside),
            "a rank that stops alone": any(s.finished for s in run.error.seen),
            "two collectives that meet": several or bool(_do_not_match(run)),
            "another end": True,
        }
    )
    return name, f"with {', '.join(map(str, run.tried[1:]))} batches they stand still."


mended = OnRanks(
    "a loop that all leave together",
    train,
    minutes=6,
    hints=[
        "A rank that has no batch left must say so, in a collective that all ranks call, before each step.",
        "next(batches, None) is None at the end. Send 1.0 or 0.0 around: what is the least of them?",
        "dist.all_reduce(left, op=dist.ReduceOp.MIN), and return where it is 0.",
    ],
    tries=tuple((4, *numbers) for numbers in BATCHES),
    inputs=_to_train,
    sees=lambda arguments, answer: facts_so_far()["done"],
    compares=False,
    praise="Every rank learns before each step whether all have a batch, and all leave together.",
    figures=lambda run, truth: [
        (
            f"steps on {', '.join(map(str, run.tried[1:]))} batches",
            str([len(mine) for mine in _done(run)]),
            str([min(run.tried[1:])] * run.n),
        )
    ],
    finds=_found,
)
