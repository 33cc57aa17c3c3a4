"""Measures a rank's memory: exact bytes of its tensors, and the resident memory of its process."""

from __future__ import annotations

import time
from contextlib import contextmanager

import torch

from three_axes.ledger import storages

from . import current


class Held:
    """Bytes that autograd keeps for backward. now: the bytes at this moment; peak: the most so far.

    Memory that several operations save counts once.
    """

    def __init__(self):
        self.now = self.peak = 0
        self._users: dict[int, int] = {}  # piece of memory -> number of saved tensors in it

    def add(self, piece: int, size: int) -> None:
        """Count a tensor that autograd saves. size: bytes of its piece of memory, which count once."""
        self._users[piece] = self._users.get(piece, 0) + 1
        if self._users[piece] == 1:
            self._change(size)

    def remove(self, piece: int, size: int) -> None:
        """Count a tensor that autograd frees. `now` falls when no other is in this piece of memory."""
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
        self.tensor, self.held = tensor.detach(), held  # the tensor's graph would keep this object alive
        self.version = tensor._version
        ((self.piece, self.size),) = storages([tensor]).items()
        if held:
            held.add(self.piece, self.size)

    def unpack(self) -> torch.Tensor:
        # Autograd does not check the versions of tensors that pass through hooks.
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
    """Count the bytes that autograd keeps for backward, of all forwards in this block; each byte counts until
    it is freed, also after the block.

    Yields a `Held`. Parameters are not activations and are left out. On a rank every change is also recorded
    for `world.timeline`.
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
    """Bytes that this rank holds, by use: 'parameters', 'gradients', 'optimizer' (its tensors but single
    numbers) and 'activations' are exact bytes of tensors, 'resident' is the memory of the process
    (`resident`).

    activations: the peak that `saved_activations` measured.
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
    """Proportional resident bytes of a process: a page that k processes share counts as 1/k page. 0 if the
    operating system does not count them.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
