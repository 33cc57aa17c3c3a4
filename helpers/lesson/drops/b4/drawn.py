"""b4's picture: who reached which sequence number."""

from __future__ import annotations

import matplotlib as mpl
import matplotlib.figure

from ...picture import HATCH, INK, Picture, rank_colour, styled
from .reading import OP, last, members
from .runs import Stopped

WIDTH, ROW = 9.6, 1.5  # inches


@styled
def reached(stopped: list[Stopped]) -> Picture:
    """A panel for each run: a bar for each rank, as long as it came in the group of all ranks."""
    rows = -(-len(stopped) // 2)
    figure = mpl.figure.Figure(figsize=(WIDTH, ROW * rows + 0.3))
    axes = figure.subplots(rows, 2, squeeze=False).flat
    words = [_panel(ax, one) for ax, one in zip(axes, stopped)]
    for ax in list(axes)[len(stopped) :]:
        ax.axis("off")
        ax.text(0, 0.5, "full: ended\nhatched: waits for others\nempty: never called", va="center", fontsize=10)
    return Picture(figure, "Who reached which sequence number. " + " ".join(words))


def _panel(ax, stopped: Stopped) -> str:
    groups = members(stopped.dumps)
    ranks = range(len(stopped.seen))
    world = next(name for name, mine in groups.items() if len(mine) == len(ranks))
    numbers = {r: last(stopped.dumps[r], world) for r in stopped.dumps}
    top = max(e["collective_seq_id"] for e in numbers.values() if e)
    told = []
    for r in ranks:
        final = numbers.get(r)
        at = final["collective_seq_id"] if final else top
        waits = bool(final) and final["state"] != "completed"
        ax.barh(r, at - waits, height=0.66, color=rank_colour(r), alpha=0.45 if final else 0.12)
        if waits:
            ax.barh(r, 1, left=at - 1, height=0.66, color="none", hatch=HATCH, edgecolor=rank_colour(r))
        label = "died" if r in stopped.dead else _where(stopped, r, world)
        ax.text(at + 0.12, r, label, va="center", fontsize=9, color=INK)
        told.append(f"rank {r} {at}, {label}")
    ax.set_yticks(list(ranks), [f"rank {r}" for r in ranks], fontsize=9)
    ax.set_xlim(0, top + 3.2)
    ax.set_xticks(range(0, top + 1), [str(n) if n else "" for n in range(top + 1)], fontsize=9)
    ax.invert_yaxis()
    ax.set_title(f"run {stopped.number}", fontsize=10.5)
    return f"run {stopped.number}: {'; '.join(told)}."


def _where(stopped: Stopped, rank: int, world: str) -> str:
    """What the rank's open collective is; '' where it is in none."""
    for entry in reversed(stopped.dumps[rank]["entries"]):
        if entry["state"] != "completed":
            group = entry["process_group"][0]
            return OP(entry) if group == world else f"{OP(entry)} in {members(stopped.dumps)[group]}"
    return "has left the script" if stopped.seen[rank].finished else "somewhere else"
