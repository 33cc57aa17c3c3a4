"""Which collective a kernel is, how many bytes it is about, and along which axis."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from ..foreign import plain
from ..paper.collectives import COLLECTIVES, algorithmic_bytes
from .kernels import COMMUNICATES, function_of, known
from .reading import Event, Trace

# As they are called in kernels, in NCCL's annotations and in gloo's; the longer names first.
KNOWN = {"sendrecv": "send or all_to_all"}
KNOWN |= {op.replace("_", ""): op for op in sorted(COLLECTIVES, key=len, reverse=True)}
PIPELINE = ("send", "recv")
EXPERTS = ("dispatch", "combine", "notify")  # of libraries that send tokens to experts and back
COPY = "copy between GPUs"
NAMED = (*COLLECTIVES, *EXPERTS, COPY, "send or all_to_all")  # whose name says what they do
BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "float8e4m3fn", "float8e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16", "short"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long"), 8),
}
UNKNOWN = "group not said"


@dataclass(slots=True)
class Collective:
    """A collective, as a kernel or as gloo's thread ran it. op: of `NAMED`, or a kernel's own name where that
    says nothing. payload: bytes of the whole tensor; None: not known. group: its
    name in PyTorch, '' where the trace does not say.
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
        """(operation, axis, bytes): what is equal in these is compared."""
        return self.op, self.axis, self.payload

    @property
    def sent(self) -> float | None:
        """Bytes that a rank must send for it."""
        if self.payload is None or self.size is None or self.op not in COLLECTIVES:
            return None
        return algorithmic_bytes(self.op, self.payload, self.size)


def communicates(kind: str, event: Event) -> bool:
    """True for a kernel that is known to communicate, and for a copy from one GPU to another."""
    if kind == "kernel":
        return known(event.name).does == COMMUNICATES
    return event.name.startswith("Memcpy PtoP")


def operation(name: str) -> str:
    """'ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL', '_reduce_scatter_base' -> 'reduce_scatter'. A name that
    says nothing of the kind stays, without its arguments.
    """
    squeezed = name.lower().replace("_", "").replace("nccl", "").replace("gloo:", "")
    return next((op for word, op in KNOWN.items() if word in squeezed), _own(name))


def _own(name: str) -> str:
    return plain(function_of(name).rpartition("::")[2], 40)


class Announced:
    """PyTorch's notes around its calls of NCCL: in older traces they alone say which collective it is."""

    def __init__(self, trace: Trace):
        self.by_thread: dict[object, list[Event]] = {}
        for note in sorted(trace.notes, key=lambda note: note.start):
            if note.name.startswith("nccl:"):
                self.by_thread.setdefault(note.thread, []).append(note)
        self.launches = trace.launches

    def around(self, kernel: Event) -> str | None:
        """The name of the note that was open as this kernel was launched; None where none was."""
        if not (call := self.launches.get(kernel.args.get("correlation"))):
            return None
        notes = self.by_thread.get(call.thread, [])
        i = bisect.bisect_right(notes, call.start, key=lambda note: note.start)
        return notes[i - 1].name if i and notes[i - 1].end >= call.start else None


def of_kernel(kernel: Event, announced: Announced) -> Collective:
    """What a kernel sends, or a copy to another GPU: from its arguments; where these do not name the
    operation, from a note or from the kernel's name.
    """
    args = kernel.args
    if kernel.name.startswith("Memcpy"):
        return Collective(COPY, UNKNOWN, kernel.start, kernel.end)
    if "ccl" in kernel.name.lower():
        op = operation(str(args.get("Collective name") or announced.around(kernel) or kernel.name))
    else:
        op = known(kernel.name).operation or _own(kernel.name)
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
    """The collective that gloo's annotation names. Its axis is known where there is one group only."""
    only = groups[0] if len(groups) == 1 else {}
    axis, group = _axis(only.get("pg_desc", UNKNOWN)), str(only.get("pg_name", ""))
    return Collective(operation(note.name), axis, note.start, note.end, group=group)


def _axis(described: object) -> str:
    described = described if isinstance(described, (str, int)) else UNKNOWN
    return plain(described, 60).removeprefix("mesh_").replace("default_pg", "world")
