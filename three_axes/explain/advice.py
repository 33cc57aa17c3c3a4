"""The largest things to fix: what they cost, in plain words, with the drop that teaches each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..table import human
from .collectives import UNKNOWN
from .skew import Skew
from .split import Split

MOST = 5
LEAST = 0.01  # a share of the step; less is not worth a sentence
SMALL = 1e6  # bytes; a smaller message pays mostly for being sent at all
MANY = 20  # small messages of a kind, in a step
SHORT = 100  # microseconds: a message whose size is not said is small


# A part of the time -> what to do about it, and the drop.
PARTS = {
    "bubble": (
        "it waits for the neighbouring pipeline stage: take more microbatches, or a schedule with a smaller"
        " bubble",
        12,
    ),
    "waiting for data": ("the loader has no batch ready: more workers, or prefetching", 11),
    "idle": (
        "the GPU idles though the next kernel had been launched: it waits for an event of another stream or a"
        " synchronisation",
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
# The same where the copies' memory is pinned, or where nothing is trained.
PINNED = "copies between host and GPU that nothing hides, though pinned: fewer of them, or beside computation"
STAGE = "it waits for the neighbouring pipeline stage: keep more batches under way at once"


class Advice(NamedTuple):
    """What costs time, with what to do about it. drop: the number of the one that teaches it."""

    seconds: float  # of the time that was recorded
    text: str
    drop: int


def advice(splits: Sequence[Split], skews: Sequence[Skew] = ()) -> list[Advice]:
    """The largest costs of the rank that works longest, for which the others wait; the most costly first."""
    one = slowest(splits)
    costs = [
        _exposed(one, part.removeprefix("exposed "), seconds, skews)
        for part, seconds in one.parts.items()
        if part.startswith("exposed ")
    ]
    told = dict(PARTS)
    if not one.pageable:
        told["copies"] = PINNED, 11
    if not one.trains:
        told["bubble"] = STAGE, 12
    costs += [Advice(one.parts[part], *said) for part, said in told.items() if part in one.parts]
    costs.append(_waiting_for_python(one, [s for s in splits if s is not one]))
    if one.parts["optimizer"] > 0.1 * one.seconds:
        text = "the optimizer: fused=True, or ZeRO, by which each rank updates its part only"
        costs.append(Advice(one.parts["optimizer"], text, 10))
    if len(splits) > 1:
        text = (
            f"rank {one.rank} works longer than the median rank, and the others wait: look for uneven stages"
            " or batches, or for a slow device"
        )
        costs.append(Advice(one.working - statistics.median(s.working for s in splits), text, 11))
    worth = [a for a in costs if a.seconds > LEAST * one.seconds]
    return sorted(worth, key=lambda a: -a.seconds)[:MOST]


def _waiting_for_python(one: Split, others: list[Split]) -> Advice:
    seconds = one.parts["waiting for Python"]
    larger = f"larger {'micro' * one.trains}batches"
    if others and seconds > 3 * statistics.median(s.parts["waiting for Python"] for s in others):
        text = (
            f"rank {one.rank} waits for its own Python, the other ranks do not: look for what it alone does"
            " between operators, such as reading data, logging or saving"
        )
    elif one.on_gpu:
        text = (
            f"the GPU waits for Python to launch the next kernel: {larger}, torch.compile or CUDA graphs, and"
            " no .item() or print of a tensor in the step"
        )
    else:
        text = f"Python runs between the operators: {larger}"
    return Advice(seconds, text, 11)


def slowest(splits: Sequence[Split]) -> Split:
    """The rank that works longest, without its waiting for others."""
    return max(splits, key=lambda s: s.working)


def _exposed(one: Split, axis: str, seconds: float, skews: Sequence[Skew]) -> Advice:
    mine = [c for c in one.collectives if c.axis == axis]
    total: dict[str, float] = {}
    for c in mine:
        total[c.op] = total.get(c.op, 0.0) + c.end - c.start
    op = max(total, key=total.__getitem__)
    its = [c for c in mine if c.op == op]
    calls, took = len(its) / max(1, one.steps), statistics.median(c.end - c.start for c in its)
    sizes = [c.payload for c in its if c.payload]
    median = statistics.median(sizes) if sizes else 0
    costly = max(its, key=lambda c: one.alone[c.kind]).kind
    rates = [c.sent / (c.end - c.start) / 1e3 for c in its if c.kind == costly and c.sent and c.end > c.start]
    where = "" if axis == UNKNOWN else f" along {axis}"
    waits = next((s for s in skews if s.axis == axis and s.waited.get(one.rank, 0) > s.transfer), None)
    if waits:
        share = waits.waited[one.rank] / (waits.waited[one.rank] + waits.transfer)
        do = f"{share:.0%} of that it waits, mostly for rank {waits.latest}: look what makes that late"
        drop = 11
    elif not its[0].is_known and its[0].op != "send or all_to_all":
        do, drop = "its kernel's name is of no collective that is known here: look what calls it", 11
    elif calls > MANY and (median < SMALL if sizes else took < SHORT):
        each = human(median) if sizes else f"{took:.0f} µs"
        do, drop = f"{calls:.0f} a step of {each} in the median; join them into fewer, larger ones", 9
    elif rates and statistics.median(rates) < max(rates) / 2:
        do = (
            f"{statistics.median(rates):.1f} GB/s in the median, {max(rates):.1f} at best: it waits for"
            " another rank, or shares the network; the traces of all ranks tell which"
        )
        drop = 11
    elif any(word in axis.lower() for word in ("tp", "tensor", "model")):
        do, drop = "keep tensor parallelism in a node, make it smaller, or add sequence parallelism", 6
    elif "pp" in axis.lower() or "pipe" in axis.lower():
        do, drop = "fewer bytes between stages, or stages on a faster link", 7
    elif op == "all_to_all":
        do, drop = "keep its group in a node, or run it beside something else", 9
    elif op == "all_gather":
        do, drop = "prefetch the next layer's weights, or keep them after forward", 9
    elif op not in ("all_reduce", "reduce_scatter") or not one.trains:
        do, drop = "look whether every step needs it, or run it beside something else", 11
    else:
        do, drop = (
            "begin it during backward, with buckets that are ready early; or take larger batches between two"
            " of them",
            5,
        )
    return Advice(seconds, f"{op}{where} that no computation hides: {do}", drop)
