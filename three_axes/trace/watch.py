"""Records for `trace`, through PyTorch's dispatcher, each tensor made or freed, and each collective."""

from __future__ import annotations

import torch

from .. import pytorch_private
from ..ledger import Ledger, storages
from ..plan.traffic import Calls

# Operator -> (collective, index of the argument with the whole tensor; None if the result has it).
OPERATORS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
}


class Recording(Ledger):
    """From `start()` on, counts collectives by (name, axis), and keeps the sizes of the tensors that were
    living at the peak. axis_of: a process group's name -> its axis; a collective of another group counts to
    'all'.
    """

    def __init__(self, axis_of: dict[str, str]):
        super().__init__()
        self.axis_of = axis_of
        self.counted: dict[tuple[str, str], Calls] = {}
        self._kinds: dict[int, str] = {}  # piece of memory -> kind of its tensor
        self._at_peak: tuple[int, dict[int, int]] = 0, {}  # the peak, and `Ledger.pieces` then

    def start(self) -> None:
        """Begin to count; the peak begins at the bytes of the tensors that live now."""
        self.counted.clear()
        self.peak, self._at_peak = self.now, (0, {})

    def before_change(self, piece: int, size: int | None) -> None:
        """Copy `pieces` when memory begins to fall from the peak."""
        if self.now == self.peak and (size or 0) < self.pieces.get(piece, 0):
            self._at_peak = self.peak, dict(self.pieces)

    def after_operation(self, function, args, result) -> None:
        """Count the operation, if it is one of `OPERATORS`."""
        name, whole = OPERATORS.get(function.name().split(".")[0], (None, None))
        if name is None:
            return
        axis = next((self.axis_of[a] for a in args if isinstance(a, str) and a in self.axis_of), None)
        for a in args:
            if axis is None and isinstance(a, torch.ScriptObject):
                axis = self.axis_of.get(torch.distributed.ProcessGroup.unbox(a).group_name)
        tensors = pytorch_private.tree_flatten(result if whole is None else args[whole])[0]
        call = self.counted.setdefault((name, axis or "all"), Calls(name, axis or "all", 0, 0))
        call.calls += 1
        call.payload += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))

    def set_kind(self, tensors, kind: str) -> None:
        """Set the kind of some tensors. Those without a kind count as 'activations'."""
        self._kinds |= dict.fromkeys(storages(tensors), kind)

    def calls(self) -> list[Calls]:
        """The counts, one `Calls` for each (name, axis), sorted by these."""
        return [self.counted[key] for key in sorted(self.counted)]

    def memory(self) -> dict[str, float]:
        """Kind of tensor -> bytes at the peak."""
        peak, pieces = self._at_peak
        sums: dict[str, float] = {}
        for piece, size in (pieces if peak == self.peak else self.pieces).items():
            kind = self._kinds.get(piece, "activations")
            sums[kind] = sums.get(kind, 0) + size
        return sums
