"""The cheat sheet: one page for the wall, A4 lying, legible up to A3. Lines and letters, no pixels.

Every figure on it is computed by `three_axes.plan` as the page is drawn. Places are in millimetres from the
upper left corner.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from helpers.draw import INK, PAPER, STYLE, box, cube, panel, rank_colour
from three_axes.paper import SCHEDULES, paper
from three_axes.plan import CLUSTERS, MODELS, Job, Layout, estimate, sent, states
from three_axes.table import Table, human

WIDE, HIGH = 297, 210  # millimetres
AXES = dict(zip(("DP", "TP", "PP"), ("#0072B2", "#D55E00", "#00694C")))
SOFT = "#F3F3F0"
# What each way sends: (name, cuts, a GPU sends, when, what hides it, a GPU holds). Bytes of half precision.
SENDS = (
    ("DP", "the batch", "gradients, all-reduced: 2·(d−1)/d · 2N", "once a step", "backward hides most",
     "all: 16·N, all activations of its b"),
    ("ZeRO-1", "optimizer state too", "the same, as reduce-scatter and all-gather", "once a step",
     "backward hides a part", "4·N + 12·N/d"),
    ("FSDP, ZeRO-3", "weights, gradients, state", "weights twice, gradients once: 3·(d−1)/d · 2N",
     "each microbatch, in each layer", "the layer before hides it", "16·N/d, and one layer whole"),
    ("TP", "each matrix: columns, then rows", "4 all-reduces a layer: 8·(t−1)/t · 2bsh",
     "each microbatch, in each layer", "nothing: keep it in NVLink", "16·N/t, its share of a layer's inside"),
    ("TP with SP", "and the tokens between matrices", "gather and scatter instead: 10·(t−1)/t · 2bsh a layer",
     "the same", "products cut in pieces", "16·N/t, activations/t"),
    ("PP", "the layers, into stages", "2bsh to the next stage, 2bsh to the previous", "each microbatch",
     "other microbatches' work", "16·N/p, up to p microbatches (1F1B)"),
    ("CP", "the tokens of a sequence", "K and V of its tokens to all others", "in each layer",
     "attention meanwhile, in a ring", "all weights, activations/c"),
    ("EP", "the experts", "each token to its experts and back", "in each layer with experts",
     "nothing by itself", "1/e of the experts"),
)  # fmt: skip


def figures() -> Table:
    """What the schemes cost one GPU: Llama-3-8B on 8 H100s, 32 sequences of 4096 tokens."""
    job = Job(MODELS["llama-3-8b"], global_batch=32, seq_len=4096)
    schemes = {
        "DP 8": Layout(dp=8),
        "ZeRO-1, DP 8": Layout(dp=8, zero=1),
        "FSDP (ZeRO-3), DP 8": Layout(dp=8, zero=3),
        "TP 8 with SP": Layout(tp=8),
        "PP 8, 1F1B": Layout(pp=8),
        "DP 2 · TP 2 · PP 2": Layout(dp=2, tp=2, pp=2),
    }
    rows = []
    for name, l in schemes.items():
        e, kept = estimate(job, l), states(job.model.params / (l.tp * l.pp), l.dp, l.zero)
        sizes = [human(size) for size in (sum(kept.values()), e.memory_bytes, sum(sent(job, l).values()))]
        rows.append([name, *sizes, f"{e.time['bubble'] / e.step_seconds:.0%}", f"{e.step_seconds:.2f} s"])
    columns = ["Llama-3-8B on 8 H100s", "states", "memory, fullest", "sent in a step", "bubble", "step"]
    title = f"batch {job.global_batch} × {job.seq_len} tokens, microbatch 1, by three_axes.plan"
    return Table(columns, rows, title=title)


def schedules(p: int = 8, m: int = 16) -> Table:
    """Idle share and microbatches held, for each schedule, simulated: forward 1, backward 2."""
    rows = []
    for name, record in SCHEDULES.items():
        timeline = paper(record.make(p, m, 2))
        chunks = f", v = {timeline.schedule.v}" * (timeline.schedule.v > 1)
        rows.append([name + chunks, f"{timeline.bubble:.1%}", f"{timeline.held:.3g}"])
    return Table(["schedule", "bubble", "holds"], rows, title=f"p = {p}, m = {m}")


def page() -> Figure:
    """The page."""
    with mpl.rc_context(STYLE | {"figure.constrained_layout.use": False, "font.size": 7}):
        figure = Figure(figsize=(WIDE / 25.4, HIGH / 25.4))
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(0, WIDE), ylim=(HIGH, 0))
        ax.axis("off")
        _text(ax, 8, 13.5, "Three Axes", 19, weight="bold")
        _text(ax, 62, 10.2, "How training is split over GPUs: what each way cuts, sends and holds.", 9)
        letters = (
            "N parameters · L layers · b sequences of s tokens in a microbatch, m microbatches in a step · h"
            " hidden size · d, t, p, c, e ranks along DP, TP, PP, CP, EP · bytes a GPU, half precision: 2 a"
            " number"
        )
        _text(ax, 62, 14.5, letters, 6.4, color="#444444")
        _cubes(figure, ax)
        _ring(ax)
        _head(ax, 8, 78.5, 281, "Who sends what, when")
        _grid(
            ax, 8, 83.5, (24, 43, 71, 46, 42, 55),
            ("", "cuts", "each GPU sends (bytes)", "when", "hidden by", "each GPU holds (bytes)"),
            SENDS, 4.75,
        )  # fmt: skip
        _pipeline(figure, ax)
        _states(ax)
        _tree(ax)
        source = "Every figure is computed by three_axes.plan: three-axes plan, estimate."
        _text(ax, 8, 206.3, source, 6, color="#444444")
    return figure


def alt() -> str:
    """The page in words."""
    rows = "; ".join(f"{name} cuts {cuts}, sends {sends}, {when}" for name, cuts, sends, when, *_ in SENDS)
    return (
        f"One page: a cube cut three ways, the ring all-reduce, who sends what ({rows}), a 1F1B timeline, 16"
        " bytes a parameter under ZeRO, a decision tree, and the figures of one model."
    )


# -- parts ----------------------------------------------------------------------------------------


def _text(ax, x: float, y: float, text: str, size: float = 7, **how) -> None:
    ax.text(x, y, text, fontsize=size, **({"va": "baseline", "color": INK} | how))


def _head(ax, x: float, y: float, wide: float, title: str, beside: str = "") -> None:
    _text(ax, x, y, title, 10, weight="bold")
    if beside:
        _text(ax, x + wide, y, beside, 6.6, ha="right", color="#444444")
    ax.plot([x, x + wide], [y + 1.4] * 2, color=INK, linewidth=0.8)


def _grid(ax, x: float, y: float, widths: Sequence[float], columns, rows, high: float, numbers=False) -> None:
    """A table, a line to a row. numbers: columns after the first stand at their right edge."""
    for i, row in enumerate([columns, *rows]):
        at, middle = x, y + i * high
        if i % 2:
            box(ax, x, middle - high * 0.68, sum(widths), high, color=SOFT, linewidth=0)
        for k, (cell, width) in enumerate(zip(row, widths)):
            place, side = (at + width - 0.8, "right") if numbers and k else (at + 0.8, "left")
            colour = AXES.get(cell.split()[0], INK) if cell and k == 0 and i else INK
            weight = "bold" if i == 0 or k == 0 else "normal"
            _text(ax, place, middle, cell, 6.8, weight=weight, ha=side, color=colour)
            at += width


def _inset(figure: Figure, x: float, y: float, wide: float, high: float):
    return figure.add_axes((x / WIDE, 1 - (y + high) / HIGH, wide / WIDE, high / HIGH))


def _cubes(figure: Figure, ax) -> None:
    _head(ax, 8, 23.5, 148, "One step of training, cut three ways", "the number is the rank")
    told = ("DP: cut the batch", "TP: cut the width", "PP: cut the depth")
    under = (
        "whole model on each rank,\nother examples",
        "a slice of each matrix,\nthe same examples",
        "some of the layers,\none microbatch after another",
    )
    for k, (title, words, colour) in enumerate(zip(told, under, AXES.values())):
        x = 8 + 50 * k
        cube(_inset(figure, x, 30, 46, 33), k, 4, size=6.4)
        _text(ax, x, 29, title, 8, weight="bold", color=colour)
        _text(ax, x, 67, words, 6.8, va="top", linespacing=1.3)


def _ring(ax) -> None:
    _head(ax, 164, 23.5, 125, "Collectives are rings", "a GPU sends, of S bytes on n ranks")
    centre, radius = np.array([187.0, 48.0]), 16
    places = [centre + radius * np.array([np.sin(a), -np.cos(a)]) for a in np.arange(4) * np.pi / 2]
    for rank, place in enumerate(places):
        turn = FancyArrowPatch(
            place, places[(rank + 1) % 4], connectionstyle="arc3,rad=-0.38", arrowstyle="-|>", shrinkA=11,
            shrinkB=11, mutation_scale=9, linewidth=1.6, color=rank_colour(rank),
        )  # fmt: skip
        ax.add_patch(turn)
        for chunk in range(4):  # after the reduce-scatter each rank has one chunk of the sum
            colour = rank_colour(rank) if chunk == (rank + 1) % 4 else PAPER
            x, y = place + np.array([-4.4 + 2.2 * chunk, -2])
            box(ax, x, y, 2.2, 4, edgecolor=INK, linewidth=0.6, facecolor=colour, zorder=3)
    beside = ((0, -2.8, "center"), (-2.2, 5, "right"), (0, 5, "center"), (2.2, 5, "left"))
    for rank, (across, down, side) in enumerate(beside):
        _text(ax, *(places[rank] + np.array([across, down])), f"rank {rank}", 6.4, ha=side)
    told = "n − 1 steps:\nadd, pass on.\nn − 1 more:\ncopy, pass on."
    _text(ax, *(centre - np.array([0, 3])), told, 6.2, ha="center", va="center", linespacing=1.25)
    rows = (
        ("all-reduce", "2·(n−1)/n · S", "gradients; TP"),
        ("reduce-scatter", "(n−1)/n · S", "ZeRO, SP"),
        ("all-gather", "(n−1)/n · S", "FSDP, SP"),
        ("all-to-all", "(n−1)/n · S", "EP; CP by heads"),
        ("send", "S", "PP; CP by ring"),
    )
    _grid(ax, 212, 31, (26, 25, 26), ("", "sends", "used by"), rows, 5)
    _text(
        ax, 212, 61.5,
        "reduce-scatter + all-gather = all-reduce: splitting\n"
        "what lies between them costs no bytes (ZeRO-1, SP).\n"
        "More ranks: hardly more bytes, n − 1 times the latency.",
        6.6, va="top", linespacing=1.35,
    )  # fmt: skip


def _pipeline(figure: Figure, ax) -> None:
    timeline = paper(SCHEDULES["1F1B"].make(4, 8, 1))
    _head(ax, 8, 128.5, 92, "A pipeline in time", f"1F1B, p = 4, m = 8: bubble {timeline.bubble:.1%}")
    inset = _inset(figure, 17, 131.5, 83, 25)
    panel(inset, timeline, False, timeline.makespan, 0, set(), named=False)
    inset.tick_params(labelsize=6.2, length=2, pad=1.5)
    inset.set_xlabel("")
    _text(ax, 8, 163.5, "faint: forward · full: backward · empty: idle, (p−1)/(m+p−1) of the time", 6.4)
    made = schedules()
    _grid(ax, 8, 169, (34, 18, 18), made.columns, made.rows, 4.6, numbers=True)
    beside = f"{made.title}. “holds”: microbatches in flight on the fullest rank, in whole ranks' layers."
    _text(ax, 81, 169, textwrap.fill(beside, 17), 6.4, va="top", linespacing=1.3)


def _states(ax) -> None:
    d = 8
    _head(ax, 108, 128.5, 88, "16 bytes a parameter (Adam)", f"d = {d}")
    looks = {"weights": INK, "gradients": "#777777", "optimizer": "#BDBDBD"}
    names = ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    for zero, name in enumerate(names):
        y, at, scale = 133 + 5.6 * zero, 122.0, 64 / 16
        _text(ax, 108, y + 2.9, name, 7, weight="bold")
        parts = states(1.0, d, zero)
        for part, size in parts.items():
            wide = size * scale
            box(ax, at, y, wide, 4, facecolor=looks[part], edgecolor=PAPER, linewidth=0.6)
            if wide > 5:
                colour = INK if part == "optimizer" else PAPER
                _text(ax, at + wide / 2, y + 2.9, f"{size:g}", 6.8, ha="center", color=colour)
            at += wide
        _text(ax, at + 1, y + 2.9, f"{sum(parts.values()):g}", 7, weight="bold")
    x = 122.0
    for part, colour in looks.items():
        box(ax, x, 156.3, 2.4, 2.4, facecolor=colour, edgecolor=INK, linewidth=0.4)
        _text(ax, x + 3.4, 158.3, part, 6.4)
        x += 21
    made = figures()
    _head(ax, 108, 165, 88, "One model in figures", made.columns[0])
    short = ("", "states", "memory", "sent", "bubble", "step")
    _grid(ax, 108, 169.5, (29.5, 12, 12.5, 12.5, 12.5, 9), short, made.rows, 4.6, numbers=True)
    _text(ax, 108, 202, made.title, 6.2, color="#444444")


def _tree(ax) -> None:
    node = CLUSTERS["dgx-h100"]
    share, bytes_each = 0.6, sum(states(1.0).values())
    one = share * node.device.memory / bytes_each / 1e9
    _head(ax, 204, 128.5, 85, "Which axis?", f"{share:.0%} of memory for states: a rule of thumb")
    asked = (
        (f"16·N fit one GPU?\nH100: N ≤ {one:.1f}·10⁹", "DP", "or ZeRO-1, for nothing more"),
        (f"16·N fit one node?\n{node.gpus_per_node} H100s: N ≤ {one * node.gpus_per_node:.0f}·10⁹",
         "FSDP", "or TP within the node + DP"),
    )  # fmt: skip
    for k, (question, answer, note) in enumerate(asked):
        y = 133.5 + 14 * k
        _round(ax, 204, y, 35, facecolor=SOFT, edgecolor=INK, linewidth=0.9)
        _text(ax, 221.5, y + 4.5, question, 6.9, ha="center", va="center", linespacing=1.3)
        _arrow(ax, (239.5, y + 4.5), (247, y + 4.5), "yes")
        _arrow(ax, (221.5, y + 9.3), (221.5, y + 13.7), "no")
        _round(ax, 247.5, y, 41.5, color=AXES["DP"])
        _text(ax, 268.25, y + 3.9, answer, 8, ha="center", weight="bold", color=PAPER)
        _text(ax, 268.25, y + 7.4, note, 6.2, ha="center", color=PAPER)
    y, how = 133.5 + 14 * len(asked), dict(va="center", weight="bold", color=PAPER)
    _round(ax, 204, y, 45, color=AXES["TP"])
    _text(ax, 226.5, y + 4.5, "TP in the node, PP across,\nDP on top", 7.4, ha="center", **how)
    _text(ax, 251, y + 4.5, "t ≤ 8\nm ≥ 4·p\nZeRO-1 on DP", 6.6, va="center", linespacing=1.25)
    mends = (
        ("activations do not fit", "smaller b · TP with SP · recompute"),
        ("one sequence does not fit", "CP"),
        ("the bubble is large", "larger m · interleaved · zero bubble"),
        ("DP's sends show", "more tokens a GPU · FSDP: fewer m"),
        ("TP's sends show", "keep t in the node · smaller t"),
        ("it has experts", "EP, over the ranks of DP"),
    )
    _grid(ax, 204, 179.5, (40, 45), ("when…", "take"), mends, 4.3)


def _round(ax, x: float, y: float, wide: float, **look) -> None:
    """A box with round corners, for a question or an answer."""
    ax.add_patch(FancyBboxPatch((x, y), wide, 9, boxstyle="round,pad=0,rounding_size=1.5", **look))


def _arrow(ax, start, end, word: str) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=7, linewidth=1, color=INK))
    down = start[0] == end[0]
    _text(ax, start[0] + (1.2 if down else 1.5), start[1] + (3 if down else -1), word, 6.4)
