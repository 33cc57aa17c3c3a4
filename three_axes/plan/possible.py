"""Checks whether a layout is possible, and refuses it in a sentence with the nearest possible choice."""

from __future__ import annotations

import math

from ..checks import divisors, whole
from ..paper.axes import ALWAYS, FOLDED
from ..paper.pipelines import SCHEDULES
from .layout import ORDER, RECOMPUTE, Axes, Layout
from .shape import ModelShape
from .stages import can_be_spread


def check(model: ModelShape, layout: Layout, gpus: int | None = None) -> None:
    """Raises ValueError for a layout of this model that is impossible with any batch and any length of a
    sequence. gpus: the number that it must use, if known. The layout's numbers must not be arrays.
    """
    t, p, v = layout.tp, layout.pp, layout.interleave
    for name in (*Axes._fields, "microbatch", "interleave"):
        whole(name, getattr(layout, name), 1, 10**7)
    if layout.schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {layout.schedule!r}; known are {', '.join(SCHEDULES)}")
    if layout.recompute not in RECOMPUTE:
        raise ValueError(f"unknown recompute {layout.recompute!r}; known are {', '.join(RECOMPUTE)}")
    whole("recomputed", layout.recomputed, 0, 10**7)
    if layout.recomputed and layout.recompute != "full":
        raise ValueError(f"recomputed {layout.recomputed} belongs to recompute full, not {layout.recompute}")
    if layout.zero not in (0, 1, 2, 3):
        raise ValueError(f"zero is 0, 1, 2 or 3, not {layout.zero!r}")
    if sorted(layout.order) != sorted(ORDER):
        raise ValueError(f"order names each of {', '.join(ALWAYS)} once, not {layout.order!r}")
    if gpus is not None and layout.ranks != gpus:
        sizes = {axis: n for axis, n in layout.axes._asdict().items() if axis in ALWAYS or n > 1}
        sizes = {axis: n for axis, n in sizes.items() if axis not in FOLDED}
        product = f"{'·'.join(sizes)} = {'·'.join(map(str, sizes.values()))}"
        raise ValueError(f"{product} = {layout.ranks}, but there are {gpus} GPUs")
    _check_experts(model, layout)
    whole("shard", layout.shard, 0, 10**7)
    if layout.shard:
        problem = f"shard {layout.shard} does not divide the {layout.replicas} replicas (dp·cp)"
        _must_divide(layout.shard, layout.replicas, problem)
        if not layout.zero:
            raise ValueError(f"shard {layout.shard} shares out nothing without ZeRO; take zero 1, 2 or 3")
        if model.experts and layout.shard * t % (layout.ep * layout.etp):
            raise ValueError(
                f"ep·etp = {layout.ep}·{layout.etp} does not divide shard·tp = {layout.shard}·{t}, and each"
                " shard has all experts;"
                f" {_divisors(layout.shard * t, layout.ep * layout.etp)} for ep·etp"
            )
    _check_heads(model, t, gpus)
    if len(model.kinds) > 1 or not model.experts:
        _must_divide(t, model.ffn, f"tp {t} does not divide the feed-forward width {model.ffn}", gpus)
    if model.mixed and not can_be_spread(model, p * v):
        of_each = " and ".join(str(count) for _, count in model.kinds)
        raise ValueError(
            f"{model.name} has {of_each} layers of its kinds, and {p * v} stages (pp·interleave) do not all"
            f" hold as many of each; {_divisors(math.gcd(*(n for _, n in model.kinds)), p * v)} stages"
        )
    if not can_be_spread(model, p * v):
        raise ValueError(
            f"{model.layers} layers do not divide over {p * v} stages (pp·interleave), nor do {model.layers}"
            f" + 2 with the embedding and the output layer counted; {_divisors(model.layers, p * v, gpus)}"
        )
    interleaved = layout.pipeline.chunks == 0
    if interleaved and (p == 1 or v == 1):
        raise ValueError("interleaving needs pp and interleave of at least 2; use 1F1B otherwise")
    if not interleaved and v > 1:
        raise ValueError(f"interleave {v} needs the schedule 'interleaved', not {layout.schedule!r}")
    if layout.pipeline.splits:
        if p == 1:
            raise ValueError(f"{layout.schedule} needs pp of at least 2; use 1F1B otherwise")
        if layout.recompute in ("per-op", "full"):
            raise ValueError(
                f"{layout.schedule} lets weight gradients wait, and they need what {layout.recompute}"
                " recompute drops; take recompute 'none', or 1F1B"
            )
        if layout.pipeline.folded and model.layers % (2 * p):
            raise ValueError(
                f"{layout.schedule} has two stages on each of {p} ranks, and {model.layers} layers do not"
                f" divide over {2 * p}; take ZB-H1, or another pp"
            )


def check_size(layout: Layout, global_batch: int, seq_len: int) -> None:
    """Raises ValueError for a layout over which the step's batch or its sequences cannot be divided.
    global_batch: sequences in one step over all ranks.
    """
    d, p, b = layout.dp, layout.pp, layout.microbatch
    if layout.cp > 1 and seq_len % (2 * layout.cp):
        raise ValueError(
            f"cp {layout.cp} cuts each sequence into {2 * layout.cp} pieces, and {seq_len} tokens do not"
            f" divide by that; take a sequence of {max(1, seq_len // (2 * layout.cp)) * 2 * layout.cp}, or"
            " another cp"
        )
    whole("global_batch", global_batch)
    if global_batch % (d * b):
        raise ValueError(
            f"a batch of {global_batch} does not divide by dp·microbatch = {d}·{b} = {d * b}; "
            f"take {max(1, global_batch // (d * b)) * d * b}, or another microbatch"
        )
    m = global_batch // (d * b)
    if layout.pipeline.chunks == 0 and m % p:
        raise ValueError(
            f"interleaving needs a multiple of pp = {p} microbatches, and there are {m}; take a batch of"
            f" {(m // p + 1) * p * d * b}, another microbatch, or 1F1B"
        )
    if m < (needed := p * layout.pipeline.fills):
        raise ValueError(
            f"{layout.schedule} fills {p} stages with {needed} microbatches, and there are {m}; take a"
            " smaller microbatch, or 1F1B"
        )


def _check_heads(model: ModelShape, t: int, gpus: int | None) -> None:
    """Raises ValueError if tp (t) does not divide the heads, or cannot share the key/value heads evenly."""
    shares = lambda k: model.kv_heads % k == 0 or k % model.kv_heads == 0
    if model.heads % t == 0 and shares(t):
        return
    problem = f"tp {t} does not divide {model.heads} attention heads"
    if model.heads % t == 0:
        problem = f"tp {t} neither divides nor is a multiple of {model.kv_heads} key/value heads"
    fits = lambda k: (gpus is None or gpus % k == 0) and (model.experts or model.ffn % k == 0)
    raise ValueError(f"{problem}; {_nearest([k for k in divisors(model.heads) if shares(k) and fits(k)], t)}")


def _check_experts(model: ModelShape, layout: Layout) -> None:
    """Raises ValueError for sizes of ep, etp and tp with which the experts cannot be split."""
    t, ep, etp, e = layout.tp, layout.ep, layout.etp, model.experts
    if e is None:
        if ep * etp > 1:
            raise ValueError(
                f"{model.name} has no experts to spread over ep {ep} and etp {etp}; take 1 of both"
            )
        return
    _must_divide(ep, e.count, f"ep {ep} does not divide {e.count} experts")
    _must_divide(etp, e.ffn, f"etp {etp} does not divide an expert's width {e.ffn}")
    if e.shared % t:
        raise ValueError(f"tp {t} does not divide the shared experts' width {e.shared}")
    inner = layout.ranks // layout.pp
    if inner % (ep * etp):
        raise ValueError(
            f"ep·etp = {ep}·{etp} does not divide dp·cp·tp = {inner}, over which the experts fold;"
            f" {_divisors(inner // math.gcd(inner, etp), ep)} for ep"
        )
    if ep * etp > 1 and layout.order != ORDER:
        raise ValueError(f"experts fold with the order {' '.join(ORDER)}, not {' '.join(layout.order)}")
    if t > 1 and not layout.sequence_parallel:
        raise ValueError(
            "experts beside tp need sequence parallelism, so that each rank has tokens of its own"
        )


def _must_divide(k: int, n: int, problem: str, gpus: int | None = None) -> None:
    """Raises ValueError with this problem if k does not divide n, and with the nearest number that does."""
    if n % k:
        raise ValueError(f"{problem}; {_divisors(n, k, gpus)}")


def _divisors(n: int, near: int, gpus: int | None = None) -> str:
    """Advice with the nearest divisors of n, among those that divide the number of GPUs."""
    return _nearest([k for k in divisors(n) if gpus is None or gpus % k == 0], near)


def _nearest(fits: list[int], near: int) -> str:
    """Advice, 'take 4 or 8': the nearest of these numbers, below and above `near`."""
    below, above = max(k for k in fits if k <= near), min((k for k in fits if k >= near), default=0)
    return f"take {below}" + (f" or {above}" if above not in (0, below) else "")
