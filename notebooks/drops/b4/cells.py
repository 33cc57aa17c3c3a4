"""Functions for the cells of drop b4's notebook; its exercises use some of them."""

from __future__ import annotations

from drops.b4.runs import SECONDS, Stopped, stop
from drops.b4.runs import verdict as verdict
from three_axes.files import rows_of
from three_axes.table import Table

# The seeds of the runs so far. A seed decides which rank differs; a wrong answer adds a new seed.
_deals = [0]


def deal() -> int:
    """The present seed, the last one."""
    return _deals[-1]


def look_twice(*numbers: int) -> Table:
    """For each run: the sequence numbers that its ranks had reached when it was stopped. The program then
    runs again for three times as long, unless no rank moved any more, and its numbers are added.
    """
    rows = []
    for number in numbers:
        first = stop(number, deal())
        rows.append([f"run {number}", _behind(first), _with_more_time(first)])
    return Table(["", "when it was stopped", f"given {3 * SECONDS:.0f} s"], rows)


def _with_more_time(first: Stopped) -> str:
    if first.stands:
        return "no rank moves"
    later = stop(first.number, deal(), 3 * SECONDS)
    moved = later is None or later.last_numbers != first.last_numbers
    return "they went on" if moved else _behind(later)


def _behind(stopped: Stopped) -> str:
    numbers = stopped.last_numbers
    rank = min(numbers, key=numbers.get)
    return f"rank {rank} at {numbers[rank]}, the others at {max(numbers.values())}"


def watchdog_logs() -> Table:
    """The figures of two public logs of NCCL's watchdog."""
    figures = lambda log: [f"{int(log['seq']):,}", f"{int(log['ran_ms']) / 1000:,.1f} s"]
    rows = [[log["log"], log["rank"], log["op"], *figures(log)] for log in rows_of("nccl_watchdog_logs.csv")]
    return Table(["log", "rank", "OpType", "SeqNum", "ran for"], rows)


def answer(run: Stopped) -> tuple[str, str]:
    """The arguments of `guess.reveal`: which rank of a run that hangs to look at first."""
    silent = [rank for rank, seen in enumerate(run.seen) if seen.finished]
    why = f"A rank that times out has come, and waits. Rank {silent[0]} had fewer batches: its loop is over."
    return "the one that reports nothing" if len(silent) == 1 else f"none of these: ranks {silent}", why
