"""Which exercises the reader has passed: a small file on this machine that may be deleted at any time.
Nothing leaves it.

The file is `progress.json` beside the notebooks' folder, or where THREE_AXES_PROGRESS says; "" for none at
all.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

from ..table import Table

DROPS = Path(__file__).parent / "drops"


def file() -> Path | None:
    said = os.environ.get("THREE_AXES_PROGRESS")
    return (
        Path(said) if said else None if said == "" else Path(__file__).resolve().parents[2] / "progress.json"
    )


def passed() -> set[str]:
    """Names of the exercises passed so far. A file that cannot be read counts as none."""
    try:
        return set(json.loads(file().read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return set()


def note(exercise: str) -> None:
    """Remember that an exercise was passed. Where the file cannot be written, nothing happens."""
    names = passed() | {exercise}
    try:
        if path := file():
            path.write_text(json.dumps(sorted(names), indent=1, ensure_ascii=False))
    except OSError:
        pass


def exercises() -> dict[str, list[str]]:
    """Drop -> the names of its exercises, in order."""
    from .practice import Exercise

    found = {}
    for name in sorted(p.stem for p in DROPS.glob("d[01]*")):
        module = importlib.import_module(f"helpers.lesson.drops.{name}")
        of_drop = [x for x in vars(module).values() if isinstance(x, Exercise)]
        found[name[1:]] = [x.name for x in sorted(of_drop, key=lambda x: x.made)]
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
