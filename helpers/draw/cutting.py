"""Two pictures, coloured by rank: a cube of work that each of the three parallelisms cuts, and a matrix
product whose matrix is cut by columns or by rows.
"""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from .picture import HATCH, INK, PAPER, Picture, box, rank_colour, row_of_panels, styled, write_rank


@styled
def cuts(n: int = 4) -> Picture:
    """The same cube of work (batch × width × depth) in three panels, one for each parallelism. Each panel
    cuts it along another edge into n slices, one for each rank.
    """
    figure, axes = row_of_panels(3, 9.6, 2.9)
    titles = ("data: cut the batch", "tensor: cut the width", "pipeline: cut the depth")
    for axis, (ax, title) in enumerate(zip(axes[0], titles)):
        cube(ax, axis, n)
        ax.set_title(title)
    return Picture(
        figure,
        "The same cube of batch by width by depth three times. Data parallelism cuts it along the batch,"
        f" tensor parallelism along the width, pipeline parallelism along the depth, one of {n} slices to a"
        " rank.",
    )


def cube(ax, cut: int, n: int) -> None:
    """Draw the front, top and right face of a cube. cut: the axis that is cut, 0 for batch, 1 for width, 2
    for depth. n: number of slices.
    """
    # Each edge of the cube as a vector in the figure. Batch points to the back, so it is drawn oblique.
    batch, width, depth = np.array([0.5, 0.32]), np.array([1.0, 0.0]), np.array([0.0, 1.0])
    unit = (batch, width, depth)

    def face(origin, a, b, shade):
        """Draw the face with a corner at `origin` and the sides unit[a] and unit[b]: in strips if one of
        these sides is cut, otherwise in one colour. shade: opacity of a black layer over the colour.
        """
        slices = n if cut in (a, b) else 1
        for i in range(slices):
            lo, hi = i / slices, (i + 1) / slices
            along, across = (unit[a], unit[b]) if cut != b else (unit[b], unit[a])
            a0, a1 = origin + lo * along, origin + hi * along
            corners = [a0, a1, a1 + across, a0 + across]
            rank = i if slices > 1 else 0 if cut == 0 else n - 1
            ax.add_patch(plt.Polygon(corners, facecolor=rank_colour(rank), edgecolor=PAPER, linewidth=1.5))
            if shade:
                ax.add_patch(plt.Polygon(corners, facecolor="black", alpha=shade, edgecolor="none"))

    face(np.zeros(2), 1, 2, 0)  # front: width × depth
    face(depth, 1, 0, 0.10)  # top: width × batch
    face(width, 0, 2, 0.22)  # right side: batch × depth
    for rank in range(n):
        middle = (rank + 0.5) / n
        spots = (
            width + middle * batch + 0.5 * depth,
            middle * width + 0.5 * depth,
            0.5 * width + middle * depth,
        )
        write_rank(ax, *spots[cut], rank, 12, outline=2.5)
    label = dict(textcoords="offset points", fontsize=11)
    ax.annotate("width (h)", 0.5 * width, (0, -6), ha="center", va="top", **label)
    ax.annotate("depth (layers)", 0.5 * depth, (-6, 0), ha="right", va="center", rotation=90, **label)
    ax.annotate("batch (b)", width + 0.5 * batch, (10, -6), ha="left", va="top", **label)
    ax.set(xlim=(-0.22, 1.85), ylim=(-0.18, 1.36), aspect="equal")
    ax.axis("off")


@styled
def matrix_cuts(n: int = 4) -> Picture:
    """x · matrix = y, cut by columns, then by rows: each rank's part of the matrix, and of the result."""
    figure, axes = row_of_panels(2, 9.6, 2.1)
    for ax, by, title in zip(
        axes[0],
        ("columns", "rows"),
        ("by columns: each rank gets some columns of y", "by rows: each rank gets a partial sum"),
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
                x, y, colour = 2.9 + 0.17 * r, 0.09 * (n - 1 - r), mpl.colors.to_rgba(rank_colour(r), 0.85)
                box(ax, x, y, 0.9, 0.6, facecolor=colour, edgecolor=PAPER, hatch=HATCH)
                write_rank(ax, x + 0.06, y + 0.02, r, 9, ha="left", va="bottom")
        labels = {("columns", "x"): "x, whole on all", ("rows", "y"): "y = the sum of these"}
        for at, name in ((0.5, "x"), (1.9, "matrix"), (3.4, "y")):
            ax.text(at, -0.12, labels.get((by, name), name), ha="center", va="top")
        ax.set_title(title, fontsize=11)
        ax.set(xlim=(-0.1, 4.4), ylim=(-0.35, 1.1), aspect="equal")
        ax.axis("off")
    return Picture(
        figure,
        f"x times a matrix on {n} ranks. Cut by columns, each rank holds all of x and some columns"
        " of the matrix and gets the same columns of y. Cut by rows, each rank holds some columns of x and"
        " the same rows of the matrix and gets a partial sum for every number of y.",
    )


def _matrix(ax, at: float, width: float, height: float, n: int, by: str | None, plain: dict) -> None:
    """Draw a matrix as a rectangle. by: "columns" or "rows", then it is cut into coloured strips, each with
    its rank's number; None: it is whole, and looks like `plain`.
    """
    if by is None:
        box(ax, at, 0, width, height, **plain)
        return
    for r in range(n):
        if by == "columns":
            x, y, w, h = at + width * r / n, 0, width / n, height
        else:
            x, y, w, h = at, height * (n - 1 - r) / n, width, height / n
        box(ax, x, y, w, h, facecolor=rank_colour(r), edgecolor=PAPER, linewidth=1.5)
        write_rank(ax, x + w / 2, y + h / 2, r, 10)
