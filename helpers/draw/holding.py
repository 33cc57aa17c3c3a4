"""Pictures of what a rank holds in memory."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np

from three_axes.table import human

from .picture import FAINT, INK, PAPER, Picture, box, fix, rank_colour, row_of_panels, styled

PARTS = {  # kind of memory -> (colour, hatch)
    "weights": (INK, ""),
    "gradients": ("#777777", ""),
    "optimizer": ("#B5B5B5", ""),
    "activations": (PAPER, "...."),
    "logits": (PAPER, "xxxx"),
    "gathered weights": (PAPER, "----"),
    "overhead": (PAPER, ""),
}


def _stack(ax, columns: list[dict[str, float]], looks: dict[str, tuple[str, str]], width: float):
    """Draw each column's parts one above the other, with labels for a legend. Returns the heights."""
    heights = np.zeros(len(columns))
    for part, (colour, hatch) in looks.items():
        sizes = np.array([column.get(part, 0.0) for column in columns])
        if sizes.any():
            bars = ax.bar(range(len(columns)), sizes, width, bottom=heights, label=part)
            plt.setp(bars, facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.8)
            heights += sizes
    return heights


@styled
def memory_by_stage(stages: Sequence[dict[str, float]], capacity: float, title: str) -> Picture:
    """Stacked bars: the bytes by kind on a GPU of each pipeline stage. Dashed: the device's capacity."""
    figure, ((ax,),) = row_of_panels(1, 9.6, 3.1)
    fix(figure, left=0.6, right=2.9, top=0.35, bottom=0.35)
    columns = [{kind: size / 1e9 for kind, size in stage.items()} for stage in stages]
    heights, room, n = _stack(ax, columns, PARTS, 0.6), capacity / 1e9, len(stages)
    for x, top in enumerate(heights):
        weight = "bold" if top == heights.max() else "normal"
        ax.text(x, top, f"{top:.1f}", ha="center", va="bottom", fontweight=weight)
    ax.axhline(room, color="#D55E00", linestyle="--", linewidth=1.8)
    ax.text(n - 0.5, room, f" holds {room:.0f}", color="#B5482A", va="center", ha="left")
    ax.set(xticks=range(n), xticklabels=[f"stage {k}" for k in range(n)], xlim=(-0.6, n - 0.5))
    ax.set(ylabel="GB on each GPU", ylim=(0, 1.12 * max(heights.max(), room)))
    ax.set_title(title, fontsize=12 if len(title) <= 70 else 10)
    ax.legend(reverse=True, loc="upper left", bbox_to_anchor=(1.14, 1.0))
    words = (
        f"stage {k}: {top:.1f} GB, of it "
        + ", ".join(f"{kind} {column[kind]:.1f}" for kind in PARTS if column.get(kind))
        for k, (column, top) in enumerate(zip(columns, heights))
    )
    return Picture(figure, f"{title}. " + "; ".join(words) + f". The device holds {room:.0f} GB.")


@styled
def states(held: dict[str, Sequence[dict[str, int]]]) -> Picture:
    """A panel for each way to train: the bytes that each rank holds of each part of the states.

    held: name -> each rank's bytes by part, measured; ranks under the first name hold all of every part. A
    part is a box, whose height is its bytes. Of a rank that holds 1/d of the part, that piece of the box is
    filled.
    """
    figure, axes = row_of_panels(len(held), 9.6, 3.6)
    whole, words = next(iter(held.values()))[0], []
    for ax, (name, ranks) in zip(axes[0], held.items()):
        floor = 0.0
        for part, size in whole.items():
            colour, hatch = PARTS[part]
            for rank, mine in enumerate(ranks):
                box(ax, rank, floor / 1e6, 0.86, size / 1e6, facecolor=PAPER, edgecolor=FAINT, linewidth=0.8)
                own = rank * mine[part] if mine[part] < 0.9 * size else 0
                look = dict(facecolor=colour, hatch=hatch, edgecolor=PAPER, linewidth=0.8)
                box(ax, rank, (floor + own) / 1e6, 0.86, mine[part] / 1e6, **look)
            if ax is axes[0][0]:
                at = (floor + size / 2) / 1e6
                ax.text(-0.15, at, f"{part}\n{human(size)}", ha="right", va="center", fontsize=9.5)
            floor += size
        total = human(sum(ranks[0].values()))
        ax.set_title(f"{name}: {total}", fontsize=11)
        ax.set(xlim=(-0.1, len(ranks)), ylim=(0, 1.01 * floor / 1e6), yticks=[])
        ax.set_xticks([rank + 0.43 for rank in range(len(ranks))], range(len(ranks)))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        words.append(f"{name}: {', '.join(f'{part} {human(size)}' for part, size in ranks[0].items())}")
    figure.supxlabel("rank · filled: what it holds · empty: what other ranks hold", fontsize=10)
    return Picture(figure, f"States on each rank. {'; '.join(words)}.")


@styled
def memory_traces(runs: dict[str, Sequence[Sequence[float]]], budget: float) -> Picture:
    """A panel for each run: the ranks' peaks in every step, with a line of its own for each rank that differs
    from the others, and the budget as a dashed line. The last step failed.

    runs: name -> bytes, (steps, ranks). budget: bytes.
    """
    figure, axes = row_of_panels(len(runs), 2.9 * len(runs), 2.7)
    room, parts = budget / 1e6, []
    for ax, (name, peaks) in zip(axes[0], runs.items()):
        held = np.array(peaks) / 1e6  # (steps, ranks)
        usual, last = np.sort(held)[:, held.shape[1] // 2], len(held)
        unusual = np.flatnonzero((abs(held.T - usual) >= 0.02 * room).any(1))
        steps = range(1, last + 1)
        ax.plot(steps, usual, color=INK, marker="o", markersize=4, linewidth=1.6)
        for rank in unusual:
            ax.plot(steps, held[:, rank], color=rank_colour(rank), marker="s", markersize=5, linewidth=1.6)
            ax.text(last + 0.55, held[-1, rank], f"rank {rank}", fontsize=9, va="center")
        whose = "the other ranks" if len(unusual) else "all ranks"
        ax.text(1, usual[0] - 0.06 * room, whose, fontsize=9, va="top")
        ax.axhline(room, color="#D55E00", linestyle="--", linewidth=1.8)
        ax.plot(last, held[-1].max(), marker="x", color=INK, markersize=11, markeredgewidth=2.5)
        ax.set(title=name, xlabel="step", xlim=(0.6, 10), xticks=range(1, 10, 2))
        ax.set(ylabel="MB, peak of the step" if ax is axes[0][0] else "", ylim=(0, 1.35 * room))
        parts.append(
            f"{name}: {', '.join(f'{most:.2f}' for most in held.max(1))} MB on the fullest rank, at the end"
            f" {held[-1].min():.2f} on the emptiest"
        )
    figure.supxlabel(f"dashed: the budget of {human(budget)} · ×: the step that failed", fontsize=10)
    return Picture(
        figure, f"Peaks of memory, step by step; the budget is {human(budget)}. {'; '.join(parts)}."
    )


@styled
def segments(listed: Sequence[dict], title: str) -> Picture:
    """The segments that an allocator took from the device, in order of addresses: a stroke begins each
    segment, tensors are filled, free blocks empty. listed: the segments of PyTorch's memory snapshot.
    """
    figure, ((ax,),) = row_of_panels(1, 9.0, 1.5)
    fix(figure, left=0.3, right=0.3, top=0.35, bottom=0.55)
    free = [0, 0]
    for segment in listed:
        for block in segment["blocks"]:
            inactive = block["state"] == "inactive"
            free[0] += inactive * block["size"]
            free[1] = max(free[1], inactive * block["size"])
            colour = PAPER if inactive else "#777777"
            box(ax, block["address"] / 1e6, -0.4, block["size"] / 1e6, 0.8, facecolor=colour, ec="none")
        ax.vlines(segment["address"] / 1e6, -0.4, 0.4, color=INK, linewidth=0.5)
    end = sum(segment["total_size"] for segment in listed) / 1e6
    ax.vlines(end, -0.4, 0.4, color=INK, linewidth=0.5)
    ax.hlines([-0.4, 0.4], 0, end, color=INK, linewidth=0.8)
    ax.set(xlim=(0, end), ylim=(-0.45, 0.45), yticks=[], xlabel="MB of the device", title=title)
    return Picture(
        figure,
        f"{title}. {len(listed)} segments, {human(free[0])} free in all, the largest free block"
        f" {human(free[1])}.",
    )
