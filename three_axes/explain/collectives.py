"""Which collective a kernel is, how many bytes it is about, and along which axis."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from ..paper.collectives import algorithmic_bytes
from .reading import Event, Trace

# As they are called in kernels, in NCCL's annotations and in gloo's; the longer names first.
KNOWN = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send or all_to_all",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
}
PIPELINE = ("send", "recv")
BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "float8e4m3fn", "float8e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long"), 8),
}
UNKNOWN = "group not said"


@dataclass(slots=True)
class Collective:
    """One, as a kernel or as gloo's thread ran it. payload: bytes of the whole tensor; None: not known."""

    op: str
    axis: str
    start: float
    end: float
    payload: float | None = None
    size: int | None = None  # ranks of the group

    @property
    def sent(self) -> float | None:
        """Bytes that a rank must send for it."""
        if self.payload is None or self.size is None or "or" in self.op.split():
            return None
        return algorithmic_bytes(self.op, self.payload, self.size)


def is_communication(name: str) -> bool:
    return "nccl" in name.lower() or "rccl" in name.lower()


def plain(name: str) -> str:
    """'ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL', '_reduce_scatter_base' -> 'reduce_scatter'."""
    squeezed = name.lower().replace("_", "").replace("nccl", "").replace("gloo:", "")
    return next((op for word, op in KNOWN.items() if word in squeezed), "other")


class Announced:
    """The annotations that PyTorch puts around its calls of NCCL: in older traces they alone tell which
    collective a kernel is.
    """

    def __init__(self, trace: Trace):
        self.by_thread: dict[object, list[Event]] = {}
        for note in trace.notes:
            if note.name.startswith("nccl:"):
                self.by_thread.setdefault(note.thread, []).append(note)
        self.starts = {}
        for thread, notes in self.by_thread.items():
            notes.sort(key=lambda note: note.start)
            self.starts[thread] = [note.start for note in notes]
        self.launches = trace.launches

    def around(self, kernel: Event) -> str | None:
        """What was announced as this kernel was launched."""
        _, thread, at = self.launches.get(kernel.args.get("correlation"), (0, None, 0))
        if (starts := self.starts.get(thread)) and (i := bisect.bisect_right(starts, at)) > 0:
            note = self.by_thread[thread][i - 1]
            return note.name if note.end >= at else None
        return None


def of_kernel(kernel: Event, announced: Announced) -> Collective:
    args = kernel.args
    op = plain(args.get("Collective name") or announced.around(kernel) or kernel.name)
    axis = args.get("Process Group Description") or args.get("Process Group Name")
    axis = UNKNOWN if axis is None else str(axis).removeprefix("mesh_").replace("default_pg", "world")
    if axis in ("undefined", ""):
        axis = f"group {args.get('Process Group Name')}"
    width = BYTES.get(str(args.get("dtype")).lower())
    numbers = args.get("Out msg nelems" if op in ("all_gather", "recv") else "In msg nelems")
    payload = numbers * width if width and isinstance(numbers, (int, float)) and numbers >= 0 else None
    size = args.get("Group size")
    if op in ("gather", "scatter") and payload is not None:
        payload *= size or 1
    return Collective(op, axis, kernel.start, kernel.end, payload, size if isinstance(size, int) else None)


def of_gloo(note: Event, info: dict) -> Collective:
    """gloo's annotation says the operation alone; the axis is known where there is one group."""
    groups = [g for g in info["distributedInfo"].get("pg_config") or [] if isinstance(g, dict)]
    axis, size = UNKNOWN, None
    if len(groups) == 1:
        axis, size = str(groups[0].get("pg_desc", UNKNOWN)), groups[0].get("pg_size")
        axis = axis.removeprefix("mesh_").replace("default_pg", "world")
    return Collective(plain(note.name), axis, note.start, note.end, None, size)
