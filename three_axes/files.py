"""Finds files outside this package: data/, notebooks/, the course's own code.

In a clone they lie beside this package. In a wheel they lie inside it, in course/ (see pyproject.toml).
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE / "course" if (PACKAGE / "course").is_dir() else PACKAGE.parent


def find(name: str) -> Path:
    """The file or folder with this path in the repository, such as 'data/flashcards.csv' or 'notebooks'.

    Raises FileNotFoundError if neither a clone nor a wheel has it.
    """
    for place in (ROOT / name, PACKAGE.parent / name):  # in a wheel, three_axes/ is not inside course/
        if place.exists():
            return place
    raise FileNotFoundError(f"{name} is not in {ROOT}: install the course again")


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a CSV table in data/, such as 'flashcards.csv'."""
    with find(f"data/{name}").open(newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def course_on_path() -> None:
    """Let this process and its child processes import the course: helpers, drops, tools."""
    for folder in (str(ROOT / "notebooks"), str(ROOT)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
        inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        if folder not in inherited:
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, *inherited])
