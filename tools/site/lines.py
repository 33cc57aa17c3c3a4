"""Reads from notebooks/drops/lines.py what a drop's page asks: the drop's line of the cost model, for the
drop's own sizes.

The file's lines are run without the rest of it, which needs PyTorch: `make site` installs none.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from three_axes.files import find
from three_axes.table import human

DIGITS = 3  # of an answer


class Line(NamedTuple):
    """A line of the file: the course's function, and the arguments of its decorator."""

    ours: Callable
    drop: str
    what: str
    cases: dict[str, tuple]
    mistakes: dict[str, tuple[Callable, str]]
    shown: Callable[[float], str]


@cache
def _lines() -> list[Line]:
    found: list[Line] = []

    def line(drop, what, cases, _, mistakes, shown=human) -> Callable:
        return lambda ours: found.append(Line(ours, drop, what, cases, mistakes, shown)) or ours

    path = find("notebooks/drops/lines.py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    begin = next(i for i, node in enumerate(body) if getattr(node, "name", "") == "_line") + 1
    exec(compile(ast.Module(body[begin:], []), str(path), "exec"), {"_line": line, "human": human})
    return found


def signatures() -> list[str]:
    """'all_reduce(S, d)' and so on, of all lines."""
    return [f"{line.ours.__name__}{inspect.signature(line.ours)}" for line in _lines()]


@cache
def questions() -> dict[str, dict]:
    """Drop -> the question of its first line (see `_question`)."""
    first = {line.drop: line for line in reversed(_lines())}
    return {drop: _question(first[drop]) for drop in sorted(first)}


def _question(line: Line) -> dict:
    """The data of a question. unit: of the number that is asked. shown: the right number with its unit.
    right: the number itself. near: how far an answer may be from it, half of its third digit. mistakes: [a
    wrong number, why] of each mistake.
    """
    ours, wrong = line.ours, line.mistakes.values()
    differs = lambda given: any(other(*given) != ours(*given) for other, _ in wrong)
    # The first cases are of the drop's own sizes. Asked is one that shows a known mistake.
    case, given = next((text, given) for text, given in line.cases.items() if differs(given))
    value = ours(*given)
    text = line.shown(value).replace("%", " %")
    number, unit = text.split(" ")
    size = 10 ** round(math.log10(value / float(number)))  # of the unit: 1e6 of MB
    right = value / size
    named = zip(inspect.signature(ours).parameters, given)
    call = ", ".join(f"{name} = {argument:,.12g}" for name, argument in named)
    return {
        "name": ours.__name__,
        "what": line.what,
        "case": case,
        "call": f"{ours.__name__}({call})",
        "unit": unit,
        "shown": text,
        "right": right,
        "near": 10 ** (math.floor(math.log10(right)) + 1 - DIGITS) / 2,
        "mistakes": [[other(*given) / size, why] for other, why in wrong],
    }
