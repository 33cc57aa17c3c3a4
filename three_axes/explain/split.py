"""Splits one rank's time: every moment belongs to one part, and the parts sum to the whole.

Computation counts first, because it hides communication and copies: a moment in which the GPU computes is
compute. Exposed time is the time in which a collective runs, and no other kernel and no copy. It is a union
of intervals, not a sum of kernels. While collectives of two axes run, the time counts for the axis whose name
comes first in the alphabet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..foreign import Unreadable
from .collectives import PIPELINE, Announced, Collective, communicates, of_gloo, of_kernel
from .kernels import UNRECOGNISED, function_of, known
from .reading import Event, Trace


def union(spans) -> np.ndarray:
    """The intervals (start, end) in which at least one of `spans` runs."""
    spans = np.asarray(spans, dtype=float).reshape(-1, 2)
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    first = np.r_[True, spans[1:, 0] > reached[:-1]]
    last = np.r_[np.flatnonzero(first)[1:] - 1, len(spans) - 1]
    return np.c_[spans[first, 0], reached[last]]


def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The intervals that are in a and in b. Both are sorted, and neither overlaps itself."""
    if not len(a) or not len(b):
        return np.empty((0, 2))
    # An interval of a overlaps those of b from the first that ends after its start to the last that begins
    # before its end.
    low, high = np.searchsorted(b[:, 1], a[:, 0], "right"), np.searchsorted(b[:, 0], a[:, 1], "left")
    counts = np.maximum(0, high - low)
    i = np.repeat(np.arange(len(a)), counts)
    j = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
    return np.c_[np.maximum(a[i, 0], b[j, 0]), np.minimum(a[i, 1], b[j, 1])]


def without(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The intervals that are in a and not in b."""
    if not len(a):
        return a
    edges = np.r_[-np.inf, b.ravel(), np.inf].reshape(-1, 2)  # the gaps of b
    return both(a, edges[edges[:, 1] > edges[:, 0]])


def length(a: np.ndarray) -> float:
    """The total length of intervals (start, end) that do not overlap, in their unit."""
    return float((a[:, 1] - a[:, 0]).sum())


OPTIMIZER = "Optimizer.step#"
# The host's annotated steps count as the GPU's if this share of the GPU's busy time lies in them.
WITHIN = 0.99
INSIDE = "Memcpy DtoD", "Memset"  # copies within the device
LEAST = 0.01  # of the recording: unrecognised kernels of one name that take less count as computation
LONG = 1000  # microseconds of a call; a shorter call is a launch or a query
BRIEF = 20  # microseconds; a shorter gap between two kernels is the start of a kernel
UNSAID = "idle, cause not known"
STEP, LOADER = "ProfilerStep#", "enumerate(DataLoader)"
WRAPPERS = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::", "gloo:", "DistributedData")


class Gap(NamedTuple):
    """A time in which the device waited for Python. before, after: the names of the operator, kernel or
    collective that ended then, and of the one that began; '' if the recording began or ended there.
    """

    seconds: float
    before: str
    after: str


@dataclass
class Split:
    """A rank's time, in seconds.

    parts: compute, optimizer, copies (between host and device), 'exposed AXIS' for each axis, bubble, waiting
    for data, waiting for Python, idle; and if there are any: not recognised, copies on the device, waiting
    for CUDA, and idle whose cause is not known. communication: seconds of all collectives, exposed or not.
    hidden: the fraction of these under computation. unsure: the fraction only under kernels that are not
    recognised. alone: (operation, axis, bytes) -> how long collectives of that kind ran beside no other
    kernel and no copy, without the bubble. exposed: (operation, axis) -> the same for all sizes together.
    size: of the world. strange: devices that this tool cannot read. unrecognised: a kernel's name -> how long
    it ran. calls: the host's call -> how long the GPU waited during it, for long calls. brief: idle time in
    gaps that are no longer than a launch takes. devices: the GPUs that it ran on, by its own numbers. host:
    its machine, if known. graphs: True if CUDA graphs were launched. pageable: False if there are copies
    between host and device, and all use pinned memory. gaps: the waiting for Python, longest first. pieces:
    how many kernels ran, or operators that no other operator called. piece: their mean seconds. trains: as in
    `reading.Trace`.
    """

    rank: int
    file: str
    on_gpu: bool
    seconds: float
    steps: int
    parts: dict[str, float] = field(default_factory=dict)
    communication: float = 0.0
    hidden: float = 0.0
    unsure: float = 0.0
    collectives: list[Collective] = field(default_factory=list)
    alone: dict[tuple, float] = field(default_factory=dict)
    exposed: dict[tuple[str, str], float] = field(default_factory=dict)
    size: int | None = None
    strange: set[str] = field(default_factory=set)
    unrecognised: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)
    brief: float = 0.0
    graphs: bool = False
    devices: set[str] = field(default_factory=set)
    host: str = ""
    pageable: bool = True
    gaps: list[Gap] = field(default_factory=list)
    pieces: int = 0
    piece: float = 0.0
    trains: bool = True

    @property
    def _exposed(self) -> float:
        return sum(s for part, s in self.parts.items() if part.startswith("exposed ")) + self.parts["bubble"]

    @property
    def working(self) -> float:
        """Seconds without exposed communication and the bubble; idle time is in it."""
        return self.seconds - self._exposed

    @property
    def may_wait(self) -> float:
        """The part of `working` that may be waiting for other ranks, since its cause is not known."""
        return self.parts.get(UNRECOGNISED, 0.0) + self.parts.get(UNSAID, 0.0)


def split(trace: Trace, rank: int = 0) -> Split:
    """Split a trace. rank: used if the trace does not say of which rank it is."""
    rank = rank if trace.rank is None else trace.rank
    return _of_gpu(trace, rank) if trace.gpu else _of_cpu(trace, rank)


def _noted(trace: Trace, name: str) -> np.ndarray:
    """The intervals of the host's annotations whose name begins with `name`."""
    notes = (n for n in trace.notes if n.thread is not None and n.name.startswith(name))
    return union([(n.start, n.end) for n in notes])


def _of_gpu(trace: Trace, rank: int) -> Split:
    """Split the trace of a rank on a GPU, by its kernels and copies."""
    announced = Announced(trace)
    sent = [of_kernel(e, announced) for kind, e in trace.gpu if communicates(kind, e)]
    sent += [of_gloo(note, trace.groups) for note in trace.notes if note.name.startswith("gloo:")]
    rest = [(kind, e) for kind, e in trace.gpu if not communicates(kind, e)]
    copies = [e for kind, e in rest if kind != "kernel"]
    inside, host = ([(e.start, e.end) for e in copies if _is_inside(e.name) == is_] for is_ in (True, False))
    ran, steps = union([(e.start, e.end) for _, e in trace.gpu]), _noted(trace, STEP)
    # If the host runs ahead, its steps end before the GPU's. Then the whole recording is used.
    marks = steps if length(both(ran, steps)) > WITHIN * length(ran) else union([])
    every = [e for kind, e in rest if kind == "kernel"]
    strangers = _unrecognised(every, np.concatenate([ran, marks]))
    is_stranger = [function_of(e.name) in strangers for e in every]
    kernels = [e for e, strange in zip(every, is_stranger) if not strange]
    unsure = union([(e.start, e.end) for e, strange in zip(every, is_stranger) if strange])
    stepping = _noted(trace, OPTIMIZER)
    calls = (trace.launches.get(e.args.get("correlation")) for e in kernels)
    launched = np.array([call.start if call else e.start for call, e in zip(calls, kernels)])
    at = np.searchsorted(stepping[:, 0], launched, "right") - 1
    by_optimizer = (
        (at >= 0) & (launched <= stepping[at, 1]) if len(stepping) else np.zeros(len(kernels), bool)
    )
    spans = np.array([(e.start, e.end) for e in kernels]).reshape(-1, 2)
    parts = union(spans[~by_optimizer]), union(spans[by_optimizer]), union(host), union(inside)
    result, idle = _parts(trace, rank, True, sent, *parts, marks, unsure)
    result.unrecognised = strangers
    result.devices, result.host = trace.devices, trace.host
    result.graphs = any("GraphLaunch" in call.name for call in trace.launches.values())
    _idle(result, trace, idle, [*((e.start, e.end, function_of(e.name)) for _, e in rest), *_named(sent)])
    result.pieces, result.piece = (
        len(spans),
        float((spans[:, 1] - spans[:, 0]).sum()) / max(1, len(spans)) / 1e6,
    )
    of_host = [e.name for e in copies if not _is_inside(e.name)]
    result.pageable = not of_host or not all("Pinned" in name for name in of_host)
    return result


def _is_inside(name: str) -> bool:
    """Whether a copy is within the device, without the host's memory."""
    return name.startswith(INSIDE)


def _unrecognised(kernels: list[Event], whole: np.ndarray) -> dict[str, float]:
    """Name -> seconds, for unrecognised kernels that take `LEAST` of the whole or more."""
    took: dict[str, float] = {}
    for e in kernels:
        if known(e.name).does == UNRECOGNISED:
            name = function_of(e.name)
            took[name] = took.get(name, 0.0) + (e.end - e.start) / 1e6
    lasts = (whole[:, 1].max() - whole[:, 0].min()) / 1e6
    ranked = sorted(took.items(), key=lambda item: -item[1])
    return {name: seconds for name, seconds in ranked if seconds >= LEAST * lasts > 0}


def _of_cpu(trace: Trace, rank: int) -> Split:
    """Split the trace of a rank on gloo, whose threads communicate; PyTorch's operators compute. The steps'
    intervals belong to the whole, because a step may begin with reading data, before its first operator.
    """
    sent = [of_gloo(note, trace.groups) for note in trace.notes if note.name.startswith("gloo:")]
    cpu, steps = trace.cpu, _noted(trace, STEP)
    if len(steps):  # events before the first step and after the last belong to no step
        first, last = steps[0, 0], steps[-1, 1]
        sent = [c for c in sent if first <= c.start < last]
        cpu = [e for e in cpu if first <= e.start < last]
    ops = [e for e in cpu if not e.name.startswith(WRAPPERS) and not e.name.endswith("Backward0")]
    computing, stepping = union([(e.start, e.end) for e in ops]), _noted(trace, OPTIMIZER)
    parts = without(computing, stepping), both(computing, stepping), union([]), union([])
    result, idle = _parts(trace, rank, False, sent, *parts, steps, union([]))
    result.parts |= _waiting(trace, idle)
    result.gaps = _gaps(trace, idle, [*((e.start, e.end, e.name) for e in ops), *_named(sent)])
    outermost = _outermost(ops)
    took = sum(e.end - e.start for e in outermost) / 1e6
    result.pieces, result.piece = len(outermost), took / max(1, len(outermost))
    return result


def _named(sent: list[Collective]) -> list[tuple[float, float, str]]:
    return [(c.start, c.end, c.op) for c in sent]


def _outermost(operators: list[Event]) -> list[Event]:
    """The operators that no other operator of their thread called."""
    ended: dict[object, float] = {}  # thread -> when its last outermost operator ended
    found = []
    for e in sorted(operators, key=lambda e: (e.start, -e.end)):
        if e.start >= ended.get(e.thread, -np.inf):
            ended[e.thread] = e.end
            found.append(e)
    return found


def _parts(trace: Trace, rank: int, on_gpu: bool, sent, computing, optimizer, copies, inside, also, unsure):
    """(a split in which idle time is not yet explained, the idle intervals). inside: copies within the
    device. also: intervals that extend the whole. unsure: kernels that are not recognised.
    """
    communicating = union([(c.start, c.end) for c in sent])
    spans = np.concatenate([computing, optimizer, unsure, copies, inside, communicating, also])
    if not length(spans):
        raise Unreadable(f"{trace.file} has nothing that took time: was anything run while it was recorded?")
    whole = np.array([[spans[:, 0].min(), spans[:, 1].max()]])
    optimizer, busy = without(optimizer, computing), union(np.concatenate([computing, optimizer]))
    parts = {"compute": length(computing), "optimizer": length(optimizer)}
    computed = busy
    if len(unsure):
        parts[UNRECOGNISED] = length(without(unsure, busy))
        busy = union(np.concatenate([busy, unsure]))
    parts["copies"] = length(without(copies, busy))
    if len(inside):
        parts["copies on the device"] = length(without(inside, union(np.concatenate([busy, copies]))))
    steps = len({note.name for note in trace.notes if note.name.startswith(STEP)})
    result = Split(rank, trace.file, on_gpu, length(whole) / 1e6, steps, collectives=sent)
    result.communication = length(communicating) / 1e6
    result.hidden = length(both(communicating, computed)) / max(1e-9, length(communicating))
    result.unsure = length(both(communicating, busy)) / max(1e-9, length(communicating)) - result.hidden
    busy = union(np.concatenate([busy, copies, inside]))
    result.alone = _alone(sent, busy, lambda c: c.kind)
    result.exposed = _alone(sent, busy, lambda c: (c.op, c.axis))
    result.size, result.strange, result.trains = trace.size, trace.strange, trace.trains
    bubble = 0.0
    for axis in sorted({c.axis for c in sent}):
        mine = [c for c in sent if c.axis == axis]
        alone = without(union([(c.start, c.end) for c in mine]), busy)
        piped = [c for c in mine if c.op in PIPELINE]
        waiting = both(alone, union(_beyond_the_fastest(piped)))
        bubble += length(waiting)
        parts[f"exposed {axis}"] = length(alone) - length(waiting)
        busy = union(np.concatenate([busy, alone]))
    result.parts = {part: us / 1e6 for part, us in parts.items()} | {"bubble": bubble / 1e6}
    return result, without(whole, busy)


def _alone(sent: list[Collective], busy: np.ndarray, kind: Callable[[Collective], tuple]) -> dict:
    """Kind -> seconds in which collectives of that kind ran beside no other kernel and no copy, without the
    bubble.
    """
    kinds: dict[tuple, list[Collective]] = {}
    for c in sent:
        kinds.setdefault(kind(c), []).append(c)
    alone = {}
    for key, alike in kinds.items():
        spans = without(union([(c.start, c.end) for c in alike]), busy)
        piped = [c for c in sent if c.axis == alike[0].axis and c.op in PIPELINE]
        waiting = union(_beyond_the_fastest(piped)) if alike[0].op in PIPELINE else union([])
        alone[key] = length(without(spans, waiting)) / 1e6
    return alone


def _beyond_the_fastest(sent: list[Collective]) -> list[tuple[float, float]]:
    """The intervals of waiting in sends and receives. Each first waits and then moves its bytes, so the time
    by which it is longer than the fastest with the same operation and size was waiting for the neighbour.
    """
    fastest: dict[tuple, float] = {}
    for c in sent:
        key = c.op, c.payload
        fastest[key] = min(fastest.get(key, np.inf), c.end - c.start)
    return [(c.start, c.end - fastest[c.op, c.payload]) for c in sent]


def _idle(result: Split, trace: Trace, gaps: np.ndarray, ran: list[tuple[float, float, str]]) -> None:
    """Find for each idle gap of the GPU what it waited for. If the next kernel was launched after the gap
    began, the GPU waited for the host; the same holds for a gap after the last kernel. If it was launched
    before, the GPU waited for something on the device, which is not in the trace. Without a recorded launch,
    nothing is known. ran: (start, end, name) of what the GPU ran.
    """
    calls = {e.start: trace.launches.get(e.args.get("correlation")) for _, e in trace.gpu}
    late: list[tuple[object, np.ndarray]] = []  # (thread of the host, gap)
    queued, unsaid = [], []
    for gap in gaps:
        call = calls.get(gap[1])
        if call and call.end > gap[0]:
            late.append((call.thread, gap))
        elif call:
            queued.append(gap)
        elif gap[1] in calls or not trace.launches:
            unsaid.append(gap)
        else:
            late.append((None, gap))
    in_calls = _in_calls(result, trace, late)
    for_host = without(union([gap for _, gap in late]), in_calls)
    result.parts |= _waiting(trace, for_host)
    result.gaps = _gaps(trace, for_host, ran)
    if len(in_calls):
        result.parts["waiting for CUDA"] = length(in_calls) / 1e6
    result.parts["idle"] = length(union(queued)) / 1e6
    result.brief = sum(end - start for start, end in queued if end - start <= BRIEF) / 1e6
    if unsaid:
        result.parts[UNSAID] = length(union(unsaid)) / 1e6


def _in_calls(result: Split, trace: Trace, late: list[tuple[object, np.ndarray]]) -> np.ndarray:
    """The intervals in which the host's thread was in a long call of CUDA, and not in the loader."""
    loading, found = _noted(trace, LOADER), []
    by_thread: dict[object, list[np.ndarray]] = {}
    for thread, gap in late:
        by_thread.setdefault(thread, []).append(gap)
    for call in trace.launches.values():
        if call.end - call.start >= LONG and call.thread in by_thread:
            inside = both(np.array([[call.start, call.end]]), np.array(by_thread[call.thread]))
            inside = without(inside, loading)
            if len(inside):
                result.calls[call.name] = result.calls.get(call.name, 0.0) + length(inside) / 1e6
                found.append(inside)
    return union(np.concatenate(found)) if found else union([])


def _waiting(trace: Trace, waited: np.ndarray) -> dict[str, float]:
    """The time in which the device waited for the loader's batch, or for Python."""
    for_data = length(both(waited, _noted(trace, LOADER)))
    return {"waiting for data": for_data / 1e6, "waiting for Python": (length(waited) - for_data) / 1e6}


def _gaps(trace: Trace, waited: np.ndarray, ran: list[tuple[float, float, str]]) -> list[Gap]:
    """The waiting for Python in the intervals `waited`, longest first. ran: (start, end, name) of what ran.
    What runs longest gives its name to a moment at which several began or ended.
    """
    ran = sorted(ran, key=lambda one: one[1] - one[0])
    began, ended = ({one[at]: one[2] for one in ran} for at in (0, 1))
    waited = without(waited, _noted(trace, LOADER))
    found = [Gap((b - a) / 1e6, ended.get(a, ""), began.get(b, "")) for a, b in waited.tolist()]
    return sorted(found, key=lambda gap: -gap.seconds)
