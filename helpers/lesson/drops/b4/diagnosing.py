"""b4's second practice: rank, line and cause of runs that are dealt anew after a wrong answer."""

from __future__ import annotations

from ...practice import Answer, Exercise, right, wrong
from .loader import odd_one
from .runs import RANKS, RUNS, SECONDS, SHOWN, SLOW, Stopped, seed_of, source, stop

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
# run -> what stands in the lines that part the rank from the others.
LINES = {
    1: ("if (y > 0).any()",),
    2: ("if step == save_at", "all_gather"),
    3: ("except OSError", "pass", "read(seed"),
    4: ("in shard(",),
    5: ("in ready(",),
    6: ("route(seed", "all_to_all"),
    7: ("fetch(seed",),
}
ENOUGH = 3
_deals = [0]  # the seeds that were dealt, the last one now


def deal() -> int:
    """The seed that is dealt now."""
    return _deals[-1]


def ward() -> dict[int, Stopped]:
    """Number -> what is left of each of the seven runs, as they are dealt now."""
    return {number: stop(number, deal()) for number in RUNS}


def truth(number: int, seed: int | None = None) -> tuple[int, int, str]:
    """(rank, line, cause) of a run as it is dealt now, or was with another seed."""
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

    rank: whose doing it is. line: of the script, where this rank parts from the others. cause: of b4.CAUSES.
    """
    from helpers.lesson.drops import b4

    return {run: b4.truth(run) for run in (1, 2, 3)}


def _judge(attempt) -> Answer:
    try:
        answered = attempt()
    except Exception as e:  # noqa: BLE001  the reader's code
        return Answer("crashed", f"{type(e).__name__}: {e}")
    if malformed := _malformed(answered):
        return wrong("no diagnoses", malformed)
    known = dict(answered)
    if len(_deals) > 1 and any(known[n][0] != truth(n)[0] for n in known):
        if all(known[n][0] == truth(n, _deals[-2])[0] for n in known):
            return wrong(
                "an answer of the last deal",
                "The ranks were dealt anew. Run ward = b4.ward() again, and look at the runs again.",
            )
    for number, answer in known.items():
        if mistaken := _told(stop(number, deal()), *answer):
            _deals.append(deal() + 1)
            name, text, *figures = mistaken
            again = " The ranks are now dealt anew: run ward = b4.ward() and look again."
            return wrong(name, f"Run {number}: {text}{again}", *figures)
    return right(
        f"{len(known)} of {len(RUNS) - 1} runs named."
        + (" The others wait for you." if len(known) < len(RUNS) - 1 else " The ward is empty."),
        *((f"run {n}", f"rank {rank}, line {line}: {cause}", "") for n, (rank, line, cause) in known.items()),
    )


def _malformed(answered) -> str:
    """What is wrong with the form of an answer; '' if nothing is."""
    if not isinstance(answered, dict):
        return f"You return {answered!r}; return {{run: (rank, line, cause)}}."
    for number, answer in answered.items():
        if number not in RUNS or number == SHOWN:
            return f"There is no run {number!r} to name: they are 1 to 7, without {SHOWN}, which was shown."
        if not (isinstance(answer, (tuple, list)) and len(answer) == 3):
            return f"Run {number}: {answer!r} is not (rank, line, cause)."
        if answer[0] not in range(RANKS):
            return f"Run {number}: there is no rank {answer[0]!r}, in (rank, line, cause). They are 0 to 3."
        if answer[2] not in CAUSES:
            return f"Run {number}: {answer[2]!r} is none of b4.CAUSES: {', '.join(CAUSES)}."
    if len(answered) < ENOUGH:
        return f"You name {len(answered)} of the runs. Name {ENOUGH} at least."
    return ""


def _told(stopped: Stopped, rank, line, cause) -> tuple | None:
    """(name, text, *figures) of what is wrong with a diagnosis; None if nothing is."""
    number = stopped.number
    guilty, _, why = truth(number)
    if cause == TOO_SHORT:
        return _given_longer(stopped)
    if cause == NETWORK:
        return (
            "blaming the network",
            "over this network the ranks met in every number before. Now one of them calls something else, or"
            " nothing. Look at the names and numbers first.",
        )
    if rank in stopped.dead and rank != guilty:
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
            (f"what rank {rank} does", stopped.doing(rank), ""),
        )
    if rank != guilty:
        return "another rank", f"rank {rank!r} did what the others did. Compare the last numbers and names."
    if line not in lines_of(number):
        waiting = {s.where["line"].number for s in stopped.seen if s.where and s.where["in"]}
        if line in waiting:
            return (
                "the line where ranks wait",
                f"line {line} is where ranks wait. Where did rank {rank} part from the others before that?",
            )
        return (
            "another line",
            f"rank {rank} it is. But it is not line {line!r} that sends this rank another way.",
        )
    if cause == why:
        return None
    if number == SLOW:
        return (
            "slow taken for stopped",
            f"rank {rank} is on its way: given longer, it comes. b4.look_twice({number}) shows it.",
        )
    if why != cause == CAUSES[SLOW - 1]:
        return (
            "stopped taken for slow",
            f"rank {rank} will never come: b4.look_twice({number}) shows the same numbers later.",
        )
    return "another cause", f"rank and line are right. Why does line {line} part the ranks? Not by {cause!r}."


def _given_longer(stopped: Stopped) -> tuple:
    """What came of a run with three times as long."""
    name = "raising the timeout"
    if stopped.dead:
        return name, f"rank {stopped.dead[0]} died. No timeout was reached."
    later = stop(stopped.number, stopped.seed, 3 * SECONDS)
    if stopped.number == SLOW:
        return (
            name,
            "given longer it ends, and will be late again. That is no cause: which rank is slow, and in which"
            " line?",
        )
    show = lambda s: ", ".join(map(str, s.last_numbers.values()))
    return (
        name,
        "given three times as long, the ranks stand at the same numbers. Nobody is on the way, so no timeout"
        " is long enough.",
        (f"last numbers after {SECONDS:.0f} s", show(stopped), ""),
        (f"after {3 * SECONDS:.0f} s", show(later), ""),
    )


clinic = Exercise(
    "the hang clinic",
    diagnoses,
    _judge,
    minutes=10,
    hints=[
        "Show a run with ward[3]. First the table: is a number missing, or does a name differ?",
        "The rank that differs is the one to look at. In the script, which line can send this rank another"
        " way than the others?",
        "The cause is what that line depends on: data, a rank's number, an exception, a length, an order, a"
        " count. b4.CAUSES lists them.",
    ],
)
