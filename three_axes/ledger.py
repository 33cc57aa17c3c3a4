"""An account of the memory behind every tensor that operations make: what lives, and the most at once."""

from __future__ import annotations

import weakref

import torch

from . import pytorch_private
from .pytorch_private import TorchDispatchMode, piece_of, tree_iter


def storages(tensors) -> dict[int, int]:
    """Piece of memory -> bytes, of what is behind these tensors, each piece once (tied weights, views)."""
    sizes = {}
    for t in tensors:
        if t is None:
            continue
        t = t.to_local() if hasattr(t, "to_local") else t  # a DTensor holds its own shard only
        sizes[piece_of(t.untyped_storage())] = t.untyped_storage().nbytes()
    return sizes


class Ledger(TorchDispatchMode):
    """Sees what operations make while it is entered. What was made lives on in it between times.

    now: bytes of all that lives. peak: the most at once, until somebody sets it back.
    A DTensor counts with the part that this rank holds, and a fake tensor as if it were real.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.pieces: dict[int, int] = {}  # piece of memory -> its bytes
        self._off = False

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_
        ledger = self

        # DTensor tries an operator on whole tensors, for the result's shape: nothing that a rank holds.
        def propagate(*args):
            ledger._off = True
            try:
                return ledger._propagate(*args)
            finally:
                ledger._off = False

        def resize_(storage, size):  # FSDP frees and fills the memory of whole weights in this way
            ledger._resize(storage, size)
            ledger._see(storage)
            return storage

        self._propagate = pytorch_private.replace_shape_propagation(propagate)
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        pytorch_private.replace_shape_propagation(self._propagate)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(t, "to_local") for t in types):  # whose import takes a second, where none is used
            return NotImplemented  # DTensor goes first, and comes back with its local tensors
        result = function(*args, **(kwargs or {}))
        if not self._off:
            for t in tree_iter(result):
                if isinstance(t, torch.Tensor) and t.device.type != "meta":
                    self._see(t.untyped_storage())
            self.done(function, args, result)
        return result

    def done(self, function, args, result) -> None:
        """An operation has run, and what it made is in the account."""

    def changes(self, piece: int, size: int | None) -> None:
        """A piece of memory is about to have another size, None where it goes; `pieces` has the old one."""

    def _see(self, storage: torch.UntypedStorage) -> None:
        piece, size = piece_of(storage), storage.nbytes()
        before = self.pieces.get(piece)
        if before == size:
            return
        self.changes(piece, size)
        if before is None:
            weakref.finalize(storage, self._gone, piece).atexit = False
        self.pieces[piece] = size
        self.now += size - (before or 0)
        self.peak = max(self.peak, self.now)

    def _gone(self, piece: int) -> None:
        self.changes(piece, None)
        self.now -= self.pieces.pop(piece)
