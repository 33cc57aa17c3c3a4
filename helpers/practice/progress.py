"""Where the reader is, and which exercises are passed: in one drop, or drop by drop."""

from __future__ import annotations

import importlib
import itertools

from three_axes.files import find
from three_axes.table import Table

from ..ranks.world import open_worlds
from .books import module_of
from .exercise import Exercise
from .passed import passed


def _of(number: str) -> list[str]:
    """The names of a drop's exercises, in order."""
    made = [x for x in vars(importlib.import_module(module_of(number))).values() if isinstance(x, Exercise)]
    return [x.name for x in sorted(made, key=lambda x: x.made)]


def exercises() -> dict[str, list[str]]:
    """Drop -> the names of its exercises, in order."""
    names = [
        sorted(p.stem for p in find("notebooks/drops").glob(f"{kind}.py"))
        for kind in ("d[01][0-9]", "b[0-9]")
    ]
    numbers = (name.removeprefix("d") for name in itertools.chain(*names))
    return {number: _of(number) for number in numbers}


def here(number: str) -> None:
    """Print which exercises of a drop are passed, and how many in all: `here("07")`."""
    done, names = passed(), _of(number)
    marks = ", ".join(f"{'✓' if name in done else '○'} {name}" for name in names)
    print(f"drop {number}: {sum(n in done for n in names)} of {len(names)} exercises passed: {marks}")
    print(f"all drops: {len(done)} passed (progress.show() lists them)")


def leave(number: str) -> None:
    """End all ranks of this notebook, and print what `here` does."""
    for world in open_worlds():
        world.close()
    here(number)


def show() -> Table:
    """Drop by drop, what is done. Delete the file to begin anew."""
    done, all_ = passed(), exercises()
    rows = [
        [
            drop,
            f"{'●' * sum(n in done for n in names)}{'○' * sum(n not in done for n in names)}",
            ", ".join(names),
        ]
        for drop, names in all_.items()
    ]
    names = [n for group in all_.values() for n in group]
    return Table(
        ["drop", "passed", "exercises"],
        rows,
        title=f"{sum(n in done for n in names)} of {len(names)} exercises passed",
    )
