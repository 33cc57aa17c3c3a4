"""A memory budget for each rank: a tensor that does not fit any more is an out-of-memory error, as on a GPU.

`World(4, memory=50e6)`. Counted are the bytes of all tensors that live, exactly; not Python, and not
what PyTorch itself needs. The error says what held the memory.
"""

from __future__ import annotations

import gc
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..table import human
from .allocator import CachingAllocator

KINDS = ("parameters", "gradients", "optimizer", "activations and the rest")


class Budget(TorchDispatchMode):
    """While it is entered, keeps account of every tensor that operations make.

    limit: bytes, or None to only watch. levels: (when, bytes) as they change. allocator: where it is set,
    tensors are given places in it, as on a GPU (`runtime.allocator`).
    """

    def __init__(self, rank: int, limit: float | None):
        super().__init__()
        self.rank, self.limit = rank, limit
        self.peak = 0
        self.allocator: CachingAllocator | None = None
        self.levels: list[tuple[float, int]] = []
        self._live: dict[int, weakref.ref] = {}  # tensors made earlier live on between calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        fresh = False
        for t in tree_iter(made):
            if isinstance(t, torch.Tensor) and t.device.type != "meta":
                fresh |= self._watch(t.untyped_storage())
        if fresh:
            self._weigh(func)
        return made

    def _watch(self, storage: torch.UntypedStorage) -> bool:
        key = storage._cdata
        known = self._live.get(key)
        if known is not None and known() is not None:
            return False
        self._live[key] = weakref.ref(storage, lambda _: self._gone(key))
        if self.allocator:
            self.allocator.take(key, storage.nbytes())
        return True

    def _gone(self, key: int) -> None:
        self._live.pop(key, None)
        if self.allocator:
            self.allocator.give(key)

    @property
    def now(self) -> int:
        """Bytes of all tensors that live. Storages may have been resized, so they are asked each time."""
        return sum(s.nbytes() for ref in list(self._live.values()) if (s := ref()) is not None)

    def _weigh(self, func) -> None:
        held = self.now
        self.peak = max(self.peak, held)  # also of an attempt that fails
        if self.limit is not None and held > self.limit:
            raise torch.OutOfMemoryError(self._report(held, func))
        if not self.levels or self.levels[-1][1] != held:
            self.levels.append((time.monotonic(), held))

    def take_levels(self) -> list[tuple[float, int]]:
        """The levels since the last time they were taken."""
        taken, self.levels = self.levels, []
        return taken

    def by_kind(self) -> dict[str, int]:
        """What the live tensors are for, told by who holds them."""
        owner: dict[int, str] = {}
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, torch.nn.Parameter):
                owner[thing.untyped_storage()._cdata] = "parameters"
                if thing.grad is not None:
                    owner[thing.grad.untyped_storage()._cdata] = "gradients"
            elif issubclass(kind, torch.optim.Optimizer):
                for state in thing.state.values():
                    for v in state.values():
                        if isinstance(v, torch.Tensor):
                            owner[v.untyped_storage()._cdata] = "optimizer"
        held = dict.fromkeys(KINDS, 0)
        for key, ref in list(self._live.items()):
            if (s := ref()) is not None:
                held[owner.get(key, KINDS[-1])] += s.nbytes()
        return held

    def _report(self, held: int, func) -> str:
        parts = ", ".join(f"{kind} {human(size)}" for kind, size in self.by_kind().items() if size)
        return (
            f"rank {self.rank} is out of memory: {func.__name__.split('.')[0]} made it {human(held)}, and the"
            f" budget is {human(self.limit)}. Held: {parts}"
        )
