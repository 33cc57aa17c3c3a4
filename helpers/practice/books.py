"""Where the notebooks are, and where what is made of them goes."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from three_axes.files import find

if TYPE_CHECKING:
    from nbformat import NotebookNode

BUILD = Path("build")  # in the reader's folder


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
def exercises() -> dict[str, list[str]]:
    """Drop -> the names of its exercises, in order: read from its file, which need not be imported."""
    named = {}
    for drop in map(drop_number, notebooks()):
        tree = ast.parse(
            find(f"notebooks/{module_of(drop).replace('.', '/')}/exercises.py").read_text(encoding="utf-8")
        )
        made = [line.value for line in tree.body if isinstance(line, ast.Assign)]
        calls = [value for value in made if isinstance(value, ast.Call)]
        hinting = [call for call in calls if "hints" in (word.arg for word in call.keywords)]
        named[drop] = [ast.literal_eval(call.args[0]) for call in hinting]
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
