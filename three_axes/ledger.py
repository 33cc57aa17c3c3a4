"""Counts the memory of the tensors that operations make: the bytes of all living tensors, and their peak."""

from __future__ import annotations

import weakref

import torch

from . import pytorch_private
from .pytorch_private import TorchDispatchMode, piece_of, tree_iter
from .replaced import Replaced


def storages(tensors) -> dict[int, int]:
    """Piece of memory -> bytes, for these tensors. Memory that tied weights or views share counts once."""
    sizes = {}
    for t in tensors:
        if t is None:
            continue
        t = t.to_local() if hasattr(t, "to_local") else t  # a DTensor holds its own shard only
        sizes[piece_of(t.untyped_storage())] = t.untyped_storage().nbytes()
    return sizes


class Ledger(TorchDispatchMode):
    """Counts, in a `with` block, the tensors that operations make. After the block it still notices when they
    are freed.

    now: bytes of all living tensors. peak: the largest `now` since the start, or since a caller reset it.
    A DTensor counts with the part that this rank holds, and a fake tensor as if it were real.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.pieces: dict[int, int] = {}  # piece of memory -> its bytes
        self._paused = False  # True while nothing is counted
        self._replaced = Replaced()

    def __enter__(self):
        ledger, resize, (owner, name) = (
            self,
            torch.UntypedStorage.resize_,
            pytorch_private.shape_propagation(),
        )
        propagate = getattr(owner, name)

        # To learn a result's shape, DTensor runs an operator on whole tensors, which no rank holds.
        def uncounted(*args):
            ledger._paused = True
            try:
                return propagate(*args)
            finally:
                ledger._paused = False

        def resize_(storage, size):  # with this, FSDP frees and allocates the memory of whole weights
            resize(storage, size)
            ledger._count(storage)
            return storage

        self._replaced.put(owner, name, uncounted)
        self._replaced.put(torch.UntypedStorage, "resize_", resize_)
        return super().__enter__()

    def __exit__(self, *error):
        self._replaced.restore()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(t, "to_local") for t in types):  # a DTensor; importing its class would take a second
            return NotImplemented  # DTensor then handles the operation, and calls this with its local tensors
        result = function(*args, **(kwargs or {}))
        if not self._paused:
            for t in tree_iter(result):
                if isinstance(t, torch.Tensor) and t.device.type != "meta":
                    self._count(t.untyped_storage())
            self.after_operation(function, args, result)
        return result

    def after_operation(self, function, args, result) -> None:
        """Called after an operation, when its results are counted; subclasses override it."""

    def before_change(self, piece: int, size: int | None) -> None:
        """Called before a piece of memory changes its size (None: it is freed); `pieces` has the old size."""

    def _count(self, storage: torch.UntypedStorage) -> None:
        piece, size = piece_of(storage), storage.nbytes()
        before = self.pieces.get(piece)
        if before == size:
            return
        self.before_change(piece, size)
        if before is None:
            weakref.finalize(storage, self._freed, piece).atexit = False
        self.pieces[piece] = size
        self.now += size - (before or 0)
        self.peak = max(self.peak, self.now)

    def _freed(self, piece: int) -> None:
        self.before_change(piece, None)
        self.now -= self.pieces.pop(piece)
