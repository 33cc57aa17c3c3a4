"""The pictures of the drops, but for timelines (gantt.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patheffects import withStroke

from ..runtime.traffic import Traffic
from ..table import human
from ..theory.placement import crosses, groups
from .picture import FAINT, HATCH, INK, PAPER, RANKS, Picture, fix, rank_colour, row_of_panels, styled


def _ranks(n: int) -> str:
    return f"{n} rank{'s' * (n > 1)}"


@styled
def cuts(n: int = 4) -> Picture:
    """The block of work, batch × width × depth, cut by each of the three axes and coloured by rank."""
    figure, axes = row_of_panels(3, 9.6, 2.9)
    titles = ("data: cut the batch", "tensor: cut the width", "pipeline: cut the depth")
    for axis, (ax, title) in enumerate(zip(axes[0], titles)):
        _cube(ax, axis, n)
        ax.set_title(title)
    return Picture(
        figure,
        "The same cube of batch by width by depth three times. Data parallelism cuts it along the batch,"
        f" tensor parallelism along the width, pipeline parallelism along the depth, one of {n} slices to a"
        " rank.",
    )


def _cube(ax, cut: int, n: int) -> None:
    """Three visible faces of a cube, seen from above left; `cut` is 0 for batch, 1 for width, 2 for depth."""
    # Unit vectors on paper: width runs right, depth runs up, batch runs back.
    batch, width, depth = np.array([0.5, 0.32]), np.array([1.0, 0.0]), np.array([0.0, 1.0])
    unit = (batch, width, depth)

    def face(origin, a, b, shade):
        """The parallelogram origin, a, b, in strips where the cut crosses it, of one colour where it does
        not.
        """
        slices = n if cut in (a, b) else 1
        for i in range(slices):
            lo, hi = i / slices, (i + 1) / slices
            along, across = (unit[a], unit[b]) if cut != b else (unit[b], unit[a])
            corners = [
                origin + lo * along,
                origin + hi * along,
                origin + hi * along + across,
                origin + lo * along + across,
            ]
            rank = i if slices > 1 else {0: 0, 1: n - 1, 2: n - 1}[cut]
            ax.add_patch(plt.Polygon(corners, facecolor=rank_colour(rank), edgecolor=PAPER, linewidth=1.5))
            if shade:
                ax.add_patch(plt.Polygon(corners, facecolor="black", alpha=shade, edgecolor="none"))

    zero = np.zeros(2)
    face(zero, 1, 2, 0)  # front: width × depth
    face(depth, 1, 0, 0.10)  # top: width × batch
    face(width, 0, 2, 0.22)  # right side: batch × depth
    for rank in range(n):
        middle = (rank + 0.5) / n
        at = (
            zero + 0.5 * width + middle * depth,
            middle * width + 0.5 * depth,
            width + middle * batch + 0.5 * depth,
        )
        spot = at[{0: 2, 1: 1, 2: 0}[cut]]
        ax.annotate(
            str(rank),
            spot,
            ha="center",
            va="center",
            fontsize=12,
            fontweight="bold",
            color=PAPER,
            path_effects=[withStroke(linewidth=2.5, foreground=INK)],
        )
    ax.annotate("width (h)", 0.5 * width, (0, -6), textcoords="offset points", ha="center", va="top")
    ax.annotate(
        "depth (layers)",
        0.5 * depth,
        (-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        rotation=90,
    )
    ax.annotate("batch (b)", width + 0.5 * batch, (10, -6), textcoords="offset points", ha="left", va="top")
    ax.set(xlim=(-0.22, 1.85), ylim=(-0.18, 1.36), aspect="equal")
    ax.axis("off")


@styled
def who_to_whom(named: dict[str, Traffic]) -> Picture:
    """A panel for each run: the bytes that each rank (row) sent to each other rank (column)."""
    n = len(next(iter(named.values())).ranks)
    width = 3.2 if n <= 4 else 0.56 * n
    figure, axes = row_of_panels(len(named), width * len(named), width + 0.1)
    parts = []
    for ax, (name, traffic) in zip(axes[0], named.items()):
        sent = np.array(traffic.matrix if traffic.matrix else np.zeros((n, n))) / 1e6
        for a in range(n):
            for b in range(n):
                much = sent[a, b] > 0.01 * sent.max()  # headers and acknowledgements are left out
                ax.add_patch(
                    plt.Rectangle(
                        (b - 0.47, a - 0.47),
                        0.94,
                        0.94,
                        edgecolor=FAINT,
                        facecolor=mpl.colors.to_rgba(rank_colour(a), 0.35) if much else "none",
                    )
                )
                if much:
                    ax.text(
                        b,
                        a,
                        f"{sent[a, b]:.3g}" if sent[a, b] >= 1 else f"{sent[a, b]:.2f}",
                        ha="center",
                        va="center",
                    )
                    parts.append(f"{name}: rank {a} sent {sent[a, b]:.3g} MB to rank {b}")
        ax.set(
            xticks=range(n),
            yticks=range(n),
            xlabel="to rank",
            ylabel="from rank" if ax is axes[0][0] else "",
            title=name,
            xlim=(-0.6, n - 0.4),
            ylim=(n - 0.4, -0.6),
            aspect="equal",
        )
        ax.tick_params(length=0)
        for r in range(n):
            for tick in (ax.get_xticklabels()[r], ax.get_yticklabels()[r]):
                tick.set(
                    color=rank_colour(r),
                    fontweight="bold",
                    path_effects=[withStroke(linewidth=2, foreground=INK)],
                )
        for spine in ax.spines.values():
            spine.set_visible(False)
    figure.supxlabel("MB, measured by the operating system", fontsize=10)
    return Picture(
        figure,
        (
            "Who sent how much to whom. " + "; ".join(parts)
            if parts
            else "Who sent how much to whom: not measured on this system."
        ),
    )


@styled
def ring(n: int = 4) -> Picture:
    """The ring all-reduce, step by step: how many ranks' numbers each chunk holds the sum of."""
    steps = 2 * (n - 1) + 1
    held = np.ones((n, n), int)  # held[rank, chunk]
    frames, moved = [held.copy()], [None]
    for step in range(2 * (n - 1)):
        after, arrows = held.copy(), []
        for rank in range(n):
            chunk = (rank - step) % n if step < n - 1 else (rank + 1 - (step - n + 1)) % n
            to = (rank + 1) % n
            after[to, chunk] = held[rank, chunk] + 1 if step < n - 1 else n
            arrows.append((to, chunk))
        held = after
        frames.append(held.copy()), moved.append(arrows)
    figure, axes = row_of_panels(steps, 1.42 * steps, 2.05)
    for step, (ax, frame) in enumerate(zip(axes[0], frames)):
        for rank in range(n):
            for chunk in range(n):
                new = moved[step] and (rank, chunk) in moved[step]
                shade = (frame[rank, chunk] - 1) / (n - 1)
                ax.add_patch(
                    plt.Rectangle(
                        (chunk, rank),
                        0.94,
                        0.94,
                        facecolor=mpl.colors.to_rgba("#0072B2", 0.08 + 0.7 * shade),
                        hatch=HATCH if new else "",
                        edgecolor=INK if new else FAINT,
                        linewidth=0.8,
                    )
                )
                ax.text(
                    chunk + 0.47,
                    rank + 0.5,
                    frame[rank, chunk],
                    ha="center",
                    va="center",
                    fontsize=10,
                    fontweight="bold",
                    color=PAPER if shade > 0.9 and not new else INK,
                    bbox=(
                        dict(boxstyle="round,pad=0.12", facecolor=PAPER, edgecolor="none", alpha=0.75)
                        if new
                        else None
                    ),
                )
        ax.set(xlim=(-0.1, n), ylim=(n, -0.1), aspect="equal", xticks=[], yticks=[])
        ax.set_title("start" if step == 0 else f"step {step}", loc="center", fontsize=10, fontweight="normal")
        for spine in ax.spines.values():
            spine.set_visible(False)
        if step == 0:
            ax.set_xticks([c + 0.5 for c in range(n)], range(n), fontsize=9)
            ax.set_xlabel("chunk", fontsize=9)
            ax.set_yticks([r + 0.5 for r in range(n)], [f"rank {r}" for r in range(n)], fontsize=10)
            ax.tick_params(length=0)
    figure.supxlabel(
        "a number says how many ranks' values a chunk sums · hatched: just received from the rank above "
        f"(rank 0 from rank {n - 1})",
        fontsize=9.5,
    )
    return Picture(
        figure,
        f"Ring all-reduce on {n} ranks. In steps 1 to {n - 1} each rank passes one chunk on and the receiver"
        f" adds it, until each rank holds one chunk summed over all {n}. In steps {n} to {2 * n - 2} the"
        " finished chunks go round.",
    )


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
def loss_curves(panels: dict[str, dict[str, Sequence[float]]], title: str) -> Picture:
    """A panel for each name, with a line for each named list of losses."""
    figure, axes = row_of_panels(len(panels), 4.2 * len(panels), 2.8)
    looks = dict(zip(next(iter(panels.values())), ((INK, "-", "o"), ("#D55E00", "--", "s"))))
    parts = []
    for ax, (name, lines) in zip(axes[0], panels.items()):
        for what, losses in lines.items():
            colour, dash, marker = looks[what]
            ax.plot(losses, color=colour, linestyle=dash, marker=marker, markersize=4, label=what)
            parts.append(f"{name}, {what}: from {losses[0]:.2f} to {losses[-1]:.2f}")
        ax.set(title=name, xlabel="step", ylabel="loss" if ax is axes[0][0] else "")
        ax.set_ylim(0, max(max(losses) for lines in panels.values() for losses in lines.values()) * 1.1)
        ax.legend(loc="lower left")
    return Picture(figure, title + ". " + "; ".join(parts))


@styled
def matrix_cuts(n: int = 4) -> Picture:
    """x · W = y, with W cut by columns, then by rows: what each rank holds, and what it gets."""
    figure, axes = row_of_panels(2, 9.6, 2.5)
    for ax, by, title in zip(
        axes[0],
        ("columns", "rows"),
        ("by columns: each rank gets some columns of y", "by rows: each rank gets a share of every number"),
    ):
        blank = dict(facecolor="#F2F2F2", edgecolor=INK)
        _matrix(ax, 0.0, 1.0, 0.7, n, "columns" if by == "rows" else None, blank)
        ax.text(1.2, 0.35, "·", fontsize=18, ha="center", va="center")
        _matrix(ax, 1.4, 1.0, 1.0, n, by, blank)
        ax.text(2.65, 0.35, "=", fontsize=16, ha="center", va="center")
        if by == "columns":
            _matrix(ax, 2.9, 1.0, 0.7, n, "columns", blank)
        else:
            for r in range(n):
                at = 2.9 + 0.17 * r
                ax.add_patch(
                    plt.Rectangle(
                        (at, 0.09 * (n - 1 - r)),
                        0.9,
                        0.6,
                        facecolor=mpl.colors.to_rgba(rank_colour(r), 0.85),
                        edgecolor=PAPER,
                        hatch=HATCH,
                    )
                )
                ax.text(
                    at + 0.06,
                    0.09 * (n - 1 - r) + 0.02,
                    str(r),
                    fontsize=9,
                    fontweight="bold",
                    color=PAPER,
                    va="bottom",
                    path_effects=[withStroke(linewidth=2, foreground=INK)],
                )
        for at, name in ((0.5, "x"), (1.9, "W"), (3.4, "y")):
            ax.text(
                at,
                -0.12,
                name if not (by == "rows" and name == "y") else "y = the sum of these",
                ha="center",
                va="top",
            )
        ax.set_title(title, fontsize=11)
        ax.set(xlim=(-0.1, 4.4), ylim=(-0.35, 1.1), aspect="equal")
        ax.axis("off")
    return Picture(
        figure,
        f"A matrix product x times W on {n} ranks. Cut by columns, each rank holds all of x and some columns"
        " of W and gets the same columns of y. Cut by rows, each rank holds some columns of x and the same"
        " rows of W and gets a share of every number of y, to be summed.",
    )


def _matrix(ax, at: float, width: float, height: float, n: int, by: str | None, plain: dict) -> None:
    """A rectangle, in coloured strips with their rank's number where it is cut."""
    if by is None:
        ax.add_patch(plt.Rectangle((at, 0), width, height, **plain))
        return
    for r in range(n):
        corner, w, h = (
            ((at + width * r / n, 0), width / n, height)
            if by == "columns"
            else ((at, height * (n - 1 - r) / n), width, height / n)
        )
        ax.add_patch(plt.Rectangle(corner, w, h, facecolor=rank_colour(r), edgecolor=PAPER, linewidth=1.5))
        ax.text(
            corner[0] + w / 2,
            corner[1] + h / 2,
            str(r),
            ha="center",
            va="center",
            fontsize=10,
            fontweight="bold",
            color=PAPER,
            path_effects=[withStroke(linewidth=2, foreground=INK)],
        )


@styled
def placement(sizes: dict[str, int], node: int) -> Picture:
    """Ranks on nodes, and the groups along each axis: a panel for each, outermost axis last. A group has
    the colour of its first rank; one that leaves its node is dashed."""
    n = math.prod(sizes.values())
    nodes, wide = -(-n // node), max(1, round(node**0.5))
    spot = lambda r: ((r // node) * (wide + 0.7) + r % node % wide, -(r % node // wide))
    figure, axes = row_of_panels(len(sizes), 3.5 * len(sizes), 0.75 * (node // wide) + 1.1)
    parts = []
    for ax, axis in zip(axes[0], reversed(sizes)):
        for k in range(nodes):
            x = k * (wide + 0.7)
            ax.add_patch(
                plt.Rectangle(
                    (x - 0.45, -(node // wide) + 0.52),
                    wide - 0.1,
                    node // wide - 0.08,
                    facecolor="#F2F2F2",
                    edgecolor=FAINT,
                )
            )
            ax.text(x + wide / 2 - 0.5, 0.62, f"node {k}", ha="center", va="bottom", fontsize=9)
        found = groups(axis, sizes)
        for members in found:
            far = crosses(members, node)
            points = [spot(r) for r in members]
            for (x0, y0), (x1, y1) in zip(points, points[1:]):
                ax.annotate(
                    "",
                    (x1, y1),
                    (x0, y0),
                    arrowprops=dict(
                        arrowstyle="-",
                        linewidth=4 if not far else 3,
                        color=rank_colour(members[0]),
                        linestyle="--" if far else "-",
                        connectionstyle="arc3,rad=0.16",
                    ),
                )
        for r in range(n):
            first = next(members[0] for members in found if r in members)
            ax.add_patch(
                plt.Circle(
                    spot(r), 0.3, facecolor=rank_colour(first), edgecolor=PAPER, linewidth=1.5, zorder=3
                )
            )
            ax.text(
                *spot(r),
                str(r),
                ha="center",
                va="center",
                fontweight="bold",
                color=PAPER,
                zorder=4,
                path_effects=[withStroke(linewidth=2.5, foreground=INK)],
            )
        across = sum(crosses(members, node) for members in found)
        ax.set_title(
            f"{axis}: {len(found)} groups of {sizes[axis]}"
            + (f", {across} between nodes" if across else ", inside nodes"),
            fontsize=11,
        )
        ax.set(xlim=(-0.6, nodes * (wide + 0.7) - 1.1), ylim=(-(node // wide) + 0.4, 0.95), aspect="equal")
        ax.axis("off")
        parts.append(
            f"{axis}: "
            + ", ".join("–".join(map(str, g)) for g in found)
            + (" cross nodes" if across else " stay inside a node")
        )
    return Picture(
        figure, f"{n} ranks on {nodes} nodes of {node}, and their groups. " + "; ".join(parts) + "."
    )


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
def memory_by_stage(stages: Sequence[dict[str, float]], capacity: float, title: str) -> Picture:
    """Stacked bars: what one GPU of each pipeline stage holds, bytes by kind, and the device's capacity as a
    line.
    """
    figure, ((ax,),) = row_of_panels(1, 8.4, 3.1)
    fix(figure, left=0.6, right=2.3, top=0.35, bottom=0.35)
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
        title=title,
        ylim=(0, 1.12 * max(base.max(), capacity / 1e9)),
        xlim=(-0.6, len(stages) - 0.5),
    )
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
        ax.plot([u / 1e6 for u in usual], color=INK, marker="o", markersize=4, linewidth=1.6)
        for rank in set(range(len(peaks[0]))) - set(alike):
            ax.plot(
                [p[rank] / 1e6 for p in peaks],
                color=rank_colour(rank),
                marker="s",
                markersize=5,
                linewidth=1.6,
            )
            ax.text(len(peaks) - 0.7, peaks[-1][rank] / 1e6, f"rank {rank}", fontsize=9, va="center")
        ax.text(
            0,
            usual[0] / 1e6 - 0.06 * budget / 1e6,
            "all ranks" if len(alike) == len(peaks[0]) else "the other ranks",
            fontsize=9,
            va="top",
        )
        ax.axhline(budget / 1e6, color="#D55E00", linestyle="--", linewidth=1.8)
        ax.plot(
            len(peaks) - 1, max(peaks[-1]) / 1e6, marker="x", color=INK, markersize=11, markeredgewidth=2.5
        )
        ax.set(
            title=name,
            xlabel="step",
            ylabel="MB, peak of the step" if ax is axes[0][0] else "",
            ylim=(0, 1.35 * budget / 1e6),
            xlim=(-0.4, 9),
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
def waterfall(panels: dict[str, dict[str, float]], unit: str = "ms", last: str = "observed") -> Picture:
    """Bars that add up, one panel for each name: the first part is what would be ideal, each other part comes
    on top, and the last bar, called `last`, is the sum.

    panels: name -> {part: seconds}. Parts of less than a percent are summed up as 'other'.
    """
    scale = {"ms": 1e3, "s": 1.0}[unit]
    words, drawn = [], {}
    longest = max(sum(parts.values()) for parts in panels.values())
    for name, parts in panels.items():
        total, base, rows, other = sum(parts.values()), 0.0, [], 0.0
        for i, (part, size) in enumerate(parts.items()):
            if i and abs(size) < 0.01 * total:
                other += size
                continue
            rows.append((part, base, size, "#B5B5B5" if i == 0 else "#E69F00"))
            base += size
        if abs(other) > 0.001 * total:
            rows.append(("other", base, other, "#E69F00"))
        drawn[name] = rows + [(last, 0.0, total, INK)]
    heights = [len(rows) for rows in drawn.values()]
    figure, axes = plt.subplots(
        len(drawn),
        figsize=(9.6, 0.34 * sum(heights) + 0.5 * len(drawn) + 0.5),
        squeeze=False,
        sharex=True,
        height_ratios=heights,
    )
    for ax, (name, rows) in zip(axes[:, 0], drawn.items()):
        for y, (part, start, size, colour) in enumerate(rows):
            ax.barh(
                y,
                scale * size,
                left=scale * start,
                height=0.66,
                color=colour,
                hatch=HATCH if colour == "#E69F00" else "",
                edgecolor=PAPER,
            )
            ax.text(
                scale * (max(start, start + size) + 0.015 * longest),
                y,
                f"{scale * size:,.0f}" if unit == "ms" else f"{scale * size:.2f}",
                va="center",
                fontsize=9,
            )
        ax.set(
            yticks=range(len(rows)),
            yticklabels=[part for part, *_ in rows],
            ylim=(len(rows) - 0.5, -0.5),
            xlim=(0, 1.1 * scale * longest),
            title=name,
        )
        ax.tick_params(axis="y", length=0)
        words.append(f"{name}: " + ", ".join(part for part, *_ in rows if part != "other"))
    axes[-1, 0].set_xlabel({"ms": "milliseconds", "s": "seconds"}[unit])
    return Picture(
        figure,
        "A step's time, part by part, from what would be ideal to what is observed. "
        + "; ".join(words)
        + ".",
    )


@styled
def scaling(lines: dict[str, Sequence[tuple[float, float]]], title: str, ylabel: str) -> Picture:
    """(GPUs, throughput of one of them) for each name.

    Level is perfect; what falls is what each added GPU loses.
    """
    figure, ((ax,),) = row_of_panels(1, 7.6, 3.0)
    words = []
    for i, (name, points) in enumerate(lines.items()):
        x, y = zip(*points)
        ax.plot(x, y, color=RANKS[i], marker="os^Dv<"[i % 6], linestyle=("-", "--", ":")[i % 3], label=name)
        words.append(f"{name}: " + ", ".join(f"{b:.3g} at {a:g}" for a, b in points))
    ticks = sorted({x for points in lines.values() for x, _ in points})
    ax.set_xscale("log")
    values = [y for points in lines.values() for _, y in points]
    low = 0.0 if min(values) < 0.7 * max(values) else float(f"{0.8 * max(values):.2g}")
    ax.set(
        xticks=ticks,
        xticklabels=[f"{x:g}" for x in ticks],
        xlabel="GPUs",
        ylabel=ylabel,
        title=title,
        ylim=(low, low + 1.1 * (max(values) - low)),
    )
    if low:
        ax.annotate(f"the axis begins at {low:.4g}", (0.01, 0.03), xycoords="axes fraction", fontsize=9)
    ax.minorticks_off()
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return Picture(figure, f"{title}. " + "; ".join(words) + ".")


@styled
def decision_tree() -> Picture:
    """The rule of thumb: three questions, four answers."""
    figure, ((ax,),) = row_of_panels(1, 9.6, 3.0)
    boxes = {
        "q1": (0.0, 2, "16·N bytes: at most 60 %\nof one GPU's memory?"),
        "a1": (2.0, 2, "DP"),
        "q2": (0.0, 1, "at most 60 % of a node's,\nor is there only one node?"),
        "a2": (2.0, 1, "FSDP, or TP in the\nnode and DP across"),
        "a3": (2.0, 0, "TP in the node,\nPP across, DP on top"),
    }
    boxed = {}
    for name, (x, y, text) in boxes.items():
        boxed[name] = ax.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            fontsize=11,
            fontweight="bold" if name[0] == "a" else "normal",
            bbox=dict(
                boxstyle="round,pad=0.45", facecolor="#F2F2F2" if name[0] == "q" else "#CFE6F5", edgecolor=INK
            ),
        )
    figure.canvas.draw()  # a box has no size before
    for a, b, word in (("q1", "a1", "yes"), ("q1", "q2", "no"), ("q2", "a2", "yes"), ("q2", "a3", "no")):
        (x0, y0, _), (x1, y1, _) = boxes[a], boxes[b]
        ax.annotate(
            "",
            (x1, y1),
            (x0, y0),
            arrowprops=dict(
                arrowstyle="->",
                color=INK,
                patchA=boxed[a].get_bbox_patch(),
                patchB=boxed[b].get_bbox_patch(),
                shrinkA=0,
                shrinkB=2,
            ),
        )
        ax.text(
            (x0 + x1) / 2 + (0 if x1 > x0 else 0.06),
            (y0 + y1) / 2 + 0.1 * (x1 > x0),
            word,
            fontsize=10,
            ha="center" if x1 > x0 else "left",
            va="bottom" if x1 > x0 else "center",
        )
    ax.set(xlim=(-0.7, 3), ylim=(-0.5, 2.5))
    ax.axis("off")
    return Picture(
        figure,
        "A decision tree. Are 16 bytes for each parameter at most 60 % of one GPU's memory? Yes: data"
        " parallelism. No: are they at most 60 % of a node's, or is there only one node? Yes: FSDP, or tensor"
        " parallelism in the node and data parallelism across. No: tensor parallelism in the node, pipeline"
        " across, data parallelism on top.",
    )


@styled
def ranking(plan, rows: int = 8) -> Picture:
    """The best layouts of a plan, each as a bar of where its time goes.

    Computing, which all need, is cut off below, for the rest to be seen.
    """
    best = plan.by_axes[:rows]
    estimates = [plan.estimate(row) for row in best]
    figure, ((ax,),) = row_of_panels(1, 9.6, 0.42 * len(best) + 1.2)
    fix(figure, left=1.65, right=0.15, top=0.35, bottom=0.85)
    groups_ = {
        "computing": ("matrices", "attention", "elementwise", "head", "optimizer"),
        "tensor parallel": ("tensor parallel",),
        "pipeline: bubble and sends": ("bubble", "pipeline sends"),
        "data parallel": ("data parallel",),
    }
    base = np.zeros(len(best))
    cut = 0.9 * min(sum(e.time.get(p, 0.0) for p in groups_["computing"]) for e in estimates)
    for (name, parts), (colour, hatch) in zip(
        groups_.items(), (("#B5B5B5", ""), ("#E69F00", HATCH), ("#0072B2", ""), ("#009E73", "...."))
    ):
        sizes = np.array([sum(e.time.get(p, 0.0) for p in parts) for e in estimates])
        there = np.flatnonzero(sizes)
        ax.barh(
            there,
            sizes[there],
            0.68,
            left=base[there],
            color=colour,
            hatch=hatch,
            edgecolor=PAPER,
            label=name,
        )
        base += sizes
    for y, (row, total) in enumerate(zip(best, base)):
        ax.text(total, y, f" {total:.2f} s · {row.memory / 1e9:.0f} GB", va="center", fontsize=9)
    ax.set(
        yticks=range(len(best)),
        yticklabels=[f"DP {d} · TP {t} · PP {p}" for d, t, p in (r.axes for r in best)],
        ylim=(len(best) - 0.5, -0.5),
        xlim=(cut, cut + 1.25 * (base.max() - cut)),
        xlabel=f"seconds of a step (the axis begins at {cut:.1f})",
        title=f"{plan.model.name} on {plan.gpus} × {plan.cluster.device.name}, batch {plan.global_batch}",
    )
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5))
    figure.legend(loc="lower center", ncols=4, fontsize=9)
    return Picture(
        figure,
        "The best layouts, fastest first: "
        + "; ".join(
            f"DP {r.axes[0]} · TP {r.axes[1]} · PP {r.axes[2]}: {r.seconds:.2f} s, {human(r.memory)}"
            for r in best
        )
        + ".",
    )
