"""The picture of who did what when: a row for each rank, its memory underneath, and predicted over measured."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patheffects import withStroke

from ..table import human
from .draw import FAINT, HATCH, INK, PAPER, Picture, _styled, rank_colour

# How full a rank's colour is, and how it is filled.
LOOKS = {"F": (0.35, ""), "B": (1.0, ""), "I": (0.8, ""), "W": (0.55, "...."), "step": (1.0, "xx")}
WORDS = {"F": "light: forward (F)", "B": "dark: backward (B)", "I": "dark: gradient of the input (I)", "W": "dotted: gradient of the weights (W)",
         "step": "crossed: optimizer", "wait": "hatched: waiting for others"}


@_styled
def timeline(panels, title: str = "", memory: bool | None = None, critical: bool = False) -> Picture:
    """Timelines, one above the other: measured ones (`world.timeline`) and simulated ones (`schedules.simulate`).

    panels: one timeline, or name -> timeline. memory: whether to draw what each rank holds under its row, the peak marked; by
    default where it is known. critical: mark a simulated timeline's critical path. Timelines in the same unit get the same scale.
    """
    panels = panels if isinstance(panels, Mapping) else {"": panels}
    strips = {name: any(map(len, t.levels)) if memory is None else memory for name, t in panels.items()}
    heights = [len(t.rows) * (0.66 if strips[name] else 0.42) + 0.55 for name, t in panels.items()]
    figure, axes = plt.subplots(len(panels), 1, figsize=(9.6, sum(heights) + 0.5), squeeze=False, height_ratios=heights)
    kinds = [k for k in WORDS if any(s[0] == k for t in panels.values() for row in t.rows for s in row)]
    for ax, (name, t) in zip(axes[:, 0], panels.items()):
        longest = max(o.makespan for o in panels.values() if o.unit == t.unit)
        _panel(ax, t, strips[name], longest, _path(t) if critical else set())
        ax.set_title(" · ".join(filter(None, [title if ax is axes[0, 0] else "", name])))
    figure.supxlabel(" · ".join([WORDS[k] for k in kinds] + ["empty: idle"]), fontsize=9.5)
    return Picture(figure, title + ". " * bool(title) + " ".join(_words(name, t, strips[name]) for name, t in panels.items()))


def _path(t) -> set[tuple[int, float]]:
    """(rank, start) of the operations on the critical path."""
    return {(t.schedule.rank_of[run.op.stage], run.start) for run in t.critical_path} if hasattr(t, "critical_path") else set()


def _panel(ax, t, strip: bool, longest: float, path: set) -> None:
    scale = 1e3 if t.unit == "s" else 1
    tops = [max((size for _, size in steps), default=0) for steps in t.levels]
    below = 0.42 if strip else 0.0
    for rank, row in enumerate(t.rows):
        y = rank * (1 + below)
        for kind, label, start, end in sorted(row, key=lambda s: s[0] == "wait"):  # waits lie on top
            _box(ax, rank, y, kind, label, scale * start, scale * (end - start), scale * longest, (rank, start) in path)
        if strip and tops[rank]:
            _strip(ax, rank, t, y + 0.44, below, scale, max(tops), longest)
    last = (len(t.rows) - 1) * (1 + below)
    ax.set(yticks=[r * (1 + below) for r in range(len(t.rows))], yticklabels=[f"rank {r}" for r in range(len(t.rows))],
           ylim=(last + 0.5 + below, -0.5), xlim=(0, scale * longest), xlabel="milliseconds" if t.unit == "s" else t.unit)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _box(ax, rank: int, y: float, kind: str, label: str, start: float, width: float, longest: float, on_path: bool) -> None:
    if kind == "wait":
        ax.barh(y, width, left=start, height=0.74, facecolor=PAPER, edgecolor="#777777", hatch=HATCH, linewidth=0.5)
        return
    alpha, hatch = LOOKS[kind]
    ax.barh(y, width, left=start, height=0.74, facecolor=mpl.colors.to_rgba(rank_colour(rank), alpha), hatch=hatch,
            edgecolor=INK if on_path else PAPER, linewidth=2.2 if on_path else 0.8, zorder=3 if on_path else 2)
    text = kind + label
    room = width / longest * 9.0 * 72 / 5.4  # characters of this size that fit
    if kind == "step" or room < len(text):
        text = label
    if text and room >= len(text):
        light = alpha < 0.5
        ax.text(start + width / 2, y, text, ha="center", va="center", fontsize=9, fontweight="bold", color=INK if light else PAPER,
                path_effects=[] if light else [withStroke(linewidth=2, foreground=INK)], zorder=4)


def _strip(ax, rank: int, t, top: float, height: float, scale: float, most: float, longest: float) -> None:
    """What the rank holds, as steps that grow upwards from the strip's floor."""
    floor, tall = top + height - 0.06, height - 0.12
    steps = t.levels[rank]
    times = [scale * at for at, _ in steps] + [scale * longest]
    heights = [floor - tall * size / most for _, size in steps]
    ax.fill_between(times, floor, heights + heights[-1:], step="post", color="#8C8C8C", alpha=0.55, linewidth=0)
    ax.plot([0, scale * longest], [floor, floor], color=FAINT, linewidth=0.8)
    at, peak = max(steps, key=lambda s: s[1])
    words = human(peak) if t.level_unit == "B" else f"{peak} {t.level_unit}"
    ax.plot([scale * at], [floor - tall * peak / most], marker="v", color=INK, markersize=4)
    ax.annotate("▾ peak\n" + words, (1.0, (top + floor) / 2 - 0.2), (4, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", fontsize=8.5, ha="left", va="center")


def _words(name: str, t, strip: bool) -> str:
    rows = ", ".join(f"rank {r} " + " ".join(kind + label for kind, label, *_ in row if kind != "wait")[:120] for r, row in enumerate(t.rows))
    held = ""
    if strip:
        held = " Peaks: " + ", ".join(human(t.peak(r)) if t.level_unit == "B" else str(t.peak(r)) for r in range(len(t.rows))) + "."
    # Measured times and bytes are left out: the words are compared from run to run.
    return (f"{name}: " if name else "") + rows + "." + held
