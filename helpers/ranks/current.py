"""For functions that run on a rank: which rank this process is, what that rank keeps, counts and uses, and
how far its call has progressed.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from three_axes import devices
from three_axes.count import CollectiveCount, Span


class Rank(Protocol):
    """What functions that run on a rank use of the rank; `worker.Rank` implements it."""

    device: Any
    recorder: Any
    budget: Any
    names: dict

    def tell(self, done: int, total: int | None) -> None:
        """Report the rank's progress to the notebook."""


class OpenCollectives(NamedTuple):
    """A rank's collectives of this call. not_waited: how many nothing in Python has waited for."""

    under_way: bool
    not_waited: int


rank: Rank | None = None  # None in the kernel, and in processes that a rank forks


def progress(iterable, total: int | None = None):
    """Loop over `iterable`, and show a progress bar in the notebook: the progress of the slowest rank.

    Works in a function that runs on ranks, and does nothing elsewhere.
    """
    total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
    reported, done = 0.0, 0
    for item in iterable:
        if rank and time.monotonic() - reported > 0.1:
            reported = time.monotonic()
            rank.tell(done, total)
        yield item
        done += 1
    if rank:
        rank.tell(done, total)


@contextmanager
def span(kind: str, label: str | int = ""):
    """On a rank, record what runs in this block. Anywhere else, do nothing.

    On a GPU the span begins when all work launched before the block is done, and ends when the block's own
    work is done.
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
    """On a rank: one all-reduce over all ranks, with which NCCL makes its first communicator."""
    dist.all_reduce(torch.ones(1, device=_here("meet").device))


def around(op):
    """A span for one operation of a schedule; `toy.run_schedule` takes this function."""
    return span(op.kind, op.microbatch)


def count_from_here() -> None:
    """Leave out of `world.traffic` and `world.timeline` what this call has done so far, such as a warm-up."""
    _here("count_from_here").recorder.start()


def counted_so_far() -> list[CollectiveCount]:
    """This rank's collectives of this call by kind and axis, since `count_from_here()` if that was called."""
    return _here("counted_so_far").recorder.counted_so_far()


def spans_so_far() -> list[Span]:
    """This rank's computations and waits of this call, since `count_from_here()` if called."""
    return list(_here("spans_so_far").recorder.spans)


def open_collectives() -> OpenCollectives:
    """Whether one of this rank's collectives has not ended, and how many were not waited for."""
    recorder = _here("open_collectives").recorder
    return OpenCollectives(not recorder.calm(), recorder.not_waited())


def finish_collectives() -> None:
    """Wait for this rank's collectives that were begun and not waited for."""
    _here("finish_collectives").recorder.finish()


def peak_memory(reset: bool = False) -> int:
    """The largest number of bytes that this rank's tensors have held at one time. On a GPU PyTorch's
    allocator counts them, for this rank alone even if ranks share the GPU. On a CPU the budget of
    `World(memory=…)` counts them. reset: start a new peak from the bytes held now.

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
    """What this rank keeps from call to call: a dict with the variables that %%ranks cells see. In a fresh
    rank it is empty.
    """
    return _here("rank_state").names


def _here(name: str) -> Rank:
    if rank is None:
        raise RuntimeError(f"{name}() is for a function that runs on a rank: world.run(fn) calls it there")
    return rank
