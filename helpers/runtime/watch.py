"""For `trace`: every tensor that comes and goes, and every collective, as PyTorch's dispatcher sees them."""

from __future__ import annotations

import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

OPERATORS = {  # operator -> (collective, argument with the whole tensor, or None: the result is)
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
}


class Watch(TorchDispatchMode):
    """From `start()` on, counts collectives by (name, axis), and keeps the largest sum of the bytes of all
    living tensors.

    axis_of: a process group's name -> the axis it belongs to. Fake tensors have storages of a size, with
    nothing in them.
    """

    def __init__(self, axis_of: dict[str, str]):
        super().__init__()
        self.axis_of = axis_of
        self.counted: dict[tuple[str, str], list] = {}
        self._alive: dict[int, int] = {}  # piece of memory -> its bytes
        self._kinds: dict[int, str] = {}
        self._now = self._peak = 0
        self._off = False
        self._at_peak: dict[int, int] = {}

    def start(self) -> None:
        self.counted.clear()
        self._peak = 0

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_
        self._propagate = ShardingPropagator._propagate_tensor_meta_non_cached
        watch = self

        def propagate(
            *args,
            # DTensor tries an operator on whole tensors, to learn the shape of the result: nothing that a
            # rank holds
        ):
            watch._off = True
            try:
                return watch._propagate(*args)
            finally:
                watch._off = False

        ShardingPropagator._propagate_tensor_meta_non_cached = propagate

        def resize_(storage, size):  # FSDP frees and fills the memory of whole weights in this way
            watch._resize(storage, size)
            watch._see(storage)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._resize
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor goes first, and comes back with its local tensors
        result = function(*args, **(kwargs or {}))
        if self._off:
            return result
        for t in tree_flatten(result)[0]:
            if isinstance(t, torch.Tensor) and t.device.type != "meta":
                self._see(t.untyped_storage())
        if known := OPERATORS.get(function.name().split(".")[0]):
            self._count(*known, args, result)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        piece, size = storage._cdata, storage.nbytes()
        if piece not in self._alive:
            weakref.finalize(storage, self._gone, piece)
            self._alive[piece] = 0
        self._now += size - self._alive[piece]
        self._alive[piece] = size
        if self._now > self._peak:
            self._peak = self._now
            self._at_peak = None  # copied when it falls

    def _gone(self, piece: int) -> None:
        if self._at_peak is None:
            self._at_peak = dict(self._alive)
        self._now -= self._alive.pop(piece)

    def _count(self, name: str, whole: int | None, args, result) -> None:
        axis = next((self.axis_of[a] for a in args if isinstance(a, str) and a in self.axis_of), None)
        for a in args:
            if axis is None and isinstance(a, torch.ScriptObject):
                axis = self.axis_of.get(torch.distributed.ProcessGroup.unbox(a).group_name)
        tensors = tree_flatten(result if whole is None else args[whole])[0]
        row = self.counted.setdefault((name, axis or "all"), [0, 0])
        row[0] += 1
        row[1] += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))

    def kind_of(self, tensors, kind: str) -> None:
        """Say what some tensors are. The rest of what lives at the peak is 'activations'."""
        for t in tensors:
            t = t.to_local() if hasattr(t, "to_local") else t
            self._kinds[t.untyped_storage()._cdata] = kind

    @property
    def calls(self) -> list[dict]:
        return [
            {"op": op, "axis": axis, "calls": n, "payload": size}
            for (op, axis), (n, size) in sorted(self.counted.items())
        ]

    def memory(self) -> dict[str, float]:
        """Bytes at the peak, by what for."""
        sums: dict[str, float] = {}
        for piece, size in (self._alive if self._at_peak is None else self._at_peak).items():
            kind = self._kinds.get(piece, "activations")
            sums[kind] = sums.get(kind, 0) + size
        return sums
