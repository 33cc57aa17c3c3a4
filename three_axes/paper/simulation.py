"""Simulates a schedule: computes when each operation runs, when a rank is idle, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from .schedules import Op, Schedule


@dataclass(frozen=True)
class Times:
    """How long each operation takes, in any unit: one number, or one for each stage.

    forward, input (I) and weight (W); a whole backward takes input + weight. send: from one rank to another;
    neither rank is busy during it. By default a backward takes twice a forward, and sends take no time.
    """

    forward: float | Sequence[float] = 1.0
    input: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    send: float = 0.0

    def of(self, kind: str, stage: int) -> float:
        """Time of one operation on a stage. kind: F, B, I or W; B takes I and W together."""
        at = lambda t: t[stage] if isinstance(t, Sequence) else t
        if kind == "F":
            return at(self.forward)
        return (kind in "BI") * at(self.input) + (kind in "BW") * at(self.weight)


class Run(NamedTuple):
    """One operation on the clock. `after` is the operation that it had to wait for, None if none."""

    op: Op
    start: float
    end: float
    after: Op | None


@dataclass(frozen=True, eq=False)
class Timeline:
    """A schedule with times, in arrays over all operations, rank after rank: start, end, and `after`, the
    number of the operation that each had to wait for, -1 if none. `runs[rank]` has the same, in order."""

    schedule: Schedule
    start: np.ndarray
    end: np.ndarray
    after: np.ndarray
    unit: str = "units of time"
    level_unit = "chunks in flight"

    @cached_property
    def runs(self) -> list[list[Run]]:
        """For each rank, its operations on the clock."""
        ops = [op for mine in self.schedule.ops for op in mine]
        columns = zip(ops, self.start.tolist(), self.end.tolist(), self.after.tolist())
        every = iter([Run(op, a, b, None if after < 0 else ops[after]) for op, a, b, after in columns])
        return [list(islice(every, len(mine))) for mine in self.schedule.ops]

    @cached_property
    def rows(self) -> list[list[tuple[str, str, float, float]]]:
        """For each rank (kind, label, start, end), for pictures: 3, on its second chunk 3', then 3''."""
        rows = []
        for rank, runs in enumerate(self.runs):
            stages = [stage for stage, at in enumerate(self.schedule.rank_of) if at == rank]
            label = lambda op: str(op.microbatch) + "'" * stages.index(op.stage)
            rows.append([(r.op.kind, label(r.op), r.start, r.end) for r in runs])
        return rows

    @cached_property
    def levels(self) -> list[list[tuple[float, int]]]:
        """For each rank (time, activations held): one from its forward's start until its backward's end."""
        rows = []
        for ops, runs in zip(self.schedule.ops, self.runs):
            times = (run.start if run.op.kind == "F" else run.end for run in runs)
            rows.append(list(zip([0.0, *times], _held(ops))))
        return rows

    def peak(self, rank: int) -> int:
        """The result of `in_flight`, under the name that pictures use."""
        return self.in_flight(rank)

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return float(self.end.max())

    @property
    def bubble(self) -> float:
        """Share of wall time in which a rank idles, mean over ranks: (p-1)/(m+p-1) for GPipe and 1F1B.

        (Some papers divide by the ideal time instead, which gives (p-1)/m; this property does not.)
        """
        return 1 - float((self.end - self.start).sum()) / (self.makespan * self.schedule.p)

    @property
    def longest_rank(self) -> float:
        """From a rank's own first start to its own last end, for the rank with the longest time.

        It is the time of a step if steps follow each other without a barrier: the "cost" in the Zero Bubble
        paper. With a barrier the time is `makespan`.
        """
        return max(runs[-1].end - runs[0].start for runs in self.runs)

    def in_flight(self, rank: int) -> int:
        """The most activations (of one microbatch and one chunk) that a rank holds at one time."""
        return max(_held(self.schedule.ops[rank]))

    @property
    def held(self) -> float:
        """The largest number of microbatches in flight on any rank, where a chunk counts as 1/v."""
        return max(self.in_flight(rank) for rank in range(self.schedule.p)) / self.schedule.v

    @property
    def critical_path(self) -> list[Run]:
        """Operations, first to last: each starts as soon as the one before allows, the last ends the
        schedule.
        """
        by_op = {run.op: (rank, i) for rank, runs in enumerate(self.runs) for i, run in enumerate(runs)}
        rank = max(range(self.schedule.p), key=lambda rank: self.runs[rank][-1].end)
        i = len(self.runs[rank]) - 1
        path = []
        while True:
            run = self.runs[rank][i]
            path.append(run)
            if run.after is not None:
                rank, i = by_op[run.after]
            elif i > 0:
                i -= 1
            else:
                return path[::-1]


def _held(ops: list[Op]) -> Iterator[int]:
    """Activations that a rank holds before its operations, and after each."""
    return accumulate(((op.kind == "F") - (op.kind in "BW") for op in ops), initial=0)


class Stuck(ValueError):
    """An order that can never finish. waits: (rank, operation, what it needs) for each blocked rank."""

    def __init__(self, waits: list[tuple[int, Op, Op]]):
        never = "rank {} can never start {}{} of stage {}"
        super().__init__("; ".join(never.format(rank, *op) for rank, op, _ in waits[:4]))
        self.waits = waits


def simulate(schedule: Schedule, times: Times = Times()) -> Timeline:
    """Compute when each operation runs, if every rank runs its operations in order, each as soon as its input
    has arrived.

    F needs the F of the stage before it; I and B need those of the stage after it, and the stage's own F; W
    needs its own I. Raises Stuck if an order cannot finish. All ranks that can continue do so together, in
    arrays: a million operations take about half a second.
    """
    every = [op for ops in schedule.ops for op in ops]
    kinds = np.frombuffer("".join(map(itemgetter(0), every)).encode(), np.uint8)
    microbatch, stage = (np.fromiter(map(itemgetter(k), every), int, len(every)) for k in (1, 2))
    lengths, lives = [len(ops) for ops in schedule.ops], np.array(schedule.rank_of)
    rank, last = np.repeat(np.arange(schedule.p), lengths), len(lives) - 1
    forward, weight = kinds == ord("F"), kinds == ord("W")
    back = ~(forward | weight)  # both I and B compute the gradient of a stage's input
    takes = np.empty(len(kinds))
    for kind in np.unique(kinds):
        at_stage = np.array([times.of(chr(kind), s) for s in range(last + 1)], float)
        takes[kinds == kind] = at_stage[stage[kinds == kind]]

    # done[k] is the time of result k, infinity until it is computed. Results are numbered by kind (F, then I
    # or B, then W), microbatch and stage. One more number means "no input needed", with time 0.
    each = (microbatch.max() + 1) * (last + 1)
    place = lambda what, at: what * each + microbatch * (last + 1) + at
    nothing = 3 * each
    gives = np.select([forward, weight], [place(0, stage), place(2, stage)], place(1, stage))
    own = np.select([forward, weight], [nothing, place(1, stage)], place(0, stage))
    from_before, from_behind = forward & (stage > 0), back & (stage < last)
    other = np.select([from_before, from_behind], [place(0, stage - 1), place(1, stage + 1)], nothing)
    away = (from_before & (lives[stage - 1] != rank)) | (
        from_behind & (lives[np.minimum(stage + 1, last)] != rank)
    )
    travels = np.where(away, times.send, 0.0)

    done = np.full(nothing + 1, np.inf)
    done[nothing] = 0.0
    start, waited, free = np.empty(len(kinds)), np.zeros(len(kinds), bool), np.zeros(schedule.p)
    ends = np.cumsum(lengths)
    at = ends - lengths  # each rank's next operation
    working = np.flatnonzero(at < ends)
    while len(working):
        now = at[working]
        arrives = done[other[now]] + travels[now]
        can = np.maximum(arrives, done[own[now]]) < np.inf
        if not can.all():
            if not can.any():
                lacks = np.where(done[own[now]] == np.inf, own[now], other[now]).tolist()
                needed = [Op("FIW"[k // each], k % each // (last + 1), k % (last + 1)) for k in lacks]
                raise Stuck(list(zip(working.tolist(), (every[i] for i in now), needed)))
            now, go, arrives = now[can], working[can], arrives[can]
        else:
            go = working
        waited[now] = arrives > free[go]
        start[now] = begin = np.maximum(free[go], arrives)
        free[go] = done[gives[now]] = begin + takes[now]
        at[go] += 1
        if (at[go] == ends[go]).any():
            working = np.flatnonzero(at < ends)
    number = np.full(nothing + 1, -1)
    number[gives] = np.arange(len(kinds))
    return Timeline(schedule, start, start + takes, np.where(waited, number[other], -1))


def paper(schedule: Schedule, work: float = 1.0) -> Timeline:
    """`simulate` with F, I and W of `work` each for all chunks of a rank, so of work/v for each chunk."""
    each = work / schedule.v
    return simulate(schedule, Times(each, each, each))
