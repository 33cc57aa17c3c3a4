"""Draws timelines: a row for each rank, with a box for each of its operations, and its memory below."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import matplotlib as mpl
import matplotlib.figure
from matplotlib.collections import PathCollection
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from three_axes.table import human

from .picture import FAINT, HATCH, INK, PAPER, Picture, rank_colour, styled

WIDTH = 9.6  # inches of a picture
SCREEN = 5.35  # inches (588 pixels) that fit into JupyterLab's window on a laptop, or on a projector at 150 %
LEAST = 0.2  # the smallest height of a row, in inches, at which names can be read
# Kind of box -> (opacity of the rank's colour, height of the box). `WORDS` explains the kinds.
LOOKS = {
    "F": (0.35, 0.74),
    "B": (1.0, 0.74),
    "I": (1.0, 0.74),
    "W": (0.6, 0.44),
    "step": (1.0, 0.2),
    "busy": (1.0, 0.2),
}
# Kind of box -> its words in the legend.
WORDS = {
    "F": "faint: forward (F)",
    "B": "full: backward (B)",
    "I": "full: gradient of the input (I)",
    "W": "low: gradient of the weights (W)",
    "step": "thin: optimizer step",
    "busy": "thin: computing",
    "later": "underlined: second chunk of layers",
    "wait": "hatched: waiting for others",
    "gather": "striped: weights arrive",
    "reduce": "dotted: gradients leave",
}
# Kinds that are drawn in a lane of their own below the rank's row, with their hatch.
LANES = {"gather": "/////", "reduce": "....."}


@styled
def timeline(
    panels, title: str = "", memory: bool | None = None, critical: bool = False, high: float = SCREEN
) -> Picture:
    """Timelines, one above the other: measured ones (`world.timeline`) and simulated ones
    (`simulation.simulate`).

    panels: one timeline, or name -> timeline. memory: whether to draw what each rank holds under its row, the
    peak marked; by default where it is known. critical: mark a simulated timeline's critical path. Timelines
    in the same unit have the same scale, of time and of memory. Operations in `LANES` have a lane of their
    own. high: inches of the picture, at most; more where a rank's row would be lower than `LEAST`.
    """
    panels = panels if isinstance(panels, Mapping) else {"": panels}
    strips = {name: any(map(len, t.levels)) if memory is None else memory for name, t in panels.items()}
    rows = [
        len(t.rows) * ((0.62 if strips[name] else 0.42) + (0.2 if _lanes(t) else 0))
        for name, t in panels.items()
    ]
    units = [t.unit for t in panels.values()]
    # Inches under a panel, for its axis. Of neighbours in the same unit only the lowest names it.
    under = [0.35 if unit == after else 0.52 for unit, after in zip(units, [*units[1:], ""])]
    over, foot = 0.36, 0.26  # for a panel's title, and for the legend
    beside = sum(under) + over * len(rows) + foot
    share = min(1, (high - beside) / sum(rows))
    rows = [max(row * share, LEAST * len(t.rows)) for row, t in zip(rows, panels.values())]
    height = sum(rows) + beside
    with mpl.rc_context({"figure.constrained_layout.use": False}):  # all places are computed here
        figure = mpl.figure.Figure(figsize=(WIDTH, height))
    drawn = [s for t in panels.values() for row in [*t.rows, *_lanes(t)] for s in row]
    kinds = [k for k in WORDS if any(k in (s[0], "later" if _later(s[1]) else "") for s in drawn)]
    top = height
    for i, (name, t) in enumerate(panels.items()):
        top -= over + rows[i] + under[i]
        wide = 0.84 if strips[name] else 0.91
        ax = figure.add_axes((0.07, (top + under[i]) / height, wide, rows[i] / height))
        longest = max(o.makespan for o in panels.values() if o.unit == t.unit)
        alike = [o for o in panels.values() if (o.unit, o.level_unit) == (t.unit, t.level_unit)]
        most = max((size for o in alike for size in _tops(o)), default=0)
        panel(ax, t, strips[name], longest, most, _path(t) if critical else set())
        ax.set_title(" · ".join(filter(None, [title if i == 0 else "", name])))
        if units[i + 1 : i + 2] == [t.unit]:
            ax.set_xlabel("")
    legend = " · ".join([WORDS[k] for k in kinds] + ["empty: idle"])
    figure.text(0.5, 0.07 / height, legend, fontsize=min(9.5, 1100 / len(legend)), ha="center")
    return Picture(
        figure,
        title + ". " * bool(title) + " ".join(_words(name, t, strips[name]) for name, t in panels.items()),
    )


def _lanes(t) -> list[list]:
    """For each rank, its communication of the kinds in LANES; [] if no rank has any."""
    lanes = [[s for s in row if s[0] in LANES] for row in getattr(t, "streams", ())]
    return lanes if any(lanes) else []


def _path(t) -> set[tuple[int, float]]:
    """(rank, start) of the operations on the critical path, where it is known."""
    return {(t.schedule.rank_of[run.op.stage], run.start) for run in getattr(t, "critical_path", ())}


def _tops(t) -> list[float]:
    """The largest amount that each rank held."""
    return [max((size for _, size in steps), default=0) for steps in t.levels]


def panel(ax, t, strip: bool, longest: float, most: float, path: set) -> None:
    """Draw one timeline. most: the amount (bytes or chunks) that fills a memory strip."""
    scale = 1e3 if t.unit == "s" else 1
    tops, lanes = _tops(t), _lanes(t)
    lane = 0.24 if lanes else 0.0
    below = lane + (0.6 + lane / 4 if strip else 0.0)
    names: list[tuple[str, float, float, str]] = []
    naming = _naming(t, longest)

    def boxes(spans, bottom: float, high: float, **look) -> None:
        widths = [(scale * start, scale * (end - start)) for *_, start, end in spans]
        if widths:
            ax.broken_barh(widths, (bottom, high), **{"linewidth": 0.8} | look)

    for rank, row in enumerate(t.rows):
        y = rank * (1 + below)
        waits = _waits(row, 0.01 * longest)
        for kind, (alpha, high) in LOOKS.items():
            colour = tuple(alpha * c + 1 - alpha for c in mpl.colors.to_rgb(rank_colour(rank)))
            mine = [s for s in row if s[0] == kind]
            boxes(mine, y - high / 2, high, facecolor=colour, edgecolor=PAPER)
            for _, label, start, end in mine:
                pieces = _uncovered(start, end, waits)
                if len(pieces) == 1 and (text := naming(kind, label, pieces[0][1] - pieces[0][0])):
                    names.append((text, scale * sum(pieces[0]) / 2, y, _on(colour)))
        boxes([s for s in row if _later(s[1])], y + 0.3, 0.11, facecolor=INK, edgecolor=PAPER)
        boxes(waits, y - 0.37, 0.74, facecolor=PAPER, hatch=HATCH, edgecolor="#777777")
        marked = [s for s in row if (rank, s[2]) in path]
        boxes(marked, y - 0.37, 0.74, facecolor="none", edgecolor=INK, linewidth=2.2, zorder=3)
        if strip and tops[rank]:
            _strip(ax, t, rank, y + 0.44 + lane, below - lane, scale, most, longest)
        for kind, hatch in LANES.items() if lanes else ():
            mine = [s for s in lanes[rank] if s.kind == kind]
            boxes(mine, y + 0.42, 0.2, facecolor=PAPER, edgecolor=rank_colour(rank), hatch=hatch)
    if names:  # all names as one collection of shapes: a hundred texts would take 0.1 s more
        texts, x, ys, colours = zip(*names)
        points = Affine2D().scale(1 / 72) + ax.figure.dpi_scale_trans
        where = dict(offsets=list(zip(x, ys)), offset_transform=ax.transData, transform=points, zorder=4)
        shapes = PathCollection([_shape(text) for text in texts], facecolors=colours, linewidths=0, **where)
        ax.add_collection(shapes, autolim=False)
    last = (len(t.rows) - 1) * (1 + below)
    ax.set(
        yticks=[r * (1 + below) for r in range(len(t.rows))],
        yticklabels=[f"rank {r}" for r in range(len(t.rows))],
        ylim=(last + 0.5 + below, -0.5),
        xlim=(0, 1.002 * scale * longest),  # a pixel more, for the outline of the last box
        xlabel=("milliseconds" + ", which mean nothing: ranks shared a GPU" * getattr(t, "shared", False))
        if t.unit == "s"
        else t.unit,
    )
    if t.unit != "s":  # in other units, write the axis's last number too
        ticks = [at for at in ax.get_xticks() if 0 <= at <= 0.96 * longest] + [longest]
        ax.set_xticks(ticks, [f"{at:g}" for at in ticks])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _later(label: str) -> bool:
    """Whether an operation belongs to a rank's second (or fourth) chunk of layers."""
    return label.count("'") % 2 == 1


def _waits(row, least: float) -> list[tuple[float, float]]:
    """When a rank waits: neighbouring waits are joined, and waits shorter than `least` are left out."""
    joined: list[list[float]] = []
    for kind, _, start, end in row:
        if kind == "wait":
            if joined and start - joined[-1][1] < least / 4:
                joined[-1][1] = max(end, joined[-1][1])
            else:
                joined.append([start, end])
    return [(start, end) for start, end in joined if end - start >= least]


def _uncovered(start: float, end: float, waits) -> list[tuple[float, float]]:
    """The pieces of an operation outside all waits."""
    pieces, at = [], start
    for begin, until in waits:
        if begin < end and until > start:
            pieces.append((at, begin))
            at = until
    return [(begin, until) for begin, until in pieces + [(at, end)] if until > begin]


def _naming(t, longest: float):
    """naming(kind, label, length): the name to write into an operation, or "" if it does not fit.

    In a simulated timeline all operations of a kind are named in the same way: with the whole name, the
    number, the letter, or not at all. In a measured one, each operation that has room is named.
    """
    fits = lambda text, length: not text or _wide(text) + 3 <= length / longest * 0.84 * WIDTH * 72  # points

    def number(kind: str, label: str) -> str:
        return label[:-1] if _later(label) else label  # the line under it marks the later chunk

    def letter(kind: str, label: str) -> str:
        return kind if len(kind) == 1 else ""

    def whole(kind: str, label: str) -> str:
        return number(kind, label) if kind in ("step", "busy") else kind + number(kind, label)

    if not hasattr(t, "schedule"):
        return lambda kind, label, length: whole(kind, label) if fits(whole(kind, label), length) else ""
    chosen = dict.fromkeys(LOOKS, lambda kind, label: "")
    for kind in LOOKS:
        mine = [(label, end - start) for row in t.rows for k, label, start, end in row if k == kind]
        for name in (letter, number, whole):
            if all(fits(name(kind, label), length) for label, length in mine):
                chosen[kind] = name
    return lambda kind, label, _: chosen[kind](kind, label)


def _on(colour) -> str:
    """The colour for text on this colour: ink or paper, whichever contrasts."""
    red, green, blue = colour
    return PAPER if 0.3 * red + 0.59 * green + 0.11 * blue < 0.4 else INK


@cache
def _shape(text: str) -> mpl.path.Path:
    """A short text as a shape around (0, 0), in points."""
    path = TextPath((0, 0), text, size=9, prop=mpl.font_manager.FontProperties(weight="bold"))
    box = path.get_extents()
    return Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2).transform_path(path)


@cache
def _wide(text: str) -> float:
    return _shape(text).get_extents().width


def _strip(ax, t, rank: int, top: float, height: float, scale: float, most: float, longest: float) -> None:
    """What the rank holds, as steps that grow upwards from the strip's floor."""
    floor, tall = top + height - 0.06, height - 0.12
    steps = t.levels[rank]
    ends = scale * min(longest, getattr(t, "until", longest))  # explore.orders draws up to `until`
    times = [scale * at for at, _ in steps] + [ends]
    heights = [floor - tall * size / most for _, size in steps]
    ax.fill_between(
        times, floor, heights + heights[-1:], step="post", color="#8C8C8C", alpha=0.55, linewidth=0
    )
    ax.plot([0, scale * longest], [floor, floor], color=FAINT, linewidth=0.8)
    at, peak = max(steps, key=lambda s: s[1])
    words = _amount(t, peak) + ("" if t.level_unit == "B" else " in flight")
    ax.plot([scale * at], [floor - tall * peak / most], marker="v", color=INK, markersize=4)
    place = dict(xycoords=("axes fraction", "data"), textcoords="offset points", ha="left", va="center")
    ax.annotate("▾ peak\n" + words, (1.0, (top + floor) / 2 - 0.2), (4, 0), fontsize=8.5, **place)


def _amount(t, held: float) -> str:
    """A held amount as text: bytes or, if it counts chunks, microbatches."""
    return human(held) if t.level_unit == "B" else f"{held / t.schedule.v:.3g}"


def _words(name: str, t, strip: bool) -> str:
    rows = ", ".join(
        f"rank {r} " + " ".join(kind + label for kind, label, *_ in row if kind != "wait")[:120]
        for r, row in enumerate(t.rows)
    )
    held = f" Peaks: {', '.join(_amount(t, t.peak(r)) for r in range(len(t.rows)))}." if strip else ""
    # Measured times are left out: tests compare the words of two runs.
    return (f"{name}: " if name else "") + rows + "." + held
