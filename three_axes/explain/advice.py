"""The largest costs of a step: how much time each takes, what to do about it, and which drop teaches it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..foreign import plain
from ..table import human
from .collectives import COPY, EXPERTS, NAMED, UNKNOWN, Collective
from .kernels import UNRECOGNISED
from .skew import TOGETHER, Skew
from .split import Gap, Split

MOST = 5  # costs that are reported
LEAST = 0.01  # share of the recorded time; a smaller cost, or difference between ranks, is not reported
SMALL = 1e6  # bytes; the time of a smaller message is mostly latency
MANY = 20  # so many small messages of a kind in a step are not yet reported
SHORT = 100  # microseconds: a message of unknown size that takes less counts as small
LONG_GAP = 1e-3  # seconds; to launch an operator, Python takes some tens of microseconds
NOTHING = 0.1  # share of a collective's time: less computation than this cannot hide the collective

# Part of the time -> (what to do about it, number of the drop).
PARTS = {
    "bubble": (
        "it waits for the neighbouring pipeline stage: take more microbatches, or a schedule with a smaller"
        " bubble",
        12,
    ),
    "waiting for data": ("the loader has no batch ready: more workers, or prefetching", 11),
    "idle": (
        "the GPU idles though the next kernel had been launched, and what it waits for is not in the trace:"
        " an event of another stream or process, or kernels that were not recorded",
        5,
    ),
    "copies": (
        "copies between host and GPU that nothing hides: pinned memory with non_blocking=True, and fewer of"
        " them",
        11,
    ),
    "copies on the device": (
        "copies within the GPU that nothing hides: look for .contiguous(), cat, clone and padding that the"
        " next kernel could do without",
        11,
    ),
}
# Replacements: for pinned copies, for runs without backward, and for short idle gaps.
PINNED = "copies between host and GPU that nothing hides, though pinned: fewer of them, or beside computation"
STAGE = "it waits for the neighbouring pipeline stage: keep more batches under way at once"
BRIEF = (
    "the GPU idles for moments between kernels that had been launched, as long as a kernel takes to start:"
    " fewer and larger kernels (torch.compile)"
)


class Advice(NamedTuple):
    """A cost in time, and what to do about it. drop: the number of the drop that teaches it."""

    seconds: float  # in the whole recording
    text: str
    drop: int


def advice(splits: Sequence[Split], skews: Sequence[Skew] = ()) -> list[Advice]:
    """At most `MOST` costs of the rank that works longest and for which the others wait, largest first. [] if
    its trace has no events of the device on which it computes.
    """
    slow = slowest(splits)
    if slow.strange and not slow.on_gpu:
        return []
    costs = [_exposed(slow, op, axis, seconds, skews) for (op, axis), seconds in slow.exposed.items()]
    advised = dict(PARTS)
    if not slow.pageable:
        advised["copies"] = PINNED, 11
    if not slow.trains:
        advised["bubble"] = STAGE, 12
    if slow.brief > slow.parts.get("idle", 0.0) / 2:
        advised["idle"] = BRIEF + ", or CUDA graphs" * (not slow.graphs), 11
    costs += [Advice(slow.parts[part], *what) for part, what in advised.items() if part in slow.parts]
    costs.append(_waiting_for_python(slow, [s for s in splits if s is not slow]))
    if slow.calls:
        call = max(slow.calls, key=slow.calls.__getitem__)
        text = (
            f"the GPU waits for the host, which is in long calls of CUDA, most of the time in {call}: such"
            " calls allocate or copy memory, load kernels, or wait. If only the first steps have them, record"
            " later ones"
        )
        costs.append(Advice(slow.parts["waiting for CUDA"], text, 11))
    if slow.parts["optimizer"] > 0.1 * slow.seconds:
        text = "the optimizer: fused=True, or ZeRO, by which each rank updates its part only"
        costs.append(Advice(slow.parts["optimizer"], text, 10))
    if lead := longer(splits):
        text = (
            f"rank {slow.rank} works longer than the median of the other ranks: look for uneven stages or"
            " batches, or for a slow device"
        )
        costs.append(Advice(lead, text, 11))
    worth = [a for a in costs if a.seconds > LEAST * slow.seconds]
    return sorted(worth, key=lambda a: -a.seconds)[:MOST]


def _waiting_for_python(slow: Split, others: list[Split]) -> Advice:
    """The advice by how the waiting is made: of some long gaps, or of many short ones."""
    seconds = slow.parts["waiting for Python"]
    alone = others and seconds > 3 * statistics.median(s.parts["waiting for Python"] for s in others)
    who = f"rank {slow.rank} waits for its own Python, the other ranks do not: " * bool(alone)
    if long := _long(slow):
        return Advice(seconds, f"{who}{_where(slow, long)}", 11)
    what, waits = (
        ("kernels", "the GPU waits for Python to launch")
        if slow.on_gpu
        else ("operators", "Python runs between")
    )
    a_step = " a step" * bool(slow.steps)
    number = f"{slow.pieces / max(1, slow.steps):,.0f} {what}{a_step} of {_micro(slow.piece)} in the mean"
    if alone:
        return Advice(seconds, f"{who}{number}, and Python between them: look what it alone does there", 11)
    do = f"fewer and larger ones, by larger {'micro' * slow.trains}batches, torch.compile"
    if slow.on_gpu:
        do += " or CUDA graphs" * (not slow.graphs) + ", and no .item() or print of a tensor in the step"
    return Advice(seconds, f"{waits} {number}: {do}", 11)


def _long(slow: Split) -> list[Gap]:
    """The gaps of a quarter of a step's waiting for Python or more, if they make at least half of it;
    otherwise the gaps that are not short, if short ones make less than a quarter; otherwise [].
    """
    if not slow.gaps:
        return []
    seconds = sum(gap.seconds for gap in slow.gaps)
    a_step = seconds / slow.steps if slow.steps else slow.gaps[0].seconds
    long = [gap for gap in slow.gaps if gap.seconds >= LONG_GAP]
    few = [gap for gap in long if gap.seconds >= a_step / 4]
    if sum(gap.seconds for gap in few) >= seconds / 2:
        return few
    return long if sum(gap.seconds for gap in long) > 0.75 * seconds else []


def _where(slow: Split, long: list[Gap]) -> str:
    """How many long gaps there are, how long they are, and between what most of their time lies. What Python
    does is guessed only for at most two a step: a busy machine makes many.
    """
    places: dict[tuple[str, str], float] = {}
    for gap in long:
        places[gap[1:]] = places.get(gap[1:], 0.0) + gap.seconds
    before, after = max(places, key=lambda place: (all(place), places[place]))
    elsewhere = any(b not in ("", before) or a not in ("", after) for b, a in places)
    names = [plain(name, 60) for name in (before, after) if name]
    if len(names) == 2:
        where = f"between {names[0]} and {names[1]}"
    else:
        where = (
            f"after {names[0]}" if before else f"before {names[0]}" if after else "without a name beside it"
        )
    mean = f"{1e3 * statistics.fmean(gap.seconds for gap in long):.3g} ms"
    if len(long) == slow.steps:
        number = f"one long gap a step, of {mean}"
    else:
        of = f" in {slow.steps} steps" * (slow.steps > 1)
        number = (
            f"{len(long)} long gaps{of}, of {mean} each" if len(long) > 1 else f"one long gap{of}, of {mean}"
        )
    few = len(long) <= 2 * max(1, slow.steps)
    do = (
        "look what Python does there, such as saving, collecting garbage, printing or evaluating"
        if few
        else "what Python did then is not in the trace, nor who else used the processor"
    )
    return f"{number}, {'the longest ' * elsewhere}{where}: {do}"


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs"


def slowest(splits: Sequence[Split]) -> Split:
    """The rank with the most time outside of waiting for other ranks."""
    return max(splits, key=lambda s: s.working)


def longer(splits: Sequence[Split]) -> float:
    """Seconds by which the slowest rank's work exceeds the median of the other ranks. 0 if there are no other
    ranks, if it is at most `LEAST` of the time, or if unrecognised kernels or idle time may explain it.
    """
    slow = slowest(splits)
    if len(splits) < 2:
        return 0.0
    lead = slow.working - statistics.median(s.working for s in splits if s is not slow)
    unsure = max(s.may_wait for s in splits)
    return lead if lead > LEAST * slow.seconds and lead > unsure else 0.0


def _exposed(slow: Split, op: str, axis: str, seconds: float, skews: Sequence[Skew]) -> Advice:
    """The advice for an operation along an axis, all message sizes together. seconds: its exposed time."""
    its = [c for c in slow.collectives if (c.op, c.axis) == (op, axis)]
    sizes = len({c.payload for c in its})
    where = ("" if axis == UNKNOWN else f" along {axis}") + (
        f", its {sizes} sizes together," if sizes > 1 else ""
    )
    most = slow.parts["compute"] + slow.parts["optimizer"] + slow.parts.get(UNRECOGNISED, 0.0)
    free = most - (slow.hidden + slow.unsure) * slow.communication  # computation that hides nothing yet
    waits = next((s for s in skews if s.axis == axis and s.waited.get(slow.rank, 0) > s.transfer), None)
    waits = waits if op in TOGETHER else None
    if waits:
        share = waits.waited[slow.rank] / (waits.waited[slow.rank] + waits.transfer)
        late = f"mostly for rank {waits.latest}: look what makes that late"
        if waits.latest is None:
            late = "and no rank came last clearly more often than the others"
        do = f"of its group's collectives {share:.0%} is waiting, {late}", 11
    elif op not in NAMED:
        do = "its kernel's name is of no collective that is known here: look what calls it", 11
    elif free < NOTHING * seconds:
        some, whole = (1e3 * s / max(1, slow.steps) for s in (most, slow.seconds))
        do = (
            f"there is nothing to hide it under, for only {some:.1f} of {whole:.1f} ms are computed: larger"
            " batches on each rank, or fewer ranks",
            11,
        )
    else:
        do = _many(slow, its) or _uneven(slow, its) or _of_kind(slow, op, axis)
    return Advice(seconds, f"{op}{where} that no computation hides: {do[0]}", do[1])


def _many(slow: Split, its: list[Collective]) -> tuple[str, int] | None:
    """The advice if most of the time goes into many small messages of a step."""
    took = lambda alike: sum(c.end - c.start for c in alike)
    sizes = [c.payload for c in its if c.payload]
    small = (
        [c for c in its if (c.payload or 0) < SMALL] if sizes else [c for c in its if c.end - c.start < SHORT]
    )
    if not slow.steps or len(small) / slow.steps <= MANY or took(small) <= took(its) / 2:
        return None
    each = human(statistics.median(c.payload or 0 for c in small))
    if not sizes:
        each = f"{statistics.median(c.end - c.start for c in small):.0f} µs"
    return (
        f"{len(small) / slow.steps:.0f} a step of {each} in the median; join them into fewer, larger ones",
        9,
    )


def _uneven(slow: Split, its: list[Collective]) -> tuple[str, int] | None:
    """The advice if the costliest kind has less than half of its best bandwidth in the median."""
    costly = max(its, key=lambda c: slow.alone[c.kind]).kind
    rates = [c.sent / (c.end - c.start) / 1e3 for c in its if c.kind == costly and c.sent and c.end > c.start]
    if not rates or statistics.median(rates) >= max(rates) / 2:
        return None
    return (
        f"{statistics.median(rates):.1f} GB/s in the median, {max(rates):.1f} at best: it waits for another"
        " rank, or shares the network; the traces of all ranks tell which",
        11,
    )


def _of_kind(slow: Split, op: str, axis: str) -> tuple[str, int]:
    """The advice by the axis's name and the operation."""
    if any(word in axis.lower() for word in ("tp", "tensor", "model")):
        return "keep tensor parallelism in a node, make it smaller, or add sequence parallelism", 6
    if "pp" in axis.lower() or "pipe" in axis.lower():
        return "fewer bytes between stages, or stages on a faster link", 7
    if op == "all_to_all" or op in EXPERTS:
        return "keep its group in a node, or run it beside something else", 9
    if op == COPY:
        return "look which GPUs they join, and run them beside something else", 11
    if op == "all_gather" and slow.trains:
        return "if it gathers weights, prefetch the next layer's, or keep them after forward", 9
    if op not in ("all_reduce", "reduce_scatter") or not slow.trains:
        return "look whether every step needs it, or run it beside something else", 11
    return (
        "if it sums gradients, begin it during backward, with buckets that are ready early; or take larger"
        " batches between two of them",
        5,
    )
