"""The largest things to fix: what they cost, in plain words, with the drop that teaches each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ..table import human
from .collectives import UNKNOWN
from .split import Split

MOST = 5
LEAST = 0.01  # a share of the step; less is not worth a sentence
SMALL = 1e6  # bytes; a smaller message pays mostly for being sent at all
MANY = 20  # small messages of a kind, in a step


class Advice(NamedTuple):
    seconds: float  # of the time that was recorded
    text: str
    drop: int


def advice(splits: Sequence[Split]) -> list[Advice]:
    """What is largest on the rank that works longest: the others wait for it. The most costly first."""
    one = slowest(splits)
    parts, costs = one.parts, []
    for part, seconds in parts.items():
        if part.startswith("exposed "):
            costs.append(_exposed(one, part.removeprefix("exposed "), seconds))
    costs.append(
        Advice(
            parts["bubble"],
            "it waits for the neighbouring pipeline stage: take more microbatches, or a schedule with a"
            " smaller bubble",
            12,
        )
    )
    host = parts["waiting for Python"]
    others = [s.parts["waiting for Python"] for s in splits if s is not one]
    if others and host > 3 * statistics.median(others):
        costs.append(
            Advice(
                host,
                f"rank {one.rank} waits for its own Python, the other ranks do not: look for what it alone"
                " does between operators, such as reading data, logging or saving",
                11,
            )
        )
    elif one.on_gpu:
        costs.append(
            Advice(
                host,
                "the GPU waits for Python to launch the next kernel: larger microbatches, torch.compile or"
                " CUDA graphs, and no .item() or print of a tensor in the step",
                11,
            )
        )
    else:
        costs.append(Advice(host, "Python runs between the operators: larger microbatches", 11))
    if one.on_gpu:
        costs.append(
            Advice(
                parts["idle"],
                "the GPU idles though the next kernel had been launched: it waits for an event of another"
                " stream or a synchronisation",
                5,
            )
        )
        costs.append(
            Advice(
                parts["copies"],
                "copies between host and GPU, or within it, that nothing hides: pinned memory with"
                " non_blocking=True, and fewer of them",
                11,
            )
        )
    costs.append(
        Advice(parts["waiting for data"], "the loader has no batch ready: more workers, or prefetching", 11)
    )
    if parts["optimizer"] > 0.1 * one.seconds:
        costs.append(
            Advice(
                parts["optimizer"],
                "the optimizer: fused=True, or ZeRO, by which each rank updates its part only",
                10,
            )
        )
    behind = one.working - statistics.median(s.working for s in splits)
    if len(splits) > 1:
        costs.append(
            Advice(
                behind,
                f"rank {one.rank} works longer than the median rank, and the others wait: look for uneven"
                " stages or batches, or for a slow device",
                11,
            )
        )
    worth = [a for a in costs if a.seconds > LEAST * one.seconds]
    return sorted(worth, key=lambda a: -a.seconds)[:MOST]


def slowest(splits: Sequence[Split]) -> Split:
    return max(splits, key=lambda s: s.working)


def _exposed(one: Split, axis: str, seconds: float) -> Advice:
    mine = [c for c in one.collectives if c.axis == axis]
    total: dict[str, float] = {}
    for c in mine:
        total[c.op] = total.get(c.op, 0.0) + c.end - c.start
    op = max(total, key=total.get)
    calls = sum(c.op == op for c in mine) / max(1, one.steps)
    where = "" if axis == UNKNOWN else f" along {axis}"
    text = f"{op}{where} that no computation hides"
    known = [c.payload for c in mine if c.op == op and c.payload]
    if known and calls > MANY and statistics.median(known) < SMALL:
        size = human(statistics.median(known))
        return Advice(
            seconds,
            f"{text}: {calls:.0f} a step of {size} in the median; join them into fewer, larger ones",
            9,
        )
    if "tp" in axis.lower() or "tensor" in axis.lower() or "model" in axis.lower():
        return Advice(
            seconds,
            f"{text}: keep tensor parallelism in a node, make it smaller, or add sequence parallelism",
            6,
        )
    if "pp" in axis.lower() or "pipe" in axis.lower():
        return Advice(seconds, f"{text}: fewer bytes between stages, or stages on a faster link", 7)
    if op == "all_to_all":
        return Advice(seconds, f"{text}: keep its group in a node, or run it beside something else", 9)
    if op == "all_gather":
        return Advice(seconds, f"{text}: prefetch the next layer's weights, or keep them after forward", 9)
    return Advice(
        seconds,
        f"{text}: begin it during backward, with buckets that are ready early; or take larger batches between"
        " two of them",
        5,
    )
