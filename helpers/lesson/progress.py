"""Drop by drop, which exercises the reader has passed."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

from ..table import Table
from .passed import passed
from .practice import Exercise

DROPS = Path(__file__).parent / "drops"


def exercises() -> dict[str, list[str]]:
    """Drop -> the names of its exercises, in order."""
    found = {}
    names = [sorted(p.stem for p in DROPS.glob(pattern)) for pattern in ("d[01]*", "b[0-9]*")]
    for name in itertools.chain(*names):
        module = importlib.import_module(f"helpers.lesson.drops.{name}")
        of_drop = [x for x in vars(module).values() if isinstance(x, Exercise)]
        found[name.removeprefix("d")] = [x.name for x in sorted(of_drop, key=lambda x: x.made)]
    return found


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
