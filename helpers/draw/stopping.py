"""Who reached which sequence number, in runs that stopped."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.figure

from .picture import HATCH, INK, Picture, rank_colour, styled

WIDTH, ROW = 9.6, 1.22  # inches
LEGEND = (
    "light: has ended\nhatched: called, waits for others\nempty: never called\n"
    "below: sequence number in the group of all ranks"
)


@styled
def reached(runs: list) -> Picture:
    """A panel for each run: a bar for each rank, as long as it came in the group of all ranks."""
    rows = -(-len(runs) // 2)
    figure = mpl.figure.Figure(figsize=(WIDTH, ROW * rows + 0.1))
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    words = [_panel(ax, run) for ax, run in zip(axes, runs)]
    for ax in axes[len(runs) :]:
        ax.axis("off")
        ax.text(0, 0.5, LEGEND, va="center", fontsize=9)
    return Picture(figure, "Who reached which sequence number. " + " ".join(words))


def _panel(ax, run) -> str:
    numbers = run.last_numbers
    top = max(numbers.values())
    told = []
    for rank, number in numbers.items():
        ax.barh(rank, number - run.is_open(rank), height=0.66, color=rank_colour(rank), alpha=0.45)
        if run.is_open(rank):
            look = {"color": "none", "hatch": HATCH, "edgecolor": rank_colour(rank)}
            ax.barh(rank, 1, left=number - 1, height=0.66, **look)
        ax.text(number + 0.12, rank, run.doing(rank), va="center", fontsize=8.5, color=INK)
        told.append(f"rank {rank} {number}, {run.doing(rank)}")
    for rank in run.dead:
        ax.text(0.12, rank, "died, and left no record", va="center", fontsize=8.5, color=INK)
        told.append(f"rank {rank} died")
    ranks = range(len(run.seen))
    ax.set_yticks(ranks, [f"rank {r}" for r in ranks], fontsize=9)
    ax.set_ylim(len(ranks) - 0.4, -0.6)
    ax.set_xlim(0, top + 4)
    ax.set_xticks(range(1, top + 1))
    ax.tick_params(axis="x", labelsize=9)
    ax.set_title(f"run {run.number}", fontsize=10.5)
    return f"run {run.number}: {'; '.join(told)}."
