"""Finds the notebooks and reads their exercises, without importing PyTorch."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from three_axes.files import find

if TYPE_CHECKING:
    from nbformat import NotebookNode

BUILD = Path("build")  # folder for files made from the notebooks, in the reader's folder
LATER = "## For another day"  # the heading after the lesson
LEVELS = {"easy": 5, "medium": 9, "hard": 60}  # name -> minutes, at most
PUZZLE = 12  # an exercise of this many minutes or more has a hint with the solution's lines, sorted


def notebooks() -> list[Path]:
    """The paths of the fourteen notebooks in order, and then of the notebooks beyond them."""
    folder = find("notebooks")
    return sorted(folder.glob("[01]*.ipynb")) + sorted((folder / "beyond").glob("b*.ipynb"))


def drop_number(path: Path) -> str:
    """'07' of 07_pipeline.ipynb"""
    return path.name.split("_")[0]


def module_of(number: str) -> str:
    """The module of a notebook: '07' -> drops.d07, 'b2' -> drops.b2."""
    return "drops." + (f"d{number}" if number.isdigit() else number)


def read_book(path: Path) -> dict:
    """A notebook's JSON, with each cell's source as one string."""
    book = json.loads(path.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        cell["source"] = "".join(cell["source"])
    return book


def write_book(book: dict, path: Path) -> None:
    """Write what `read_book` returned, in nbformat's own layout."""
    cells = [cell | {"source": cell["source"].splitlines(True)} for cell in book["cells"]]
    text = json.dumps(book | {"cells": cells}, ensure_ascii=False, indent=1, sort_keys=True)
    path.write_text(f"{text}\n", encoding="utf-8")


@dataclass(frozen=True)
class Written:
    """An exercise, read from its file without an import. solution: source of a function that passes."""

    name: str
    minutes: int
    hints: list[str]
    solution: str

    @property
    def level(self) -> str:
        """'easy', 'medium' or 'hard': the first of LEVELS whose minutes are enough."""
        return next(name for name, most in LEVELS.items() if self.minutes <= most)

    @property
    def steps(self) -> list[str]:
        """The hints; of the longest exercises the second has the solution's lines, to be put in order."""
        return self.hints[:1] + [_puzzle(self.solution)] * (self.minutes >= PUZZLE) + self.hints[1:]


def _puzzle(function: str) -> str:
    """A hint with the lines of a function, sorted alphabetically."""
    (node,) = ast.parse(function).body
    assert isinstance(node, ast.FunctionDef)
    has_docstring = ast.get_docstring(node) is not None
    lines = "\n".join(map(ast.unparse, node.body[has_docstring:])).splitlines()
    sort = "\n".join(sorted(line.strip() for line in lines))
    return f"Put these lines in order, and indent those that belong to others.\n\n```python\n{sort}\n```"


@cache
def written(drop: str) -> dict[str, Written]:
    """Variable of the drop's `exercises.py` -> exercise, in order. The file is read, not imported."""
    text = find(f"notebooks/{module_of(drop).replace('.', '/')}/exercises.py").read_text(encoding="utf-8")
    body = ast.parse(text).body
    lines = text.splitlines(keepends=True)
    defined = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    sources = {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]) for node in defined}
    by_variable = {}
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in node.value.keywords}
            if "hints" in keywords:
                name, function, *_ = node.value.args
                minutes, hints = (ast.literal_eval(keywords[key]) for key in ("minutes", "hints"))
                exercise = Written(ast.literal_eval(name), minutes, hints, sources[ast.unparse(function)])
                by_variable[ast.unparse(node.targets[0])] = exercise
    return by_variable


def solutions_hidden() -> bool:
    """Whether a teacher has hidden the solutions."""
    return os.environ.get("THREE_AXES_SOLUTIONS") == "hidden"


def exercises() -> dict[str, list[str]]:
    """Drop -> the names of its exercises, in order."""
    return {drop: [x.name for x in written(drop).values()] for drop in map(drop_number, notebooks())}


@cache
def lessons() -> dict[str, list[str]]:
    """Drop -> the names of the exercises that its notebook checks before the part for another day. Lines of
    the cost model are none.
    """
    names = {}
    for path in notebooks():
        sources = (cell["source"] for cell in read_book(path)["cells"])
        lesson = "\n".join(itertools.takewhile(lambda source: not source.startswith(LATER), sources))
        known, checked = written(drop_number(path)), re.findall(r"(\w+)\.check\(", lesson)
        names[drop_number(path)] = [known[variable].name for variable in checked if variable in known]
    return names


def answering(notebook: NotebookNode) -> dict[str, list[str]]:
    """Cell id -> the variables of the predictions that its output may answer. A prediction is open from the
    cell after `guess = predict(…)` to the first heading after `guess.reveal(…)`: between that cell and the
    heading pictures may show the answer too.
    """
    answered_by: dict[str, list[str]] = {}
    open_: list[str] = []
    revealed: set[str] = set()
    for cell in notebook.cells:
        if cell.cell_type != "code":
            if re.search(r"^##+ ", cell.source, re.M):
                open_ = [name for name in open_ if name not in revealed]
            continue
        if open_:
            answered_by[cell.id] = list(open_)
        revealed |= {name for name in open_ if f"{name}.reveal(" in cell.source}
        asked = re.findall(r"(\w+) = predict\(", cell.source)
        open_ = [name for name in open_ if name not in asked] + asked
        revealed -= set(asked)
    return answered_by
