"""Finds which collective a kernel runs, how many bytes its tensor has, and along which axis it is."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from ..foreign import plain
from ..paper.collectives import COLLECTIVES, algorithmic_bytes
from .kernels import COMMUNICATES, function_of, known
from .reading import Event, Trace

# The name of an operation without underscores, as kernels and annotations have it -> the operation. Longer
# names are first, since they may contain a shorter one.
KNOWN = {"sendrecv": "send or all_to_all"}
KNOWN |= {op.replace("_", ""): op for op in sorted(COLLECTIVES, key=len, reverse=True)}
PIPELINE = ("send", "recv")
EXPERTS = ("dispatch", "combine", "notify")  # of libraries that send tokens to experts and back
COPY = "copy between GPUs"
NAMED = (*COLLECTIVES, *EXPERTS, COPY, "send or all_to_all")  # names that say what is communicated
BYTES = {  # type of a tensor's elements -> bytes of an element
    **dict.fromkeys(("byte", "char", "bool", "float8e4m3fn", "float8e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long"), 8),
}
UNKNOWN = "group not said"


@dataclass(slots=True)
class Collective:
    """A collective, as a kernel or gloo's thread ran it. op: one of `NAMED`, or the kernel's own name if that
    names no known collective. axis: the group's description, or `UNKNOWN`. start, end: in microseconds.
    payload: bytes of the whole tensor; None if not known. group: PyTorch's name of the group, with the
    group's ranks if a kernel ran the collective; '' if the trace has no name.
    """

    op: str
    axis: str
    start: float
    end: float
    payload: float | None = None
    size: int | None = None  # ranks of the group
    group: str = ""

    @property
    def kind(self) -> tuple[str, str, float | None]:
        """(operation, axis, bytes): collectives of the same kind are compared with each other."""
        return self.op, self.axis, self.payload

    @property
    def sent(self) -> float | None:
        """Bytes that a rank must send for it; None if size, payload or operation is not known."""
        if self.payload is None or self.size is None or self.op not in COLLECTIVES:
            return None
        return algorithmic_bytes(self.op, self.payload, self.size)


def communicates(kind: str, event: Event) -> bool:
    """Whether this is a kernel that is known to communicate, or a copy from one GPU to another."""
    if kind == "kernel":
        return known(event.name).does == COMMUNICATES
    return event.name.startswith("Memcpy PtoP")


def operation(name: str) -> str:
    """'ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL', '_reduce_scatter_base' -> 'reduce_scatter'. A name
    without a known collective is returned without its arguments.
    """
    squeezed = name.lower().replace("_", "").replace("nccl", "").replace("gloo:", "")
    return next((op for word, op in KNOWN.items() if word in squeezed), _short_name(name))


def _short_name(name: str) -> str:
    """The kernel's own name, without namespaces and arguments, safe to print."""
    return plain(function_of(name).rpartition("::")[2], 40)


class Announced:
    """PyTorch's annotations of its calls of NCCL. In older traces only they contain a collective's name."""

    def __init__(self, trace: Trace):
        self.by_thread: dict[object, list[Event]] = {}
        for note in sorted(trace.notes, key=lambda note: note.start):
            if note.name.startswith("nccl:"):
                self.by_thread.setdefault(note.thread, []).append(note)
        self.launches = trace.launches

    def around(self, kernel: Event) -> str | None:
        """The name of the annotation during which this kernel was launched; None if there was none."""
        if not (call := self.launches.get(kernel.args.get("correlation"))):
            return None
        notes = self.by_thread.get(call.thread, [])
        i = bisect.bisect_right(notes, call.start, key=lambda note: note.start)
        return notes[i - 1].name if i and notes[i - 1].end >= call.start else None


def of_kernel(kernel: Event, announced: Announced) -> Collective:
    """The collective of a kernel, or of a copy to another GPU. The operation of a kernel of NCCL or RCCL is
    read from its arguments; if they do not have it, from an annotation, or else from the kernel's name. For
    another kernel it is in `data/kernels.csv`, or else it is the kernel's own name.
    """
    args = kernel.args
    if kernel.name.startswith("Memcpy"):
        return Collective(COPY, UNKNOWN, kernel.start, kernel.end)
    if "ccl" in kernel.name.lower():
        op = operation(str(args.get("Collective name") or announced.around(kernel) or kernel.name))
    else:
        op = known(kernel.name).operation or _short_name(kernel.name)
    axis = _axis(args.get("Process Group Description") or args.get("Process Group Name") or UNKNOWN)
    if axis == "undefined":
        axis = f"group {plain(args.get('Process Group Name'))}"
    width = BYTES.get(str(args.get("dtype")).lower())
    numbers = args.get("Out msg nelems" if op in ("all_gather", "recv") else "In msg nelems")
    payload = numbers * width if width and isinstance(numbers, (int, float)) else None
    size = args.get("Group size")
    size = size if isinstance(size, int) and size > 0 else None
    if op in ("gather", "scatter") and payload is not None:
        payload *= size or 1
    group = f"{args.get('Process Group Name', '')} {args.get('Process Group Ranks', '')}".strip()
    return Collective(op, axis, kernel.start, kernel.end, payload, size, group)


def of_gloo(note: Event, groups: list[dict]) -> Collective:
    """The collective in one of gloo's annotations. Its axis is known only if there is a single group."""
    only = groups[0] if len(groups) == 1 else {}
    axis, group = _axis(only.get("pg_desc", UNKNOWN)), str(only.get("pg_name", ""))
    return Collective(operation(note.name), axis, note.start, note.end, group=group)


def _axis(described: object) -> str:
    described = described if isinstance(described, (str, int)) else UNKNOWN
    return plain(described, 60).removeprefix("mesh_").replace("default_pg", "world")
