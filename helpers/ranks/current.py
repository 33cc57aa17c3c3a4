"""The rank that this process is, for functions that run on ranks: what they keep, count and have used, and
how far they have come.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from three_axes import devices
from three_axes.count import CollectiveCount, Span


class Rank(Protocol):
    """What functions that run on a rank use of it; `worker.Rank` is one."""

    device: Any
    recorder: Any
    budget: Any
    names: dict

    def tell(self, done: int, total: int | None) -> None:
        """Say to the notebook how far the rank has come."""


rank: Rank | None = None  # None in the kernel, and in what a rank forks


def progress(iterable, total: int | None = None):
    """Loop over `iterable`, showing in the notebook how far the slowest rank has come.

    Works in a function that runs on ranks, and does nothing elsewhere.
    """
    total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
    told, done = 0.0, 0
    for item in iterable:
        if rank and time.monotonic() - told > 0.1:
            told = time.monotonic()
            rank.tell(done, total)
        yield item
        done += 1
    if rank:
        rank.tell(done, total)


@contextmanager
def span(kind: str, label: str | int = ""):
    """On a rank, record what runs in this block. Anywhere else, do nothing.

    On a GPU the span begins when what was asked for earlier is done, and ends when what it asked for is.
    """

    if rank:
        devices.synchronize(rank.device)
    start = time.monotonic()
    try:
        yield
    finally:
        if rank:
            devices.synchronize(rank.device)
            rank.recorder.spans.append(Span(kind, str(label), start, time.monotonic()))


def meet() -> None:
    """On a rank: an all-reduce of all, which makes NCCL's first communicator."""
    dist.all_reduce(torch.ones(1, device=_here("meet").device))


def around(op):
    """A span for one operation of a schedule: what `toy.run_schedule` takes."""
    return span(op.kind, op.microbatch)


def count_from_here() -> None:
    """Leave out of `world.traffic` and `world.timeline` what this call has done so far, a warm-up perhaps."""
    _here("count_from_here").recorder.start()


def counted_so_far() -> list[CollectiveCount]:
    """This rank's collectives of this call, by kind and axis, since `count_from_here()` if called."""
    return _here("counted_so_far").recorder.counted_so_far()


def spans_so_far() -> list[Span]:
    """This rank's computations and waits of this call, since `count_from_here()` if called."""
    return list(_here("spans_so_far").recorder.spans)


def peak_memory(reset: bool = False) -> int:
    """The most bytes of tensors that this rank has held at once: on a GPU as PyTorch's allocator
    counts them, without those of ranks that share the GPU; else as the budget of `World(memory=…)` does.
    reset: begin anew.

    Raises RuntimeError where neither counts.
    """
    here = _here("peak_memory")
    if here.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(here.device)
        if reset:
            torch.cuda.reset_peak_memory_stats(here.device)
        return peak
    if here.budget is None:
        raise RuntimeError(
            "no one watches the memory of this rank: make the world with World(n, memory=…), the bytes of"
            " tensors that each rank may hold"
        )
    peak = here.budget.peak
    if reset:
        here.budget.peak = here.budget.now
    return peak


def rank_state() -> dict:
    """What this rank keeps from call to call: a dict of its own, the names that %%ranks cells see. Fresh
    ranks begin with an empty one.
    """
    return _here("rank_state").names


def _here(name: str) -> Rank:
    if rank is None:
        raise RuntimeError(f"{name}() is for a function that runs on a rank: world.run(fn) calls it there")
    return rank
