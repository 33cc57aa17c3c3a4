"""Checkpoints that are written while training goes on: `--async-save`.

Each rank copies what it holds to the host, and goes on. A thread writes the copy. The threads talk in a group
of their own, over gloo, so no message of theirs meets one of the training. Training waits for the copy only.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from three_axes.count.interposer import interposer

# Pinned and shared memory, and copies that overlap, need a GPU; PyTorch asks for all four or for none.
PLAIN = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class Background:
    """One thread, and at most one checkpoint under way. Every rank makes one, and calls the same of it.

    timeout: seconds without an answer after which another rank counts as lost.
    """

    def __init__(self, timeout: float):
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future | None = None

    def begin(self, write: Callable, state: dict) -> None:
        """Copy `state`, then run `write(copy, group)` on the thread. Nothing else may be under way."""
        copy = DefaultStager(PLAIN).stage(state)

        def beside() -> None:
            with interposer.aside():
                write(copy, self._group)

        self._under_way = self._thread.submit(beside)

    def finish(self) -> None:
        """Wait for what is under way, if anything is. Raises what it raised."""
        under_way, self._under_way = self._under_way, None
        if under_way:
            under_way.result()
