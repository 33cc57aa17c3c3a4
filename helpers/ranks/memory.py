"""What a rank's memory is used for: exact bytes of its tensors, and the process as the system counts it."""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch

from three_axes.ledger import storages

from . import current


class Held:
    """Bytes kept for backward: `now`, and the most so far, `peak`.

    Memory that several operations save counts once.
    """

    def __init__(self):
        self.now = self.peak = 0
        self._users: dict[int, int] = {}  # piece of memory -> saved tensors in it

    def add(self, piece: int, size: int) -> None:
        """Autograd saves a tensor in this piece of memory. Its `size`, in bytes, counts the first time."""
        self._users[piece] = self._users.get(piece, 0) + 1
        if self._users[piece] == 1:
            self._change(size)

    def remove(self, piece: int, size: int) -> None:
        """Autograd frees one saved tensor. `now` falls when none is left in this piece of memory."""
        self._users[piece] -= 1
        if not self._users[piece]:
            del self._users[piece]
            self._change(-size)

    def _change(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
        if current.rank:
            current.rank.recorder.levels.append((time.monotonic(), self.now))


class _Saved:
    """A tensor that autograd keeps. When autograd frees it, `held` falls.

    held: None for a weight, which is not counted.
    """

    def __init__(self, tensor: torch.Tensor, held: Held | None):
        self.tensor, self.held = tensor.detach(), held  # its own history would keep this object alive
        self.version = tensor._version
        ((self.piece, self.size),) = storages([tensor]).items()
        if held:
            held.add(self.piece, self.size)

    def unpack(self) -> torch.Tensor:
        # Autograd's own check does not see tensors that pass through hooks.
        if self.tensor._version != self.version:
            raise RuntimeError(
                "a tensor that backward needs has been changed in place since the forward; take an operation"
                " that makes a new one"
            )
        return self.tensor

    def __del__(self):
        if self.held:
            self.held.remove(self.piece, self.size)


@contextmanager
def saved_activations(model: torch.nn.Module):
    """Count the bytes that autograd keeps for backward: of all forwards in this block, each until its bytes
    are freed.

    Yields a `Held`. Parameters are not activations and are left out. On a rank every change is also drawn in
    `world.timeline`.
    """
    held = Held()
    weights = set(storages(model.parameters()))

    def keep(t):
        of_weight = (
            isinstance(t._base if t._is_view() else t, torch.nn.Parameter)
            or not storages([t]).keys() - weights
        )
        return _Saved(t, None if of_weight else held)

    with torch.autograd.graph.saved_tensors_hooks(keep, _Saved.unpack):
        yield held


def by_kind(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, activations: int = 0
) -> dict[str, int]:
    """Bytes this rank holds, by use: exact bytes of tensors, and beside them the resident memory.

    activations: the peak that `saved_activations` measured.
    'resident' is the memory of the whole process as the operating system counts it (0 if it does not).
    """
    states = (v for state in (optimizer.state.values() if optimizer else ()) for v in state.values())
    kept = (v for v in states if isinstance(v, torch.Tensor) and v.dim())
    return {
        "parameters": sum(storages(model.parameters()).values()),
        "gradients": sum(storages(p.grad for p in model.parameters()).values()),
        "optimizer": sum(storages(kept).values()),
        "activations": activations,
        "resident": resident(),
    }


def resident(pid: int | str = "self") -> int:
    """Proportional resident bytes of a process: a page that k processes share counts as 1/k page."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
