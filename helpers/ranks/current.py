"""Functions for code that runs on a rank: its variables, its counts and memory, the progress of its call."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from three_axes import devices
from three_axes.count import CollectiveCount, Span


class Rank(Protocol):
    """The attributes of `worker.Rank` that this module uses."""

    device: Any
    recorder: Any
    budget: Any
    names: dict

    def report_progress(self, done: int, total: int | None) -> None:
        """Report to the notebook that `done` of `total` steps are done (None: their number is not known)."""


class OpenCollectives(NamedTuple):
    """A rank's collectives of this call. under_way: whether one has not ended. not_waited: the number of
    those for which no Python code has waited.
    """

    under_way: bool
    not_waited: int


rank: Rank | None = None  # None in the kernel, and in processes that a rank forks


def progress(iterable, total: int | None = None):
    """Loop over `iterable`, and display a bar in the notebook: the progress of the slowest rank.

    total: the number of items, if `iterable` has no length. Outside a rank this only loops.
    """
    total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
    reported, done = 0.0, 0
    for item in iterable:
        if rank and time.monotonic() - reported > 0.1:
            reported = time.monotonic()
            rank.report_progress(done, total)
        yield item
        done += 1
    if rank:
        rank.report_progress(done, total)


@contextmanager
def span(kind: str, label: str | int = ""):
    """On a rank, record when this block began and ended, for `world.timeline`. Elsewhere, do nothing.

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
    """On a rank: run one all-reduce over all ranks, at which NCCL makes its first communicator."""
    dist.all_reduce(torch.ones(1, device=_here("meet").device))


def around(op):
    """The span of one operation of a schedule; `toy.run_schedule` takes this function as an argument."""
    return span(op.kind, op.microbatch)


def count_from_here() -> None:
    """Count anew from here: `world.traffic` and `world.timeline` omit what this call did before."""
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
    return OpenCollectives(not recorder.is_idle(), recorder.not_waited())


def finish_collectives() -> None:
    """Wait for this rank's collectives that were begun and not waited for."""
    _here("finish_collectives").recorder.finish()


def peak_memory(reset: bool = False) -> int:
    """The largest number of bytes that this rank's tensors have held at one time, since the last reset. On a
    GPU PyTorch's allocator counts them, for this rank alone even if ranks share the GPU. On a CPU the budget
    of `World(memory=…)` counts them. reset: start a new peak from the bytes held now.

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
            "nothing counts the memory of this rank: make the world with World(n, memory=…), the bytes of"
            " tensors that each rank may hold"
        )
    peak = here.budget.peak
    if reset:
        here.budget.peak = here.budget.now
    return peak


def rank_state() -> dict:
    """The variables of this rank's %%ranks cells, a dict that is kept from call to call. In a fresh rank it
    has `rank`, `world_size`, `device`, `torch`, `dist` and `__name__`.
    """
    return _here("rank_state").names


def _here(name: str) -> Rank:
    """This process's rank, for the function `name`. Raises RuntimeError outside a rank."""
    if rank is None:
        raise RuntimeError(f"{name}() is for a function that runs on a rank: world.run(fn) calls it there")
    return rank
