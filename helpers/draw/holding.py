"""What a rank holds in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from three_axes.table import human

from .cutting import _ranks
from .picture import INK, PAPER, Picture, fix, rank_colour, row_of_panels, styled

PARTS = {
    "weights": (INK, ""),
    "gradients": ("#777777", ""),
    "optimizer": ("#B5B5B5", ""),
    "activations": (PAPER, "...."),
    "logits": (PAPER, "xxxx"),
    "gathered weights": (PAPER, "----"),
    "overhead": (PAPER, ""),
}


@styled
def memory_by_ranks(held: dict[int, dict[str, int]], title: str) -> Picture:
    """Stacked bars: what one rank holds (bytes by kind) for each number of ranks."""
    figure, ((ax,),) = row_of_panels(1, 7.2, 2.9)
    kinds = [k for k in next(iter(held.values())) if k not in ("resident", "communication")]
    looks = dict(zip(kinds, ((INK, ""), ("#777777", ""), ("#B5B5B5", ""), (PAPER, "...."))))
    positions = range(len(held))
    base = np.zeros(len(held))
    for kind in kinds:
        sizes = np.array([memory[kind] for memory in held.values()]) / 1e6
        colour, hatch = looks[kind]
        ax.bar(
            positions,
            sizes,
            0.55,
            bottom=base,
            label=kind,
            facecolor=colour,
            hatch=hatch,
            edgecolor=INK,
            linewidth=0.8,
        )
        base += sizes
    for x, top in zip(positions, base):
        ax.text(x, top, f"{top:.3g}", ha="center", va="bottom")
    ax.set(
        xticks=positions,
        xticklabels=[_ranks(n) for n in held],
        ylabel="MB on each rank",
        title=title,
        ylim=(0, base.max() * 1.15),
    )
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return Picture(
        figure,
        title
        + ". "
        + "; ".join(
            f"{_ranks(n)}: " + ", ".join(f"{kind} {human(memory[kind])}" for kind in kinds)
            for n, memory in held.items()
        ),
    )


@styled
def memory_by_stage(stages: Sequence[dict[str, float]], capacity: float, title: str) -> Picture:
    """Stacked bars: what one GPU of each pipeline stage holds, bytes by kind, and the device's capacity as a
    line.
    """
    figure, ((ax,),) = row_of_panels(1, 9.6, 3.1)
    fix(figure, left=0.6, right=2.9, top=0.35, bottom=0.35)
    base = np.zeros(len(stages))
    for kind, (colour, hatch) in PARTS.items():
        sizes = np.array([stage.get(kind, 0.0) for stage in stages]) / 1e9
        if sizes.any():
            ax.bar(
                range(len(stages)),
                sizes,
                0.6,
                bottom=base,
                label=kind,
                facecolor=colour,
                hatch=hatch,
                edgecolor=INK,
                linewidth=0.8,
            )
            base += sizes
    for x, top in enumerate(base):
        ax.text(
            x,
            top,
            f"{top:.1f}",
            ha="center",
            va="bottom",
            fontweight="bold" if top == base.max() else "normal",
        )
    ax.axhline(capacity / 1e9, color="#D55E00", linestyle="--", linewidth=1.8)
    ax.text(
        len(stages) - 0.5,
        capacity / 1e9,
        f" holds {capacity / 1e9:.0f}",
        color="#B5482A",
        va="center",
        ha="left",
    )
    ax.set(
        xticks=range(len(stages)),
        xticklabels=[f"stage {k}" for k in range(len(stages))],
        ylabel="GB on each GPU",
        ylim=(0, 1.12 * max(base.max(), capacity / 1e9)),
        xlim=(-0.6, len(stages) - 0.5),
    )
    ax.set_title(title, fontsize=12 if len(title) <= 70 else 10)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.14, 1.0))
    return Picture(
        figure,
        f"{title}. "
        + "; ".join(
            f"stage {k}: {top:.1f} GB, of it "
            + ", ".join(f"{kind} {stage[kind] / 1e9:.1f}" for kind in PARTS if stage.get(kind))
            for k, (stage, top) in enumerate(zip(stages, base))
        )
        + f". The device holds {capacity / 1e9:.0f} GB.",
    )


@styled
def memory_traces(runs: dict[str, Sequence[Sequence[float]]], budget: float) -> Picture:
    """A panel for each run: the ranks' peaks in every step, those that go their own way by name, and the
    budget as a line. The last step failed.
    """
    figure, axes = row_of_panels(len(runs), 2.9 * len(runs), 2.7)
    parts = []
    for ax, (name, peaks) in zip(axes[0], runs.items()):
        usual = [sorted(p)[len(p) // 2] for p in peaks]
        alike = [
            rank
            for rank in range(len(peaks[0]))
            if all(abs(p[rank] - u) < 0.02 * budget for p, u in zip(peaks, usual))
        ]
        steps = range(1, len(peaks) + 1)
        ax.plot(steps, [u / 1e6 for u in usual], color=INK, marker="o", markersize=4, linewidth=1.6)
        for rank in set(range(len(peaks[0]))) - set(alike):
            ax.plot(
                steps,
                [p[rank] / 1e6 for p in peaks],
                color=rank_colour(rank),
                marker="s",
                markersize=5,
                linewidth=1.6,
            )
            ax.text(len(peaks) + 0.55, peaks[-1][rank] / 1e6, f"rank {rank}", fontsize=9, va="center")
        ax.text(
            1,
            usual[0] / 1e6 - 0.06 * budget / 1e6,
            "all ranks" if len(alike) == len(peaks[0]) else "the other ranks",
            fontsize=9,
            va="top",
        )
        ax.axhline(budget / 1e6, color="#D55E00", linestyle="--", linewidth=1.8)
        ax.plot(len(peaks), max(peaks[-1]) / 1e6, marker="x", color=INK, markersize=11, markeredgewidth=2.5)
        ax.set(
            title=name,
            xlabel="step",
            ylabel="MB, peak of the step" if ax is axes[0][0] else "",
            ylim=(0, 1.35 * budget / 1e6),
            xlim=(0.6, 10),
            xticks=range(1, 10, 2),
        )
        parts.append(
            f"{name}: "
            + ", ".join(f"{max(p) / 1e6:.2f}" for p in peaks)
            + f" MB on the fullest rank, at the end {min(peaks[-1]) / 1e6:.2f} on the emptiest"
        )
    figure.supxlabel(f"dashed: the budget of {human(budget)} · ×: the step that failed", fontsize=10)
    return Picture(
        figure, f"Peaks of memory, step by step; the budget is {human(budget)}. " + "; ".join(parts) + "."
    )


@styled
def segments(listed: Sequence[dict], title: str) -> Picture:
    """What an allocator asked of the device, in order of addresses: each segment between two strokes, tensors
    filled, free blocks white. `listed`: as in PyTorch's memory snapshot.
    """
    figure, ((ax,),) = row_of_panels(1, 9.0, 1.5)
    fix(figure, left=0.3, right=0.3, top=0.35, bottom=0.55)
    free = [0, 0]
    for segment in listed:
        for block in segment["blocks"]:
            inactive = block["state"] == "inactive"
            free[0] += inactive * block["size"]
            free[1] = max(free[1], inactive * block["size"])
            ax.barh(
                0,
                block["size"] / 1e6,
                left=block["address"] / 1e6,
                height=0.8,
                facecolor=PAPER if inactive else "#777777",
                edgecolor="none",
            )
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
