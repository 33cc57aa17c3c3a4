"""Where the notebooks are, and where what is made of them goes."""

from __future__ import annotations

import ast
import itertools
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from three_axes.files import find

if TYPE_CHECKING:
    from nbformat import NotebookNode

BUILD = Path("build")  # in the reader's folder
LATER = "## For another day"  # ends the lesson


def notebooks() -> list[Path]:
    """The fourteen, in order, and then those beyond them."""
    folder = find("notebooks")
    return sorted(folder.glob("[01]*.ipynb")) + sorted((folder / "beyond").glob("b*.ipynb"))


def drop_number(path: Path) -> str:
    """'07' of 07_pipeline.ipynb"""
    return path.name.split("_")[0]


def module_of(number: str) -> str:
    """What belongs to a notebook: '07' -> drops.d07, 'b2' -> drops.b2."""
    return "drops." + (f"d{number}" if number.isdigit() else number)


@cache
def _named(drop: str) -> dict[str, str]:
    """'fingerprints' -> 'traffic fingerprints', for a drop's exercises in order: read from its file, which
    need not be imported.
    """
    file = find(f"notebooks/{module_of(drop).replace('.', '/')}/exercises.py")
    body = ast.parse(file.read_text(encoding="utf-8")).body
    made = [line for line in body if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call)]
    hinting = [line for line in made if "hints" in (word.arg for word in line.value.keywords)]
    return {line.targets[0].id: ast.literal_eval(line.value.args[0]) for line in hinting}


def exercises() -> dict[str, list[str]]:
    """Drop -> the names of its exercises, in order."""
    return {drop: list(_named(drop).values()) for drop in map(drop_number, notebooks())}


@cache
def lessons() -> dict[str, list[str]]:
    """Drop -> the names of those exercises that its notebook checks before what is for another day."""
    named = {}
    for path in notebooks():
        sources = ("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
        lesson = "\n".join(itertools.takewhile(lambda source: not source.startswith(LATER), sources))
        checked = re.findall(r"(\w+)\.check\(", lesson)
        named[drop_number(path)] = [_named(drop_number(path))[name] for name in checked]
    return named


def answering(notebook: NotebookNode) -> dict[str, list[str]]:
    """Cell id -> the predictions that its output may answer: `guess` for the cells behind
    `guess = predict(…)`, up to the one with `guess.reveal(…)`.
    """
    answered_by: dict[str, list[str]] = {}
    open_: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if open_:
            answered_by[cell.id] = list(open_)
        open_ = [name for name in open_ if f"{name}.reveal(" not in cell.source]
        open_ += re.findall(r"(\w+) = predict\(", cell.source)
    return answered_by
