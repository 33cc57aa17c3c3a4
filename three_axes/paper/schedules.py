"""Pipeline schedules: in which order a rank runs its forwards and backwards.

A schedule is a list of operations for each rank, nothing more. The functions of this module write such lists.
`simulation` computes when each operation runs, and the real ranks of the course run the same lists.

Letters: p ranks, m microbatches, v stages on each rank (its chunks), so p·v stages in all. Stage 0 holds the
embedding, stage p·v-1 the head. Unless a schedule says otherwise, stage k is on rank k mod p, so that a
microbatch goes round the ranks v times.

An operation is one of
    F   forward of one microbatch through one stage
    B   its whole backward
    I   only the gradient of the stage's input, which the stage before is waiting for
    W   only the gradients of the stage's weights, for which no stage waits
and B = I + W. Schedules that split the backward can put W where a rank would idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Op(NamedTuple):
    """One operation. Its short name, as in pictures: 'F3' for microbatch 3, 'F3.1' on chunk 1."""

    kind: str
    microbatch: int
    stage: int


@dataclass(frozen=True)
class Schedule:
    """`ops[rank]`: what each rank runs, in order. `rank_of[stage]`: the rank that holds a stage."""

    name: str
    m: int
    ops: list[list[Op]]
    rank_of: list[int]

    @property
    def p(self) -> int:
        """The number of ranks."""
        return len(self.ops)

    @property
    def v(self) -> int:
        """The number of stages on each rank: its chunks."""
        return len(self.rank_of) // self.p


# -- writing schedules ---------------------------------------------------------------------


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019). A rank holds m microbatches at once."""
    _check(p, m)
    return _looped("GPipe", p, m, lambda rank: _every("F", m, rank) + _every("B", m, rank))


def one_f_one_b(p: int, m: int) -> Schedule:
    """Warm up with p-1-rank forwards, then one forward, one backward in turn (Narayanan et al. 2019).

    The same bubble as GPipe, but rank r never holds more than p-r microbatches.
    """
    _check(p, m)
    order = lambda rank: _in_turn(_every("F", m, rank), _every("B", m, rank), warmup=p - 1 - rank)
    return _looped("1F1B", p, m, order)


def interleaved(p: int, m: int, v: int) -> Schedule:
    """1F1B with v chunks on each rank (Narayanan et al. 2021, section 2.2): the bubble is v times smaller.

    Microbatches go round in m // p equal groups. Raises ValueError if m cannot be divided so.
    """
    _check(p, m, v)

    def order(rank):
        warmup = (v - 1) * _per_round(p, m, v) + 2 * (p - 1 - rank)
        return _in_turn(*_rounds(p, m, v, rank), warmup)

    return _looped("interleaved 1F1B", p, m, order, v)


def zb_h1(p: int, m: int, v: int = 1) -> Schedule:
    """Zero bubble H1 (Qi et al. 2023): 1F1B whose weight gradients fill the gaps.

    Rank r delays r weight gradients, so that input gradients are sent sooner. Counting those whose W waits,
    every rank holds up to p microbatches, as only the first does in 1F1B. With v > 1 chunks it is PyTorch's
    InterleavedZeroBubble.
    """
    _check(p, m, v)

    def order(rank):
        forwards, backwards = _rounds(p, m, v, rank)
        warmup = (v - 1) * _per_round(p, m, v) + p - 1 - rank
        return _late_weights(_in_turn(forwards, [b._replace(kind="I") for b in backwards], warmup), owed=rank)

    return _looped("ZB-H1", p, m, order, v)


def zb_h2(p: int, m: int) -> Schedule:
    """Zero bubble H2 (Qi et al. 2023): twice the warm-up, so that no rank waits for its first backward.

    It needs more memory: every rank holds up to 2p-1 microbatches, counting those whose W waits. The bubble
    is 0 only if the optimizer steps without a barrier between ranks.
    """
    _check(p, m)

    def order(rank):
        in_turn = _in_turn(_every("F", m, rank), _every("I", m, rank), warmup=2 * (p - 1 - rank))
        return _late_weights(in_turn, owed=2 * rank)

    return _looped("ZB-H2", p, m, order)


def zb_v(p: int, m: int) -> Schedule:
    """Zero bubble V (Qi et al. 2023, section 6): two chunks a rank, down the ranks and back up.

    Rank r holds stages r and 2p-1-r, so the loss is on rank 0. Every rank holds up to p microbatches. If
    F = I = W, and the optimizer steps without a barrier between ranks, the bubble is 0.
    """
    _check(p, m)
    # The pattern below needs a full pipeline. Microbatches from m on are left out at the end.
    lots = max(m, 2 * p - 1)

    def order(rank):
        down, up = _Chunk(rank), _Chunk(2 * p - 1 - rank)
        ops = [down("F") for _ in range(2 * (p - rank) - 1)]
        for _ in range(rank):
            ops += [up("F"), down("F")]
        for _ in range(p - rank):
            ops += [up("F"), up("I"), up("W")]
        while up.done["F"] < down.done["F"] or down.done["F"] < lots:
            if down.done["F"] < lots:
                ops.append(down("F"))
            ops += [down("I"), down("W"), up("F"), up("I"), up("W")]
        for _ in range(rank):
            ops += [down("I"), up("I")]
        for _ in range(p - rank):
            ops += [down("I"), down("W")]
        ops += [up("W") for _ in range(up.done["I"] - up.done["W"])]
        ops += [down("W") for _ in range(down.done["I"] - down.done["W"])]
        return [op for op in ops if op.microbatch < m]

    return _v_shaped("ZB-V", p, m, order)


def _looped(name: str, p: int, m: int, order: Callable[[int], list[Op]], v: int = 1) -> Schedule:
    return Schedule(name, m, [order(rank) for rank in range(p)], [k % p for k in range(p * v)])


def _v_shaped(name: str, p: int, m: int, order: Callable[[int], list[Op]]) -> Schedule:
    return Schedule(name, m, [order(rank) for rank in range(p)], [*range(p), *reversed(range(p))])


def _every(kind: str, m: int, stage: int) -> list[Op]:
    """One kind of operation of a stage, for all microbatches."""
    return [Op(kind, i, stage) for i in range(m)]


def _in_turn(forwards: list[Op], backwards: list[Op], warmup: int) -> list[Op]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    ops = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        ops += [forward, backward]
    return ops + backwards[len(forwards) - warmup :]


def _late_weights(ops: list[Op], owed: int) -> list[Op]:
    """Put a W after each I, for the oldest I without one, as soon as more than `owed` of them wait; the other
    Ws at the end.
    """
    out, waiting = [], []
    for op in ops:
        out.append(op)
        if op.kind == "I":
            waiting.append(op)
            if len(waiting) > owed:
                out.append(waiting.pop(0)._replace(kind="W"))
    return out + [op._replace(kind="W") for op in waiting]


def _per_round(p: int, m: int, v: int) -> int:
    """Microbatches that a chunk runs before the rank turns to its next chunk: m divided into m // p equal
    groups; m for a single chunk. Raises ValueError if m cannot be divided so.
    """
    evenly = lambda m: v == 1 or m % max(1, m // p) == 0
    if not evenly(m):
        fewer = next(n for n in range(m, 0, -1) if evenly(n))
        more = next(n for n in itertools.count(m) if evenly(n))
        raise ValueError(
            f"{m} microbatches do not go round {p} ranks in {m // p} equal groups; take {fewer} or {more}"
        )
    return m // max(1, m // p) if v > 1 else m


def _rounds(p: int, m: int, v: int, rank: int) -> tuple[list[Op], list[Op]]:
    """All forwards and all backwards of a rank, chunk by chunk in rounds of microbatches."""
    each = _per_round(p, m, v)
    starts = range(0, m, each)
    forwards = [Op("F", first + i, rank + p * c) for first in starts for c in range(v) for i in range(each)]
    backwards = [
        Op("B", first + i, rank + p * c) for first in starts for c in reversed(range(v)) for i in range(each)
    ]
    return forwards, backwards


class _Chunk:
    """One of a rank's chunks; counts the microbatches that are done, for each kind of operation."""

    def __init__(self, stage: int):
        self.stage, self.done = stage, dict.fromkeys("FIW", 0)

    def __call__(self, kind: str) -> Op:
        i = self.done["I" if kind == "B" else kind]
        for k in "IW" if kind == "B" else kind:
            self.done[k] += 1
        return Op(kind, i, self.stage)


def _check(p: int, m: int, v: int = 1) -> None:
    for name, value in (("ranks p", p), ("microbatches m", m), ("chunks v", v)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"the number of {name} is a whole number of at least 1, not {value!r}")
