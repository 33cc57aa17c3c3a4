"""Pipeline schedules: in which order a rank runs its forwards and backwards, and what that costs.

A schedule is a list of operations for each rank, nothing more. Here are the functions that
write such lists, and one simulator that says when each operation runs. The same lists drive
the real ranks of the course.

Letters: p ranks, m microbatches, v stages on each rank (its chunks), so p·v stages in all.
Stage 0 holds the embedding, stage p·v-1 the head. Unless a schedule says otherwise, stage k
is on rank k mod p, so that a microbatch goes round the ranks v times.

An operation is one of
    F   forward of one microbatch through one stage
    B   its whole backward
    I   only the gradient of the stage's input, which the stage before is waiting for
    W   only the gradients of the stage's weights, for which nobody waits
and B = I + W. Schedules that split the backward can put W where a rank would idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np


class Op(NamedTuple):
    """One operation. Its short name, as in pictures: 'F3' for microbatch 3, 'F3.1' on chunk 1."""

    kind: str
    microbatch: int
    stage: int


@dataclass(frozen=True)
class Schedule:
    """`ops[rank]`: what each rank runs, in order. `rank_of[stage]`: where a stage lives."""

    name: str
    m: int
    ops: list[list[Op]]
    rank_of: list[int]

    @property
    def p(self) -> int:
        return len(self.ops)

    @property
    def v(self) -> int:
        return len(self.rank_of) // self.p


# -- writing schedules ---------------------------------------------------------------------

def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019). Simple, and holds m microbatches at once."""
    _check(p, m)
    return _looped("GPipe", p, m, lambda rank: [
        *(Op("F", i, rank) for i in range(m)), *(Op("B", i, rank) for i in range(m))])


def one_f_one_b(p: int, m: int) -> Schedule:
    """Warm up with p-1-rank forwards, then one forward, one backward in turn (Narayanan et al. 2019).

    The same bubble as GPipe, but rank r never holds more than p-r microbatches.
    """
    _check(p, m)
    return _looped("1F1B", p, m, lambda rank: _in_turn(
        [Op("F", i, rank) for i in range(m)], [Op("B", i, rank) for i in range(m)], warmup=p - 1 - rank))


def interleaved(p: int, m: int, v: int) -> Schedule:
    """1F1B with v chunks on each rank (Narayanan et al. 2021, section 2.2): the bubble falls by v.

    Microbatches go round in groups of p. Raises ValueError unless m is a multiple of p, or less than p.
    """
    _check(p, m, v)
    return _looped("interleaved 1F1B", p, m, lambda rank: _in_turn(
        *_rounds(p, m, v, rank), warmup=(v - 1) * _per_round(p, m, v) + 2 * (p - 1 - rank)), v)


def looped_bfs(p: int, m: int, v: int) -> Schedule:
    """All microbatches through one chunk, then through the next (Lamy-Poirier 2022): GPipe for chunks."""
    _check(p, m, v)
    def order(rank):
        stages = range(rank, p * v, p)
        return [*(Op("F", i, k) for k in stages for i in range(m)),
                *(Op("B", i, k) for k in reversed(stages) for i in reversed(range(m)))]
    return _looped("looped BFS", p, m, order, v)


def zb_h1(p: int, m: int, v: int = 1) -> Schedule:
    """Zero bubble H1 (Qi et al. 2023): 1F1B whose weight gradients fill the gaps. Memory as 1F1B.

    Each rank lets its first `rank` weight gradients wait, so that input gradients travel
    sooner. With v > 1 chunks it is PyTorch's InterleavedZeroBubble.
    """
    _check(p, m, v)
    def order(rank):
        forwards, backwards = _rounds(p, m, v, rank)
        warmup = (v - 1) * _per_round(p, m, v) + p - 1 - rank
        return _late_weights(_in_turn(forwards, [b._replace(kind="I") for b in backwards], warmup), owed=rank)
    return _looped("ZB-H1", p, m, order, v)


def zb_h2(p: int, m: int) -> Schedule:
    """Zero bubble H2 (Qi et al. 2023): twice the warm-up, so that no rank waits for its first backward.

    Costs memory: every rank holds up to 2p-1 microbatches, counting those whose W waits. Gradients must be applied without
    a barrier between ranks for the bubble to go away altogether.
    """
    _check(p, m)
    return _looped("ZB-H2", p, m, lambda rank: _late_weights(_in_turn(
        [Op("F", i, rank) for i in range(m)], [Op("I", i, rank) for i in range(m)],
        warmup=2 * (p - 1 - rank)), owed=2 * rank))


def zb_v(p: int, m: int) -> Schedule:
    """Zero bubble V (Qi et al. 2023, section 6): two chunks a rank, down the ranks and back up.

    Rank r holds stages r and 2p-1-r, so the last stage's loss is on rank 0. Memory as 1F1B,
    and no bubble where F = I = W.
    """
    _check(p, m)
    lots = max(m, 2 * p - 1)  # the pattern is made for a full pipeline; what is too much is left out
    def order(rank):
        down, up = _chunk(rank), _chunk(2 * p - 1 - rank)
        ops = [down("F") for _ in range(2 * (p - rank) - 1)]
        for _ in range(rank):
            ops += [up("F"), down("F")]
        for _ in range(p - rank):
            ops += [up("F"), up("I"), up("W")]
        while up.done("F") < down.done("F") or down.done("F") < lots:
            if down.done("F") < lots:
                ops.append(down("F"))
            ops += [down("I"), down("W"), up("F"), up("I"), up("W")]
        for _ in range(rank):
            ops += [down("I"), up("I")]
        for _ in range(p - rank):
            ops += [down("I"), down("W")]
        ops += [up("W") for _ in range(up.done("I") - up.done("W"))]
        ops += [down("W") for _ in range(down.done("I") - down.done("W"))]
        return [op for op in ops if op.microbatch < m]
    return _v_shaped("ZB-V", p, m, order)


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe cut in half (DeepSeek-AI 2025): as ZB-V, with a forward and a backward run side by side.

    Raises ValueError unless m is at least 2p.
    """
    _check(p, m)
    if m < 2 * p:
        raise ValueError(f"DualPipe-V needs at least 2p = {2 * p} microbatches, not {m}")
    def order(rank):
        down, up = _chunk(rank), _chunk(2 * p - 1 - rank)
        ops = [down("F") for _ in range(2 * (p - 1 - rank))]
        for _ in range(rank + 1):
            ops += [down("F"), up("F")]
        for _ in range(p - 1 - rank):
            ops += [up("I"), up("W"), up("F")]
        for _ in range(m - 2 * p + rank + 1):
            ops += [down("F"), up("B"), up("F"), down("B")]
        for _ in range(p - 1 - rank):
            ops += [up("B"), up("F"), down("B")]
        late = []  # weight gradients that wait
        for i in range(2 * (rank + 1)):  # the second half runs without its weight gradients
            chunk = (up, down)[i % 2]
            if i > rank:
                ops.append(chunk("I"))
                late.append(chunk)
            else:
                ops.append(chunk("B"))
        for _ in range(p - 1 - rank):
            if late:
                ops.append(late.pop(0)("W"))
            ops.append(down("I"))
            late.append(down)
        return ops + [chunk("W") for chunk in late]
    return _v_shaped("DualPipe-V", p, m, order)


# name -> a function of p, m and v; v counts for the interleaved one only
MAKE: dict[str, Callable[[int, int, int], Schedule]] = {
    "GPipe": lambda p, m, v: gpipe(p, m), "1F1B": lambda p, m, v: one_f_one_b(p, m), "interleaved": interleaved,
    "ZB-H1": lambda p, m, v: zb_h1(p, m), "ZB-H2": lambda p, m, v: zb_h2(p, m), "ZB-V": lambda p, m, v: zb_v(p, m)}


def _looped(name: str, p: int, m: int, order: Callable[[int], list[Op]], v: int = 1) -> Schedule:
    return Schedule(name, m, [order(rank) for rank in range(p)], [k % p for k in range(p * v)])


def _v_shaped(name: str, p: int, m: int, order: Callable[[int], list[Op]]) -> Schedule:
    return Schedule(name, m, [order(rank) for rank in range(p)], [*range(p), *reversed(range(p))])


def _in_turn(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    ops = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        ops += [forward, backward]
    return ops + backwards[len(forwards) - warmup:]


def _late_weights(ops: list[Op], owed: int) -> list[Op]:
    """Put a W behind every I, each for the oldest I without one, once more than `owed` of them wait."""
    out, waiting = [], []
    for op in ops:
        out.append(op)
        if op.kind == "I":
            waiting.append(op)
            if len(waiting) > owed:
                out.append(waiting.pop(0)._replace(kind="W"))
    return out + [op._replace(kind="W") for op in waiting]


def _per_round(p: int, m: int, v: int) -> int:
    """Microbatches that go through a chunk before the rank turns to the next one: p, or a little more."""
    rounds = max(1, m // p) if v > 1 else 1
    if m % rounds:
        raise ValueError(f"{m} microbatches do not go round {p} ranks evenly; "
                         f"take a multiple of {p}, such as {m // p * p} or {(m // p + 1) * p}")
    return m // rounds


def _rounds(p: int, m: int, v: int, rank: int) -> tuple[list[Op], list[Op]]:
    """All forwards and all backwards of a rank, chunk by chunk in rounds of microbatches."""
    each = _per_round(p, m, v)
    starts = range(0, m, each)
    forwards = [Op("F", first + i, rank + p * c) for first in starts for c in range(v) for i in range(each)]
    backwards = [Op("B", first + i, rank + p * c) for first in starts for c in reversed(range(v)) for i in range(each)]
    return forwards, backwards


class _chunk:
    """One of a rank's chunks, which knows the next microbatch for each kind of operation."""

    def __init__(self, stage: int):
        self.stage, self.next = stage, dict.fromkeys("FIW", 0)

    def __call__(self, kind: str) -> Op:
        i = self.next["I" if kind == "B" else kind]
        for k in "IW" if kind == "B" else kind:
            self.next[k] += 1
        return Op(kind, i, self.stage)

    def done(self, kind: str) -> int:
        return self.next[kind]


def _check(p: int, m: int, v: int = 1) -> None:
    for name, value in (("ranks p", p), ("microbatches m", m), ("chunks v", v)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"the number of {name} is a whole number of at least 1, not {value!r}")


# -- running them on paper ----------------------------------------------------------------

@dataclass(frozen=True)
class Times:
    """How long each operation takes, in any unit: one number, or one for each stage.

    forward, input (I) and weight (W); a whole backward takes input + weight. send: from one rank to
    another, during which neither rank is busy. The defaults are the usual picture: backward twice
    forward, and links that cost nothing.
    """

    forward: float | Sequence[float] = 1.0
    input: float | Sequence[float] = 1.0
    weight: float | Sequence[float] = 1.0
    send: float = 0.0

    def of(self, kind: str, stage: int) -> float:
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
    """A schedule with times, in arrays over all operations, rank after rank: start, end, and `after`, the number of the operation that
    each had to wait for, -1 if none. `runs[rank]` has the same, in order."""

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
        every = iter([Run(op, start, end, None if after < 0 else ops[after])
                      for op, start, end, after in zip(ops, self.start.tolist(), self.end.tolist(), self.after.tolist())])
        return [list(islice(every, len(mine))) for mine in self.schedule.ops]

    @cached_property
    def rows(self) -> list[list[tuple[str, str, float, float]]]:
        """For each rank (kind, label, start, end), as pictures need it. A chunk after the first is marked: 3, 3', 3''."""
        return [[(r.op.kind, str(r.op.microbatch) + "'" * (sorted(k for k, at in enumerate(self.schedule.rank_of) if at == rank).index(r.op.stage)),
                  r.start, r.end) for r in runs] for rank, runs in enumerate(self.runs)]

    @cached_property
    def levels(self) -> list[list[tuple[float, int]]]:
        """For each rank (time, activations held from then on): a forward's from its start, until its backward ends."""
        found = []
        for runs in self.runs:
            held, steps = 0, [(0.0, 0)]
            for run in runs:
                held += (run.op.kind == "F") - (run.op.kind in "BW")
                steps.append((run.start if run.op.kind == "F" else run.end, held))
            found.append(steps)
        return found

    def peak(self, rank: int) -> int:
        """As `in_flight`: what a picture marks."""
        return self.in_flight(rank)

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return float(self.end.max())

    @property
    def bubble(self) -> float:
        """Share of wall time in which a rank idles, mean over ranks: (p-1)/(m+p-1) for GPipe and 1F1B.

        (Some papers divide by the ideal time instead, which gives (p-1)/m; this is never that.)
        """
        return 1 - float((self.end - self.start).sum()) / (self.makespan * self.schedule.p)

    @property
    def longest_rank(self) -> float:
        """From a rank's own first start to its own last end, for the rank that takes longest.

        The step's time where steps follow each other without a barrier: what the Zero Bubble
        paper calls cost. With a barrier it is `makespan`.
        """
        return max(runs[-1].end - runs[0].start for runs in self.runs)

    def in_flight(self, rank: int) -> int:
        """The most activations (one microbatch of one chunk each) that a rank holds at once."""
        held = most = 0
        for op in self.schedule.ops[rank]:
            held += (op.kind == "F") - (op.kind in "BW")
            most = max(most, held)
        return most

    @property
    def critical_path(self) -> list[Run]:
        """The chain of operations, first to last, none of which could start sooner: shorten one, and all ends sooner."""
        by_op = {run.op: (rank, i) for rank, runs in enumerate(self.runs) for i, run in enumerate(runs)}
        rank, i = max(((rank, len(runs) - 1) for rank, runs in enumerate(self.runs)), key=lambda at: self.runs[at[0]][-1].end)
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


class Stuck(ValueError):
    """An order that can never finish. `waits`: for each rank that stands still (rank, its next operation, what that needs)."""

    def __init__(self, waits: list[tuple[int, Op, Op]]):
        super().__init__("; ".join(f"rank {rank} can never start {op.kind}{op.microbatch} of stage {op.stage}" for rank, op, _ in waits[:4]))
        self.waits = waits


def simulate(schedule: Schedule, times: Times = Times()) -> Timeline:
    """When each operation runs, if every rank does its own in order, each as soon as what it needs has come.

    F needs the F of the stage before it; I and B need those of the stage after it, and the
    stage's own F; W needs its own I. Raises Stuck where an order cannot finish. All ranks that can go on do so together,
    in arrays: a million operations take about half a second.
    """
    every = [op for ops in schedule.ops for op in ops]
    kinds = np.frombuffer("".join(map(itemgetter(0), every)).encode(), np.uint8)
    microbatch, stage = (np.fromiter(map(itemgetter(k), every), int, len(every)) for k in (1, 2))
    lengths, lives = [len(ops) for ops in schedule.ops], np.array(schedule.rank_of)
    rank, last = np.repeat(np.arange(schedule.p), lengths), len(lives) - 1
    forward, weight = kinds == ord("F"), kinds == ord("W")
    back = ~(forward | weight)  # I and B answer the same need: the gradient of a stage's input
    takes = np.empty(len(kinds))
    for kind in np.unique(kinds):
        takes[kinds == kind] = np.array([times.of(chr(kind), s) for s in range(last + 1)], float)[stage[kinds == kind]]

    # What can be needed has a place in `done`, for its end. The last place is for what is there from the beginning.
    each = (microbatch.max() + 1) * (last + 1)
    place = lambda what, at: what * each + microbatch * (last + 1) + at
    nothing = 3 * each
    gives = np.select([forward, weight], [place(0, stage), place(2, stage)], place(1, stage))
    own = np.select([forward, weight], [nothing, place(1, stage)], place(0, stage))
    from_before, from_behind = forward & (stage > 0), back & (stage < last)
    other = np.select([from_before, from_behind], [place(0, stage - 1), place(1, stage + 1)], nothing)
    away = (from_before & (lives[stage - 1] != rank)) | (from_behind & (lives[np.minimum(stage + 1, last)] != rank))
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
                _stuck(schedule, at - (ends - lengths), lambda need: done[_place(need, each, last)] == np.inf)
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


def _place(op: Op, each: int, last: int) -> int:
    return {"F": 0, "I": 1, "W": 2}[op.kind] * each + op.microbatch * (last + 1) + op.stage


def _stuck(schedule: Schedule, done: Sequence[int], missing: Callable[[Op], bool]) -> None:
    """Raise Stuck. done[rank]: how many of its operations have run."""
    last = len(schedule.rank_of) - 1
    left = [(rank, ops[n]) for rank, (ops, n) in enumerate(zip(schedule.ops, done)) if n < len(ops)]
    raise Stuck([(rank, op, next(need for need in _needs(op, last) if missing(need))) for rank, op in left])


def paper(schedule: Schedule, work: float = 1.0) -> Timeline:
    """`simulate` where F, I and W of a stage take `work` each, and 1/v of that for each of its v chunks."""
    each = work / schedule.v
    return simulate(schedule, Times(each, each, each))


def held(timeline: Timeline) -> float:
    """The most microbatches in flight on any rank, a chunk counting as 1/v."""
    return max(timeline.in_flight(r) for r in range(timeline.schedule.p)) / timeline.schedule.v


def _needs(op: Op, last: int) -> Iterator[Op]:
    if op.kind == "F":
        if op.stage > 0:
            yield op._replace(stage=op.stage - 1)
    elif op.kind == "W":
        yield op._replace(kind="I")
    else:
        yield op._replace(kind="F")
        if op.stage < last:
            yield op._replace(kind="I", stage=op.stage + 1)
