"""What the cells of this drop show, and what they share with its practice."""

from __future__ import annotations

from drops.b4.runs import SECONDS, Stopped, stop
from drops.b4.runs import verdict as verdict
from three_axes.files import rows_of
from three_axes.table import Table

_deals = [0]  # the seeds that were dealt, the last one now


def deal() -> int:
    """The seed that is dealt now."""
    return _deals[-1]


def look_twice(*numbers: int) -> Table:
    """How far the ranks had come when the run was stopped, and when it was given three times as long, unless
    it is proven that none could go on. Runs as they are dealt now.
    """
    rows = []
    for number in numbers:
        first = stop(number, deal())
        rows.append([f"run {number}", _behind(first), _with_more_time(first)])
    return Table(["", "when it was stopped", f"given {3 * SECONDS:.0f} s"], rows)


def _with_more_time(first: Stopped) -> str:
    if first.is_proven:
        return "proven: no rank can go on"
    later = stop(first.number, deal(), 3 * SECONDS)
    moved = later is None or later.last_numbers != first.last_numbers
    return "they went on" if moved else _behind(later)


def _behind(stopped: Stopped) -> str:
    numbers = stopped.last_numbers
    rank = min(numbers, key=numbers.get)
    return f"rank {rank} at {numbers[rank]}, the others at {max(numbers.values())}"


def watchdog_logs() -> Table:
    """Two public logs of NCCL's watchdog, in figures."""
    figures = lambda log: [f"{int(log['seq']):,}", f"{int(log['ran_ms']) / 1000:,.1f} s"]
    rows = [[log["log"], log["rank"], log["op"], *figures(log)] for log in rows_of("nccl_watchdog_logs.csv")]
    return Table(["log", "rank", "OpType", "SeqNum", "ran for"], rows)


def answer(run: Stopped) -> tuple[str, str]:
    """What `reveal` takes: which rank of a run that stands still to look at first."""
    silent = [rank for rank, seen in enumerate(run.seen) if seen.finished]
    why = f"A rank that times out has come, and waits. Rank {silent[0]} had fewer batches: its loop is over."
    return "the one that reports nothing" if len(silent) == 1 else f"none of these: ranks {silent}", why
