"""The picture that most drops use: what each rank sees, holds, sends and keeps in a real step."""

from __future__ import annotations

import math
from typing import NamedTuple

from matplotlib.patches import FancyArrowPatch, Patch
from matplotlib.path import Path

from three_axes.count import Traffic
from three_axes.paper import Placement
from three_axes.table import human

from .holding import PARTS
from .picture import FAINT, INK, PAPER, Picture, box, rank_colour, row_of_panels, styled, write_rank
from .sending import sent_between

EXAMPLES, BLOCKS = 8, 4  # examples in a batch, and blocks, of the toy (the course's small model)
KINDS = {"parameters": "weights"}  # kind in `memory.by_kind` -> its name in the picture
COLUMN, STEP = 1.2, 1.55  # the width of a rank's column, and the distance to the next column
SEES, SENDS, HOLDS, KEEPS = 8.9, 6.55, 2.3, 1.0  # where the four rows of `splits` are, from below
# The height of an arrow to the next rank. If ranks send along several axes: the height of each axis's arrows.
ARC, LANE = 0.75, 0.72


class _Split(NamedTuple):
    """One step of the toy on real ranks: a value of the dict that `splits` takes."""

    sizes: dict[str, int]
    traffic: Traffic
    kept: list[dict[str, int]]

    def part(self, rank: int, axis: str, of: int) -> tuple[float, float]:
        """(first, number) of the rank's share, if the axis cuts `of` things; (0, of) if nothing is cut."""
        n = self.sizes.get(axis, 1)
        return Placement(self.sizes).coordinates(rank).get(axis, 0) * of / n, of / n


@styled
def splits(runs: dict[str, tuple[dict[str, int], Traffic, list[dict[str, int]]]]) -> Picture:
    """A panel for each run, a column for each rank.

    runs: name -> one step of the toy on real ranks: its sizes (axis -> ranks, of "dp", "tp" and "pp", the
    outermost first), its traffic, and each rank's bytes by kind, as `memory.by_kind` returns them.

    A column has four rows: the examples of the batch that the rank sees; the bytes that it sent in the step,
    measured; the part of the model's four blocks that it holds, by width and depth; the bytes that it keeps,
    all on one scale.
    """
    steps = {name: _Split(*run) for name, run in runs.items()}
    n = max(len(run.kept) for run in steps.values())
    lanes = 1.3 * any(_left(run) < -1 for run in steps.values())  # inches for the names of the lanes
    figure, axes = row_of_panels(len(steps), max(3.3, 0.82 * n + 0.4) * len(steps) + lanes, 4.2)
    most_kept = max(sum(_kinds(kept).values()) for run in steps.values() for kept in run.kept)
    most_sent = max(
        (size for run in steps.values() for size in sent_between(run.traffic).values()), default=1.0
    )
    words = []
    for ax, (name, run) in zip(axes[0], steps.items()):
        for rank in range(len(run.kept)):
            _column(ax, run, rank, most_kept)
        _arrows(ax, run, most_sent)
        ax.set_title(name)
        ax.set(xlim=(_left(run), STEP * (n - 1) + COLUMN + 0.15), ylim=(0.3, 9.9))
        ax.axis("off")
        words.append(f"{name}: {_as_text(run)}")
    _name_the_rows(axes[0][0], _left(next(iter(steps.values()))))
    held = {kind for run in steps.values() for kept in run.kept for kind in _kinds(kept)}
    names = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=INK, label=kind)
        for kind, (colour, hatch) in PARTS.items()
        if kind in held
    ]
    # A single panel of four ranks is narrower than a row of all names.
    columns = len(names) if figure.get_figwidth() > 5 else 2
    figure.legend(handles=names, loc="outside lower left", ncols=columns, fontsize=10)
    return Picture(figure, "What each rank sees, sends, holds and keeps. " + " ".join(words))


def _kinds(kept: dict[str, int]) -> dict[str, int]:
    """The bytes of one rank by the strip's names, without zeros."""
    named = {KINDS.get(kind, kind): size for kind, size in kept.items() if kind != "resident"}
    return {kind: size for kind, size in named.items() if size}


def _column(ax, run: _Split, rank: int, most_kept: float) -> None:
    """Draw what one rank sees, holds and keeps."""
    left, colour = rank * STEP, rank_colour(rank)
    write_rank(ax, left + COLUMN / 2, SEES + 0.75, rank, 11, outline=2.5)
    first, number = run.part(rank, "dp", EXAMPLES)
    for i in range(EXAMPLES):
        mine = first <= i < first + number
        look = dict(facecolor=colour if mine else PAPER, edgecolor=INK if mine else FAINT, linewidth=0.8)
        box(ax, left + i * COLUMN / EXAMPLES, SEES, 0.8 * COLUMN / EXAMPLES, 0.4, **look)
    lowest, height = run.part(rank, "pp", BLOCKS)
    start, width = run.part(rank, "tp", 1)
    for i in range(BLOCKS):
        y = HOLDS + i
        box(ax, left, y, COLUMN, 0.85, facecolor=PAPER, edgecolor=FAINT, linewidth=0.8)
        if lowest <= i < lowest + height:
            box(ax, left + start * COLUMN, y, width * COLUMN, 0.85, facecolor=colour, edgecolor=INK, lw=0.8)
    kept, at = _kinds(run.kept[rank]), left
    for kind, size in kept.items():
        part = COLUMN * size / most_kept
        box(ax, at, KEEPS, part, 0.5, facecolor=PARTS[kind][0], hatch=PARTS[kind][1], edgecolor=INK, lw=0.6)
        at += part
    ax.text(left + COLUMN / 2, KEEPS - 0.2, human(sum(kept.values())), ha="center", va="top", fontsize=9)


def _arrows(ax, run: _Split, most_sent: float) -> None:
    """Draw the bytes that ranks sent to each other. Along one axis: an arc for each pair, higher for a longer
    distance, and each size is written once. Along several axes: a lane for each, the innermost lowest.
    """
    sent = sent_between(run.traffic)
    axes = [axis for axis in reversed(run.sizes) if run.sizes[axis] > 1]
    labelled = _labelled(sent)
    for (a, b), size in sent.items():
        both, axis = (b, a) in sent, Placement(run.sizes).axis_between(a, b)
        if both and a > b or axis is None:
            continue
        size, back = max(size, sent.get((b, a), 0)), min(size, sent.get((b, a), 0))
        x, y = (rank * STEP + COLUMN / 2 for rank in (a, b))
        floor, top = SENDS, ARC * math.sqrt(abs(a - b))
        if len(axes) > 1:
            floor += LANE * axes.index(axis)
            top = 0.55 * LANE
        bow = Path([(x, floor), ((x + y) / 2, floor + 2 * top), (y, floor)], [1, 3, 3])
        heads = "<|-|>" if both else "-|>"
        look = dict(mutation_scale=9, linewidth=0.8 + 2 * size / most_sent, color=INK, zorder=3)
        ax.add_patch(FancyArrowPatch(path=bow, arrowstyle=heads, **look))
        if len(axes) == 1 and ((a, b) in labelled or (b, a) in labelled):
            label = human(size) + " each way" * (back > 0.95 * size)
            text = ax.text((x + y) / 2, floor + top, label, ha="center", va="center", fontsize=9, zorder=4)
            text.set_bbox(dict(boxstyle="round,pad=0.1", facecolor=PAPER, edgecolor="none"))
    for lane, axis in enumerate(axes if len(axes) > 1 else ()):
        sizes = [size for (a, b), size in sent.items() if Placement(run.sizes).axis_between(a, b) == axis]
        if sizes:
            most = "up to " * (min(sizes) < 0.99 * max(sizes)) + human(max(sizes))
            look = dict(ha="right", va="center", fontsize=9)
            ax.text(-0.1, SENDS + LANE * (lane + 0.25), f"{axis}: {most}", **look)
    if not sent:
        ax.text(0, SENDS, _nothing(run), fontsize=9)


def _nothing(run: _Split) -> str:
    """The text in place of arrows if there are none."""
    return "not measured on this system" if run.traffic.matrix is None else "nothing"


def _labelled(sent: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    """The arrows at which a size is written. Of arrows of about one size this is the widest. Of equally wide
    arrows it is the last between neighbours, otherwise the first, so that sizes do not cover each other.
    """
    chosen: list[tuple[int, int]] = []
    sizes: list[float] = []
    place = lambda pair: (-abs(pair[0] - pair[1]), min(pair) * (-1 if abs(pair[0] - pair[1]) == 1 else 1))
    for pair in sorted(sent, key=place):
        if all(abs(sent[pair] / size - 1) > 0.05 for size in sizes):
            chosen.append(pair)
            sizes.append(sent[pair])
    return chosen


def _left(run: _Split) -> float:
    """The left edge of a panel. The names of lanes are to the left of the first rank."""
    return -0.15 if sum(size > 1 for size in run.sizes.values()) < 2 else -2.6


def _name_the_rows(ax, left: float) -> None:
    rows = {"sees": SEES + 0.2, "sends": SENDS + 0.7, "holds": HOLDS + BLOCKS / 2, "keeps": KEEPS + 0.25}
    for name, y in rows.items():
        ax.text(left - 0.1, y, name, ha="right", va="center", fontsize=10, rotation=90)


def _as_text(run: _Split) -> str:
    """The content of a panel as a text, for readers who cannot see it."""
    ranks = range(len(run.kept))
    arrows = ", ".join(
        f"rank {a} sent {human(size)} to rank {b}" for (a, b), size in sent_between(run.traffic).items()
    )
    holds = ", ".join(human(sum(_kinds(run.kept[rank]).values())) for rank in ranks)
    sees = run.part(0, "dp", EXAMPLES)[1], run.part(0, "pp", BLOCKS)[1], run.part(0, "tp", 1)[1]
    return (
        f"a rank sees {sees[0]:.0f} of {EXAMPLES} examples and holds {sees[2]:.0%} of the width of"
        f" {sees[1]:.0f} of {BLOCKS} blocks; {arrows or 'sent: ' + _nothing(run)}; kept by rank:"
        f" {holds}."
    )
