"""Where the reader is, and which exercises are passed: in one drop, or drop by drop."""

from __future__ import annotations

import importlib

from three_axes.table import Table

from ..ranks.world import open_worlds
from .books import module_of, notebooks, number
from .exercise import Exercise
from .passed import passed


def _of(drop: str) -> list[str]:
    """The names of a drop's exercises, in order."""
    made = [x for x in vars(importlib.import_module(module_of(drop))).values() if isinstance(x, Exercise)]
    return [x.name for x in sorted(made, key=lambda x: x.made)]


def exercises() -> dict[str, list[str]]:
    """Drop -> the names of its exercises, in order."""
    return {number(path): _of(number(path)) for path in notebooks()}


def here(drop: str) -> None:
    """Print which exercises of a drop are passed, and how many in all: `here("07")`."""
    done, names = passed(), _of(drop)
    marks = ", ".join(f"{'✓' if name in done else '○'} {name}" for name in names)
    print(f"drop {drop}: {sum(n in done for n in names)} of {len(names)} exercises passed: {marks}")
    print(f"all drops: {len(done)} passed (progress.show() lists them)")


def leave(drop: str) -> None:
    """End all ranks of this notebook, and print what `here` does."""
    for world in open_worlds():
        world.close()
    here(drop)


def show() -> Table:
    """Drop by drop, what is done. Delete the file to begin anew."""
    done, rows = passed(), []
    for drop, names in exercises().items():
        marks = "●" * sum(name in done for name in names)
        rows.append([drop, marks.ljust(len(names), "○"), ", ".join(names)])
    marks = "".join(row[1] for row in rows)
    title = f"{marks.count('●')} of {len(marks)} exercises passed"
    return Table(["drop", "passed", "exercises"], rows, title=title)
