"""Pictures of the bytes that ranks send to each other, and of the point at which each rank stopped."""

from __future__ import annotations

import math

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patheffects import withStroke

from three_axes.count import Traffic
from three_axes.paper import Placement, crosses

from .picture import FAINT, HATCH, INK, PAPER, Picture, box, rank_colour, row_of_panels, styled, write_rank

# The legend of `reached`.
HOW_FAR = (
    "faint: has ended\nhatched: called, waits for others\nempty: never called\n"
    "below: sequence number in the group of all ranks"
)


def sent_between(traffic: Traffic) -> dict[tuple[int, int], float]:
    """(from, to) -> measured bytes; {} if nothing was sent, or if the operating system does not count.

    Some pairs exchange only headers and acknowledgements: less than 1 % of the largest pair's bytes. These
    pairs are left out, and their bytes are distributed over the sender's other pairs, so that a rank's arrows
    sum to "on the wire" in its table.
    """
    matrix = traffic.matrix or []
    least = 0.01 * max((size for row in matrix for size in row), default=0)
    sent = {}
    for a, row in enumerate(matrix):
        kept = {b: size for b, size in enumerate(row) if size > least}
        sent |= {(a, b): size * sum(row) / sum(kept.values()) for b, size in kept.items()}
    return sent


@styled
def who_to_whom(named: dict[str, Traffic]) -> Picture:
    """A panel for each run: the MB that each rank (row) sent to each other rank (column)."""
    n = len(next(iter(named.values())).ranks)
    width = 3.2 if n <= 4 else 0.56 * n
    figure, axes = row_of_panels(len(named), width * len(named), width + 0.1)
    parts = []
    for ax, (name, traffic) in zip(axes[0], named.items()):
        sent = {pair: size / 1e6 for pair, size in sent_between(traffic).items()}
        for a in range(n):
            for b in range(n):
                mb = sent.get((a, b))
                colour = mpl.colors.to_rgba(rank_colour(a), 0.35) if mb else "none"
                box(ax, b - 0.47, a - 0.47, 0.94, 0.94, edgecolor=FAINT, facecolor=colour)
                if mb:
                    ax.text(b, a, f"{mb:.3g}" if mb >= 1 else f"{mb:.2f}", ha="center", va="center")
                    parts.append(f"{name}: rank {a} sent {mb:.3g} MB to rank {b}")
        ax.set(xticks=range(n), xlim=(-0.6, n - 0.4), xlabel="to rank", title=name, aspect="equal")
        ax.set(yticks=range(n), ylim=(n - 0.4, -0.6), ylabel="from rank" if ax is axes[0][0] else "")
        ax.tick_params(length=0)
        outline = [withStroke(linewidth=2, foreground=INK)]
        for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
            for r, label in enumerate(labels):
                label.set(color=rank_colour(r), fontweight="bold", path_effects=outline)
        ax.spines[:].set_visible(False)
    figure.supxlabel("MB, measured by the operating system", fontsize=10)
    words = f". {'; '.join(parts)}" if parts else ": not measured on this system."
    return Picture(figure, f"Who sent how much to whom{words}")


@styled
def ring(n: int = 4) -> Picture:
    """The ring all-reduce, step by step. A chunk's number says how many ranks' values it sums."""
    frames = [np.ones((n, n), int)]  # after each step, [rank, chunk]
    for step in range(2 * (n - 1)):
        held, after = frames[-1], frames[-1].copy()
        for rank in range(n):
            chunk = (rank - step) % n
            after[(rank + 1) % n, chunk] = held[rank, chunk] + 1 if step < n - 1 else n
        frames.append(after)
    figure, axes = row_of_panels(len(frames), 1.42 * len(frames), 2.25)
    for step, (ax, frame) in enumerate(zip(axes[0], frames)):
        for rank in range(n):
            for chunk in range(n):
                new = step and frame[rank, chunk] > frames[step - 1][rank, chunk]
                shade = (frame[rank, chunk] - 1) / (n - 1)
                look = {"hatch": HATCH, "edgecolor": INK} if new else {"edgecolor": FAINT}
                blue = mpl.colors.to_rgba("#0072B2", 0.08 + 0.7 * shade)
                box(ax, chunk, rank, 0.94, 0.94, facecolor=blue, linewidth=0.8, **look)
                number = ax.text(chunk + 0.47, rank + 0.5, frame[rank, chunk], ha="center", va="center")
                number.set(size=10, weight="bold", color=PAPER if shade > 0.9 and not new else INK)
                if new:
                    number.set_bbox(
                        dict(boxstyle="round,pad=0.12", facecolor=PAPER, edgecolor="none", alpha=0.75)
                    )
        ax.set(xlim=(-0.1, n), ylim=(n, -0.1), aspect="equal", xticks=[], yticks=[])
        ax.set_title("start" if step == 0 else f"step {step}", loc="center", fontsize=10, fontweight="normal")
        ax.spines[:].set_visible(False)
        if step == 0:
            ax.set_xticks([c + 0.5 for c in range(n)], range(n), fontsize=9)
            ax.set_xlabel("chunk", fontsize=9)
            ax.set_yticks([r + 0.5 for r in range(n)], [f"rank {r}" for r in range(n)], fontsize=10)
            ax.tick_params(length=0)
    figure.supxlabel(
        "a number says how many ranks' values a chunk sums · hatched: just received from the previous rank "
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
def placement(sizes: dict[str, int], gpus_per_node: int) -> Picture:
    """A panel for each axis, the outermost axis last: the ranks on their nodes, and the groups along this
    axis. A group has the colour of its first rank; a group that crosses nodes is dashed.
    """
    n, node = math.prod(sizes.values()), gpus_per_node
    nodes, wide = -(-n // node), max(1, round(node**0.5))
    spot = lambda r: ((r // node) * (wide + 0.7) + r % node % wide, -(r % node // wide))
    across, down = nodes * (wide + 0.7) - 0.5, node // wide + 0.55
    figure, axes = row_of_panels(len(sizes), 3.5 * len(sizes), 3.3 * down / across + 0.5)
    parts = []
    for ax, axis in zip(axes[0], reversed(sizes)):
        for k in range(nodes):
            x = k * (wide + 0.7)
            at = x - 0.45, -(node // wide) + 0.52
            box(ax, *at, wide - 0.1, node // wide - 0.08, facecolor="#F2F2F2", edgecolor=FAINT)
            ax.text(x + wide / 2 - 0.5, 0.62, f"node {k}", ha="center", va="bottom", fontsize=9)
        of_axis = Placement(sizes).groups(axis)
        for members in of_axis:
            far = crosses(members, node)
            line = dict(arrowstyle="-", color=rank_colour(members[0]), connectionstyle="arc3,rad=0.16")
            line |= dict(linewidth=3, linestyle="--") if far else dict(linewidth=4)
            for a, b in zip(members, members[1:]):
                ax.annotate("", spot(b), spot(a), arrowprops=line)
        for members in of_axis:
            look = dict(facecolor=rank_colour(members[0]), edgecolor=PAPER, linewidth=1.5, zorder=3)
            for r in members:
                ax.add_patch(plt.Circle(spot(r), 0.3, **look))
                write_rank(ax, *spot(r), r, 11, outline=2.5, zorder=4)
        leaving = sum(crosses(members, node) for members in of_axis)
        ax.set_title(
            f"{axis}: {len(of_axis)} groups of {sizes[axis]}"
            + (f", {leaving} between nodes" if leaving else ", inside nodes"),
            fontsize=11,
        )
        ax.set(xlim=(-0.6, across - 0.6), ylim=(0.95 - down, 0.95), aspect="equal")
        ax.axis("off")
        listed = ", ".join("–".join(map(str, members)) for members in of_axis)
        parts.append(f"{axis}: {listed} {'cross nodes' if leaving else 'stay inside a node'}")
    return Picture(figure, f"{n} ranks on {nodes} nodes of {node}, and their groups. {'; '.join(parts)}.")


@styled
def waiting(error) -> Picture:
    """The ranks of a deadlock, with an arrow from each rank to a rank that it waits for. error: a RankError
    of the kind 'deadlock'.

    Thick arrows connect the smallest set of ranks that can never continue; dashed arrows are waits that
    follow from it. The circle of a rank that has finished is empty.
    """
    proof, n = error.deadlock, len(error.seen)
    spot = lambda r: (math.sin(2 * math.pi * r / n), math.cos(2 * math.pi * r / n))
    figure, ax = plt.subplots(figsize=(4.4, 3.4))
    for wait in proof.every:
        thick = wait in proof.waits
        line = dict(arrowstyle="-|>", color=INK, connectionstyle="arc3,rad=0.18", shrinkA=17, shrinkB=17)
        line |= dict(linewidth=3 if thick else 1, linestyle="-" if thick else "--", mutation_scale=18)
        ax.annotate("", spot(wait.other), spot(wait.rank), arrowprops=line)
    for r in range(n):
        done = r in proof.finished
        look = dict(facecolor="none" if done else rank_colour(r), edgecolor=INK, linewidth=1.2, zorder=3)
        ax.add_patch(plt.Circle(spot(r), 0.2, **look))
        write_rank(ax, *spot(r), r, 12, outline=2.5, zorder=4)
        does = {wait.operation.channel.kind: wait.signature for wait in proof.every if wait.rank == r}
        names = {"send": "sends", "recv": "receives", "recv_any": "receives"}
        words = ", ".join(names.get(kind, brought.split(" ")[0]) for kind, brought in does.items())
        x, y = (1.32 * part for part in spot(r))
        side = "center" if abs(x) < 0.1 else "left" if x > 0 else "right"
        words = "has finished" if done else words
        ax.text(x, y, words, ha=side, va="center", fontsize=9.5)
    ax.set(xlim=(-2.1, 2.1), ylim=(-1.6, 1.6), aspect="equal", title="Who waits for whom")
    ax.axis("off")
    return Picture(figure, f"Who waits for whom. {proof}")


@styled
def reached(runs: list) -> Picture:
    """A panel for each run: a bar for each rank, up to its last sequence number in the group of all ranks."""
    rows = -(-len(runs) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(9.6, 1.22 * rows + 0.1), squeeze=False)
    words = [_reached(ax, run) for ax, run in zip(axes.flat, runs)]
    for ax in axes.flat[len(runs) :]:
        ax.axis("off")
        ax.text(0, 0.5, HOW_FAR, va="center", fontsize=9)
    return Picture(figure, "Who reached which sequence number. " + " ".join(words))


def _reached(ax, run) -> str:
    numbers = run.last_numbers
    top = max(numbers.values())
    parts = []
    for rank, number in numbers.items():
        ax.barh(rank, number - run.is_open(rank), height=0.66, color=rank_colour(rank), alpha=0.45)
        if run.is_open(rank):
            look = {"color": "none", "hatch": HATCH, "edgecolor": rank_colour(rank)}
            ax.barh(rank, 1, left=number - 1, height=0.66, **look)
        ax.text(number + 0.12, rank, run.doing(rank), va="center", fontsize=8.5, color=INK)
        parts.append(f"rank {rank} {number}, {run.doing(rank)}")
    for rank in run.dead:
        ax.text(0.12, rank, "died, and left no record", va="center", fontsize=8.5, color=INK)
        parts.append(f"rank {rank} died")
    ranks = range(len(run.seen))
    ax.set_yticks(ranks, [f"rank {r}" for r in ranks], fontsize=9)
    ax.set_ylim(len(ranks) - 0.4, -0.6)
    ax.set_xlim(0, top + 4)
    ax.set_xticks(range(1, top + 1))
    ax.tick_params(axis="x", labelsize=9)
    ax.set_title(f"run {run.number}", fontsize=10.5)
    return f"run {run.number}: {'; '.join(parts)}."
