"""The lines of the cost model as the course writes them, each with its drop's own sizes and with what a wrong
one is told. `drops.lines` judges and keeps the reader's. No PyTorch is needed here: `make site` has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from three_axes.table import human


class Formula(NamedTuple):
    """A line of the cost model.

    ours: the course's function. drop: where it is written. what: a sentence with units, for the reader's
    file. cases: a text -> arguments; the first are this drop's own sizes. found: what contradicts a wrong
    line there ('the wire says'). mistakes: name -> (a wrong function, a sentence). shown(value): a value as
    text.
    """

    ours: Callable
    drop: str
    what: str
    cases: dict[str, tuple]
    found: str
    mistakes: dict[str, tuple[Callable, str]]
    shown: Callable[[float], str] = human


FORMULAS: dict[str, Formula] = {}


def _formula(*record, **more) -> Callable[[Callable], Callable]:
    """Make the function below it a formula, with these further fields."""

    def made(ours: Callable) -> Callable:
        FORMULAS[ours.__name__] = Formula(ours, *record, **more)
        return ours

    return made


TOY = 3_297_792  # parameters of the toy whose hidden size is 256


@_formula(
    "02",
    "Bytes that a rank sends, to sum S bytes over d ranks.",
    {
        "13.2 MB on 4 ranks": (4 * TOY, 4),
        "13.2 MB on 3 ranks": (4 * TOY, 3),
        "13.2 MB on 2 ranks": (4 * TOY, 2),
        "1 GB on 64 ranks": (1e9, 64),
        "1 GB on 1 rank": (1e9, 1),
    },
    "the wire says",
    mistakes={
        "half of the way": (
            lambda S, d: (d - 1) / d * S,
            "The finished chunks go round too: as many steps once more.",
        ),
        "the whole tensor in each step": (
            lambda S, d: 2 * (d - 1) * S,
            "In each step a rank sends a chunk, S/d.",
        ),
    },
)
def all_reduce(S, d):
    return 2 * (d - 1) / d * S


@_formula(
    "03",
    "Bytes that a rank sends for TP: L layers, T tokens, numbers of e bytes; t ranks share each matrix.",
    {
        "4 layers, h = 256, 256 tokens, 4 ranks, 4 bytes a number": (4, 256, 256, 4, 4),
        "80 layers, h = 8,192, 8,192 tokens, 8 ranks, 2 bytes": (80, 8192, 8192, 8, 2),
        "2 layers, h = 64, 1,024 tokens, 2 ranks, 2 bytes": (2, 64, 1024, 2, 2),
        "4 layers, h = 256, 256 tokens, 1 rank, 4 bytes": (4, 256, 256, 1, 4),
    },
    "the wire says",
    mistakes={
        "one all-reduce a layer": (
            lambda L, h, T, t, e: L * all_reduce(e * T * h, t),
            "A layer has an attention and an MLP, each with one all-reduce forward and one backward.",
        ),
        "tensors without an all-reduce's factor": (
            lambda L, h, T, t, e: 4 * L * e * T * h,
            "An all-reduce of S bytes sends all_reduce(S, t).",
        ),
    },
)
def tp_sends(L, h, T, t, e=2):
    return 4 * L * all_reduce(e * T * h, t)


def _seconds(x: float) -> str:
    return f"{x:.3g} s" if x >= 1 else f"{1e3 * x:.3g} ms"


@_formula(
    "03",
    "Seconds to compute T tokens: N parameters, L layers of width h, sequences of s, C operations a second.",
    {
        "the toy's 256 tokens at 10⁹ operations a second": (TOY, 4, 256, 32, 256, 1e9),
        "8·10⁹ parameters, 32 layers, h = 4,096, 8,192 tokens of a sequence of 8,192, 554·10¹² a second": (
            *(8e9, 32, 4096, 8192, 8192, 554e12),
        ),
        "the same with a sequence of 131,072": (8e9, 32, 4096, 131072, 131072, 554e12),
        "no parameters, 1 layer, h = 1, s = 1, 1 token, 1 a second": (0, 1, 1, 1, 1, 1),
    },
    "with matrices and attention it is",
    shown=_seconds,
    mistakes={
        "attention not halved": (
            lambda N, L, h, s, T, C: 6 * N * T / C + 12 * L * T * s * h / (0.8 * C),
            "A token looks back alone: half of 12·s·h is left.",
        ),
        "attention as fast as a product": (
            lambda N, L, h, s, T, C: 6 * N * T / C + 6 * L * T * s * h / C,
            "Attention reaches 0.8 of C: divide by 0.8·C.",
        ),
    },
)
def compute(N, L, h, s, T, C):
    return 6 * N * T / C + 6 * L * T * s * h / (0.8 * C)


@_formula(
    "04",
    "Bytes over one boundary, one way: T tokens of width h, numbers of e bytes, over t ranks of a stage.",
    {
        "256 tokens, h = 256, 4 bytes a number": (256, 256, 1, 4),
        "8,192 tokens, h = 8,192, 2 bytes, a stage of 8 ranks": (8192, 8192, 8, 2),
        "1,024 tokens, h = 64, 2 bytes, a stage of 2 ranks": (64, 1024, 2, 2),
    },
    "the wire says",
    mistakes={
        "there and back": (
            lambda h, T, t, e: 2 * e * T * h / t,
            "Asked is one way. The gradient's way back is another message.",
        ),
        "whole on each TP rank": (
            lambda h, T, t, e: e * T * h,
            "Under TP each of a stage's t ranks sends its 1/t of the numbers.",
        ),
    },
)
def stage_sends(h, T, t=1, e=2):
    return e * T * h / t


@_formula(
    "05",
    "Seconds by which a collective of A seconds makes a step longer, under work of `hides` seconds.",
    {
        "an all-reduce of 450 ms, under a backward of 160 ms": (0.450, 0.160),
        "an all-reduce of 901 ms, under a backward of 160 ms": (0.901, 0.160),
        "an all-reduce of 113 ms, under a backward of 160 ms": (0.113, 0.160),
        "an all-reduce of 100 ms, under a backward of 90 ms": (0.1, 0.09),
        "none": (0.0, 0.160),
    },
    "what shows is",
    shown=_seconds,
    mistakes={
        "no tail": (
            lambda A, hides: max(0.0, A - hides),
            "The last bucket has no backward left to hide it: A/5 shows always.",
        ),
        "both together": (
            lambda A, hides: A / 5 + max(0.0, A - hides),
            "The larger of the two shows, not their sum.",
        ),
    },
)
def shows(A, hides):
    return max(A / 5, A - hides)


_percent = "{:.2%}".format


@_formula(
    "07",
    "The share of the step in which a rank of a pipeline idles: m microbatches, p stages, v chunks a stage.",
    {
        "m = 8, p = 4": (8, 4, 1),
        "m = 32, p = 8": (32, 8, 1),
        "m = 1, p = 4": (1, 4, 1),
        "m = 8, p = 1": (8, 1, 1),
        "m = 16, p = 8, v = 4": (16, 8, 4),
    },
    "the timeline says",
    shown=_percent,
    mistakes={
        "idle over busy time": (
            lambda m, p, v: (p - 1) / (m * v),
            "Divide by the whole step: the work of m microbatches, and the waiting for p − 1.",
        ),
        "v is left out": (
            lambda m, p, v: (p - 1) / (m + p - 1),
            "With v chunks a stage works on m·v pieces, and waits for p − 1 pieces.",
        ),
    },
)
def bubble(m, p, v=1):
    return (p - 1) / (m * v + p - 1)


@_formula(
    "08",
    "Bytes a second that a group's all-reduce reaches: its ranks, `stride` numbers apart; `node` ranks in a"
    " node; W of a link, R of a port.",
    {
        "two ranks side by side, nodes of 4, W = 20 MB/s, R = 1 MB/s": (2, 1, 4, 20e6, 1e6),
        "two ranks, 2 apart": (2, 2, 4, 20e6, 1e6),
        "two ranks, 4 apart": (2, 4, 4, 20e6, 1e6),
        "all eight": (8, 1, 4, 20e6, 1e6),
        "four ranks, 2 apart": (4, 2, 4, 20e6, 1e6),
        "two ranks, 8 apart": (2, 8, 4, 20e6, 1e6),
        "all eight, R = 10 MB/s": (8, 1, 4, 20e6, 10e6),
        "eight ranks side by side, nodes of 8, W = 342 GB/s, R = 34 GB/s": (8, 1, 8, 342e9, 34e9),
        "16 ranks, 2 apart": (16, 2, 8, 342e9, 34e9),
        "64 ranks, 16 apart, nodes of 72": (64, 16, 72, 342e9, 34e9),
    },
    "an all-reduce reaches",
    shown=lambda x: f"{human(x)}/s",
    mistakes={
        "one port for all": (
            lambda ranks, stride, node, W, R: W if ranks * stride <= node else min(W, R),
            "Each of the group's ranks in a node has a port: node // stride of them.",
        ),
        "faster than a link": (
            lambda ranks, stride, node, W, R: W if ranks * stride <= node else R * max(1, node // stride),
            "A rank's own link is on the way: never more than W.",
        ),
    },
)
def bandwidth(ranks, stride, node, W, R):
    return W if ranks * stride <= node else min(W, R * max(1, node // stride))


@_formula(
    "09",
    "Bytes of states of n parameters on a rank: w, g and o bytes each of weights, gradients and optimizer;"
    " zero, 0 to 3, divides some by d.",
    {
        "the toy on 4 ranks under ZeRO-1, 4 + 4 + 8 bytes": (TOY, 4, 1, 4, 4, 8),
        "under ZeRO-2": (TOY, 4, 2, 4, 4, 8),
        "under ZeRO-3": (TOY, 4, 3, 4, 4, 8),
        "13·10⁹ on 8 ranks under ZeRO-1, 2 + 4 + 12": (13e9, 8, 1, 2, 4, 12),
        "13·10⁹ on 8 ranks under ZeRO-2, 4 + 2 + 12": (13e9, 8, 2, 4, 2, 12),
        "13·10⁹ on 8 ranks under ZeRO-3, 1 + 2 + 12": (13e9, 8, 3, 1, 2, 12),
        "13·10⁹ on 8 ranks without ZeRO, 4 + 2 + 12": (13e9, 8, 0, 4, 2, 12),
    },
    "the ranks hold",
    mistakes={
        "all divided by d": (
            lambda n, d, zero, w, g, o: n * (w + g + o) / (d if zero else 1),
            "ZeRO-1 divides the optimizer's bytes alone, ZeRO-2 the gradients' too.",
        ),
        "ZeRO-2 divides the optimizer alone": (
            lambda n, d, zero, w, g, o: (
                n * ((w + g + o) / d if zero == 3 else w + g + (o / d if zero else o))
            ),
            "ZeRO-2 divides gradients and optimizer.",
        ),
    },
)
def states(n, d, zero, w=2, g=2, o=12):
    divided = [0, o, o + g, w + g + o][zero]
    return n * (w + g + o - divided + divided / d)


@_formula(
    "10",
    "Bytes of activations that L layers of width h keep for T tokens: k bytes a number, over t ranks.",
    {
        "the larger toy's 4 blocks, h = 64, 640 tokens, 64 bytes a number": (4, 64, 640, 1, 64),
        "the same, recomputed, 4 bytes": (4, 64, 640, 1, 4),
        "the 13B's 40 layers, h = 5,120, 4·1,024 tokens, TP 2, 32.2 bytes": (40, 5120, 4096, 2, 32.2),
    },
    "the ranks keep",
    mistakes={
        "whole on each TP rank": (
            lambda L, h, T, t, k: k * L * T * h,
            "Under TP with SP each of t ranks keeps its part.",
        ),
        "one layer": (lambda L, h, T, t, k: k * T * h / t, "Each of the L layers keeps its own."),
    },
)
def activations(L, h, T, t, k=34):
    return k * L * T * h / t
