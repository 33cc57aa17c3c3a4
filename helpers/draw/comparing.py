"""Pictures that compare: losses, the parts of a step's time, scaling, layouts."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from three_axes.table import human

from .picture import HATCH, INK, PAPER, RANKS, Picture, fix, row_of_panels, styled

SMALL = "each under 1 %"  # label of the bar that has all small parts of a waterfall
LAPTOP = 4.9  # inches: the height that a waterfall may have, to fit on a laptop's screen


@styled
def loss_curves(panels: dict[str, dict[str, Sequence[float]]], title: str) -> Picture:
    """A panel for each name, with one or two lines. panels: name -> {label of a line: its losses}."""
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
        if len(lines) > 1:
            ax.legend(loc="lower left")
    return Picture(figure, title + ". " + "; ".join(parts))


@styled
def waterfall(panels: dict[str, dict[str, float]], unit: str = "ms", last: str = "observed") -> Picture:
    """Bars that add up, one panel for each name: the first part is the ideal, each other part begins where
    the bar before it ends, and the last bar, called `last`, is the sum.

    panels: name -> {part: seconds}. unit: of the axis, 'ms' or 's'. Parts of less than 1 % of the sum become
    one bar, SMALL.
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
            rows.append((SMALL, base, other, "#E69F00"))
        drawn[name] = rows + [(last, 0.0, total, INK)]
    heights = [len(rows) for rows in drawn.values()]
    between = 0.4 * len(drawn) + 0.5  # inches, for titles and the axis
    a_row = min(0.34 if len(drawn) == 1 else 0.23, (LAPTOP - between) / sum(heights))
    inches = 9.6, a_row * sum(heights) + between
    figure, axes = plt.subplots(len(drawn), figsize=inches, squeeze=False, sharex=True, height_ratios=heights)
    for ax, (name, rows) in zip(axes[:, 0], drawn.items()):
        for y, (part, start, size, colour) in enumerate(rows):
            ax.barh(y, scale * size, left=scale * start, height=0.66, color=colour)
            text = f"{scale * size:,.0f}" if unit == "ms" else f"{scale * size:.2f}"
            end = max(start, start + size) + 0.015 * longest
            ax.text(scale * end, y, text, va="center", fontsize=9)
        name_rows(ax, [part for part, *_ in rows])
        ax.set(xlim=(0, 1.1 * scale * longest), title=name)
        words.append(f"{name}: " + ", ".join(part for part, *_ in rows if part != SMALL))
    axes[-1, 0].set_xlabel({"ms": "milliseconds", "s": "seconds"}[unit])
    return Picture(
        figure,
        f"A step's time, part by part, from what would be ideal to what is observed. {'; '.join(words)}.",
    )


def name_rows(ax, names: list[str]) -> None:
    """Name the horizontal bars, from top to bottom."""
    ax.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    ax.tick_params(axis="y", length=0)


@styled
def scaling(
    lines: dict[str, Sequence[tuple[float, float]]], title: str, ylabel: str, xlabel: str = "GPUs"
) -> Picture:
    """A line for each name, of points (x, y). The x axis is logarithmic. If x is a number of GPUs and y the
    throughput of a GPU, a level line is perfect scaling; where a line falls, more GPUs make each GPU slower.
    """
    figure, ((ax,),) = row_of_panels(1, 7.6, 3.0)
    words = []
    for i, (name, points) in enumerate(lines.items()):
        x, y = zip(*points)
        ax.plot(x, y, color=RANKS[i], marker="os^Dv<"[i % 6], linestyle=("-", "--", ":")[i % 3], label=name)
        words.append(f"{name}: " + ", ".join(f"{b:.3g} at {a:g}" for a, b in points))
    gpus, values = zip(*(point for points in lines.values() for point in points))
    ticks = sorted(set(gpus))
    ax.set(xscale="log", xlabel=xlabel, xticks=ticks, xticklabels=[f"{x:g}" for x in ticks])
    low = 0.0 if min(values) < 0.7 * max(values) else float(f"{0.95 * min(values):.2g}")
    ax.set(title=title, ylabel=ylabel, ylim=(low, low + 1.1 * (max(values) - low)))
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
        "q2": (0.0, 1, "at most 60 %\nof a node's?"),
        "a2": (2.0, 1, "FSDP"),
        "a3": (2.0, 0, "TP in the node,\nPP over nodes, DP"),
    }
    boxed = {}
    for name, (x, y, text) in boxes.items():
        weight, colour = ("bold", "#CFE6F5") if name[0] == "a" else ("normal", "#F2F2F2")
        box = dict(boxstyle="round,pad=0.45", facecolor=colour, edgecolor=INK)
        boxed[name] = ax.text(x, y, text, ha="center", va="center", fontsize=11, fontweight=weight, bbox=box)
    figure.canvas.draw()  # a box has no size before it is drawn
    for a, b, word in (("q1", "a1", "yes"), ("q1", "q2", "no"), ("q2", "a2", "yes"), ("q2", "a3", "no")):
        (x0, y0, _), (x1, y1, _) = boxes[a], boxes[b]
        ends = {"patchA": boxed[a].get_bbox_patch(), "patchB": boxed[b].get_bbox_patch()}
        arrow = dict(arrowstyle="->", color=INK, shrinkA=0, shrinkB=2, **ends)
        ax.annotate("", (x1, y1), (x0, y0), arrowprops=arrow)
        if x1 > x0:
            ax.text((x0 + x1) / 2, (y0 + y1) / 2 + 0.1, word, fontsize=10, ha="center", va="bottom")
        else:
            ax.text(x0 + 0.06, (y0 + y1) / 2, word, fontsize=10, va="center")
    ax.set(xlim=(-0.7, 3), ylim=(-0.5, 2.5))
    ax.axis("off")
    return Picture(
        figure,
        "A decision tree. Are 16 bytes for each parameter at most 60 % of one GPU's memory? Yes: data"
        " parallelism. No: are they at most 60 % of a node's? Yes: FSDP. No: tensor parallelism in the node,"
        " and over several nodes pipeline across, data parallelism on top.",
    )


@styled
def ranking(plan, rows: int = 8) -> Picture:
    """The best layouts of a plan. The bar of each has the parts of its step. Layouts whose bars end before
    the dashed line are tied with the first.
    """
    job, best = plan.job, plan.by_axes[:rows]
    estimates = [plan.estimate(row) for row in best]
    names = [str(row.axes) for row in best]
    usual = "DP 16 · TP 2 · PP 1"  # with more axes, names are longer and the legend has a second row
    longer = max(1.0, max(map(len, names)) / len(usual))
    figure, ((ax,),) = row_of_panels(1, 9.6, 0.42 * len(best) + 1.2)
    fix(figure, left=1.65 * longer, right=0.15, top=0.35, bottom=0.85 + 0.2 * (longer > 1))
    sent = {
        "tensor parallel": (("tensor parallel",), "#E69F00", HATCH),
        "pipeline: bubble and sends": (("bubble", "pipeline sends"), "#0072B2", ""),
        "data parallel": (("data parallel",), "#009E73", "...."),
        "context and expert parallel": (("context parallel", "expert parallel"), PAPER, "xxxx"),
    }
    known = {part for parts, *_ in sent.values() for part in parts}
    computing = {part for e in estimates for part in e.time} - known
    looks = {"computing": (computing, "#B5B5B5", "")} | sent
    base = np.zeros(len(best))
    seconds = lambda parts: np.array([sum(e.time.get(part, 0.0) for part in parts) for e in estimates])
    for name, (parts, colour, hatch) in looks.items():
        sizes = seconds(parts)
        if not len(rows_with := np.flatnonzero(sizes)) and "context" in name:
            continue
        look = {"color": colour, "hatch": hatch, "edgecolor": INK if colour == PAPER else PAPER}
        ax.barh(rows_with, sizes[rows_with], 0.68, left=base[rows_with], label=name, **look)
        base += sizes
    tie = (1 + plan.sure.apart) * base[0]
    for y, (row, total) in enumerate(zip(best, base)):
        label = f"{total:.2f} s · {row.memory / 1e9:.0f} GB"
        ax.text(1.02 * max(base.max(), tie), y, label, va="center", fontsize=9)
    name_rows(ax, names)
    ax.axvline(tie, color=INK, ls="--", lw=1)
    ax.set(
        xlim=(0, 1.22 * max(base.max(), tie)),
        xlabel=f"seconds of a step; a tie up to the dashed line, {tie:.2f}",
        title=f"{job.model.name} on {plan.gpus} × {job.cluster.device.name}, batch {job.global_batch},"
        f" under {job.framework.name}",
    )
    ax.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5))
    figure.legend(loc="lower center", ncols=4, fontsize=9)
    words = (
        f"DP {r.axes[0]} · TP {r.axes[1]} · PP {r.axes[2]}: {r.seconds:.2f} s, {human(r.memory)}"
        for r in best
    )
    tied = f"Up to {tie:.2f} s they tie."
    return Picture(figure, f"The best layouts, fastest first: {'; '.join(words)}. {tied}")


# Terms of a step, in the colours of `ranking`; the bubble, in which ranks wait, is empty.
TERMS = {
    "compute": ("#B5B5B5", ""),
    "TP": ("#E69F00", HATCH),
    "bubble": (PAPER, ""),
    "DP": ("#009E73", "...."),
    "sends": ("#0072B2", HATCH),
}


@styled
def layouts(
    rows: dict[str, tuple[dict[str, float], float]],
    marks: dict[str, tuple[float, float]],
    card: float,
    room: float,
    whose: tuple[str, str],
) -> Picture:
    """Bars of seconds beside bars of bytes, a row for each layout: those that fit first, fastest first.

    rows: name -> (seconds by term of TERMS, bytes on the fullest GPU). marks: name -> (seconds, bytes) of
    another estimate, drawn as a line across the bar. card: bytes of a GPU; room: those of them that a layout
    may use. whose: the names of the two estimates, of the bars and of the marks.
    """
    seconds = {name: sum(parts.values()) for name, (parts, _) in rows.items()}
    order, words = sorted(rows, key=lambda name: (rows[name][1] > card, seconds[name])), []
    best = next((name for name in order if rows[name][1] <= room), None)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 0.44 * len(rows) + 1.15), width_ratios=(2.3, 1), sharey=True
    )
    longest = max(seconds.values())
    held = max(card, *(size for _, size in (*rows.values(), *marks.values()))) / 1e9
    for y, name in enumerate(order):
        parts, size = rows[name]
        out, base = size > card, 0.0
        for part, (colour, hatch) in TERMS.items():
            look = {"color": colour, "hatch": hatch, "alpha": 0.35 if out else 1.0}
            label = part if y == 0 else None
            edge = INK if colour == PAPER else PAPER
            left.barh(y, parts[part], 0.66, left=base, label=label, edgecolor=edge, linewidth=0.8, **look)
            base += parts[part]
        remark = "does not fit" if out else "tight" if size > room else ""
        bold = {"fontweight": "bold"} if name == best else {"color": "#6a6a6a"} if out else {}
        paper = dict(facecolor=PAPER, lw=0, pad=1)
        label = f"{seconds[name]:.1f} s" + f", {remark}" * bool(remark)
        left.text(base + 0.014 * longest, y, label, va="center", fontsize=10, bbox=paper, **bold)
        colour = "#D55E00" if out else "#E69F00" if size > room else "#777777"
        right.barh(y, size / 1e9, 0.66, color=colour, edgecolor=PAPER)
        both = " | ".join(f"{one / 1e9:.0f}" for one in (size, *marks.get(name, ())[1:]))
        right.text(1.04 * held, y, both, va="center", fontsize=10, **bold)
        words.append(f"{name}: {label}, {size / 1e9:.0f} GB")
        for ax, mark in zip((left, right), marks.get(name, ())):
            at = mark if ax is left else mark / 1e9
            ax.plot([at, at], [y - 0.44, y + 0.44], color=INK, lw=2, solid_capstyle="butt")
    name_rows(left, order)
    for label, name in zip(left.get_yticklabels(), order):
        label.set(fontweight="bold" if name == best else "normal")
    right.axvline(card / 1e9, color="#D55E00", lw=1.8, ls="--")
    right.axvline(room / 1e9, color=INK, lw=1, ls=":")
    left.set(xlabel=f"seconds of a step; bars: {whose[0]}, lines: {whose[1]}", xlim=(0, 1.25 * longest))
    right.set(xlabel=f"GB; dashed: the GPU's {card / 1e9:.1f}\ndotted: a tenth free", xlim=(0, 1.4 * held))
    right.tick_params(axis="y", length=0, labelleft=False)
    figure.legend(loc="outside upper left", ncols=len(TERMS), fontsize=10)
    return Picture(
        figure,
        f"Layouts, those that fit first, fastest first, by {whose[0]}. {'; '.join(words)}. The GPU has"
        f" {card / 1e9:.1f} GB; with a tenth free, {room / 1e9:.0f}.",
    )
