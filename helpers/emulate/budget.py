"""A memory budget for each rank: a tensor beyond it raises an out-of-memory error, as on a GPU.

`World(4, memory=50e6)` gives each of four ranks a budget of 50 MB. It counts the exact bytes of all living
tensors, but not Python, nor what PyTorch itself needs. The error says which kinds of tensors held the memory.
"""

from __future__ import annotations

import gc
import time

import torch

from three_axes.ledger import Ledger, storages
from three_axes.table import human

from .allocator import CachingAllocator

KINDS = ("parameters", "gradients", "optimizer", "activations and the rest")


class Budget(Ledger):
    """A rank's ledger of living tensors, with a limit.

    limit: bytes. levels: (time.monotonic(), bytes) after each operation that changed the bytes. allocator: if
    set, tensors are placed in it, as on a GPU (`emulate.allocator`).
    """

    def __init__(self, rank: int, limit: float):
        super().__init__()
        self.rank, self.limit = rank, limit
        self.allocator: CachingAllocator | None = None
        self.levels: list[tuple[float, int]] = []

    def before_change(self, piece: int, size: int | None) -> None:
        """Take a block of the allocator for a new piece of memory; give it back when the piece is freed."""
        if self.allocator and size is None:
            self.allocator.give(piece)
        elif self.allocator and piece not in self.pieces:
            self.allocator.take(piece, size)

    def after_operation(self, function, args, result) -> None:
        """Record the level, in bytes, if it has changed. Raises torch.OutOfMemoryError above the limit."""
        if self.now > self.limit:
            raise torch.OutOfMemoryError(self._report(function))
        if not self.levels or self.levels[-1][1] != self.now:
            self.levels.append((time.monotonic(), self.now))

    def take_levels(self) -> list[tuple[float, int]]:
        """The levels since the last call of `take_levels`."""
        taken, self.levels = self.levels, []
        return taken

    def by_kind(self) -> dict[str, int]:
        """Bytes of living tensors by use, found from the object that refers to each tensor."""
        owner: dict[int, str] = {}
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, torch.Tensor) and isinstance(thing, torch.nn.Parameter):
                owner |= dict.fromkeys(storages([thing]), "parameters")
                owner |= dict.fromkeys(storages([thing.grad]), "gradients")
            elif issubclass(kind, torch.optim.Optimizer):
                kept = (v for state in thing.state.values() for v in state.values())
                owner |= dict.fromkeys(storages(v for v in kept if isinstance(v, torch.Tensor)), "optimizer")
        held = dict.fromkeys(KINDS, 0)
        for piece, size in self.pieces.items():
            held[owner.get(piece, KINDS[-1])] += size
        return held

    def _report(self, function) -> str:
        parts = ", ".join(f"{kind} {human(size)}" for kind, size in self.by_kind().items() if size)
        return (
            f"rank {self.rank} is out of memory: {function.__name__.split('.')[0]} made it {human(self.now)},"
            f" and the budget is {human(self.limit)}. Held: {parts}"
        )
