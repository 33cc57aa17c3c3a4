"""The formulas of pipeline schedules, in a record for each. `schedules` has the order of their operations.

Letters: p ranks, m microbatches, v chunks on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .schedules import Schedule


class Pipeline(NamedTuple):
    """A pipeline schedule.

    order: the name of the function in `schedules` that makes its order. in_flight: (p, v, m, stage) -> the
    microbatches whose activations a rank holds at its peak; one chunk counts as 1/v. bubble: (F, I, W, v) ->
    seconds for which a rank is idle, where F, I and W are the seconds of all other stages for one
    microbatch's forward, input gradients and weight gradients. The bubble equals the simulation's exactly, if
    the optimizer waits for all ranks, as it does when gradients are clipped.

    alone: whether a job without a pipeline (p = 1) runs it. chunks: on each rank; 0 if the caller chooses the
    number. fills: it needs at least this number times p microbatches. splits: whether a backward is split in
    two. folded: whether stages run down the ranks and back up, so that the first rank has both embedding and
    head.
    """

    order: str
    in_flight: Callable
    bubble: Callable = lambda F, I, W, v: (F + I + W) / v
    alone: bool = False
    chunks: int = 1
    fills: int = 0
    splits: bool = False
    folded: bool = False

    def make(self, p: int, m: int, v: int = 1) -> Schedule:
        """The schedule with its order of operations. v: chunks on each rank, unless it fixes them."""
        from . import schedules  # a long module that formulas alone do not need

        order = getattr(schedules, self.order)
        return order(p, m, v) if self.chunks == 0 else order(p, m)

    def head_rank(self, p):
        """The pipeline rank that holds the head."""
        return p * 0 if self.folded else p - 1


SCHEDULES: dict[str, Pipeline] = {
    "GPipe": Pipeline("gpipe", lambda p, v, m, stage: m),
    "1F1B": Pipeline("one_f_one_b", lambda p, v, m, stage: p - stage, alone=True),
    # On the first stage p·(1 + (p-1)/(p·v)): Korthikanti et al. 2022.
    "interleaved": Pipeline(
        "interleaved", lambda p, v, m, stage: ((v - 1) * p + 2 * (p - stage - 1) + 1) / v, chunks=0
    ),
    "ZB-H1": Pipeline("zb_h1", lambda p, v, m, stage: p, lambda F, I, W, v: F + I - W, fills=1, splits=True),
    "ZB-H2": Pipeline(
        "zb_h2",
        lambda p, v, m, stage: 2 * p - 1,
        lambda F, I, W, v: np.maximum(F, F + I - 2 * W),
        fills=2,
        splits=True,
    ),
    "ZB-V": Pipeline(
        "zb_v",
        lambda p, v, m, stage: p,
        lambda F, I, W, v: np.maximum(I / 2, I - W),
        chunks=2,
        fills=2,
        splits=True,
        folded=True,
    ),
}
