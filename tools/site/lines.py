"""What a drop's page asks: the drop's line of the cost model, for the drop's own sizes.

The file that has the lines is run without its package: `make site` installs no PyTorch.
"""

from __future__ import annotations

import inspect
import math
import runpy
from functools import cache
from typing import Any

from three_axes.files import find

DIGITS = 3  # of an answer


@cache
def _lines() -> list[Any]:
    """The records of notebooks/drops/formulas.py, each a `Formula`."""
    return list(runpy.run_path(str(find("notebooks/drops/formulas.py")))["FORMULAS"].values())


def signatures() -> list[str]:
    """'all_reduce(S, d)' and so on, of all lines."""
    return [f"{line.ours.__name__}{inspect.signature(line.ours)}" for line in _lines()]


@cache
def questions() -> dict[str, dict]:
    """Drop -> the question of its first line (see `_question`)."""
    first = {line.drop: line for line in reversed(_lines())}
    return {drop: _question(first[drop]) for drop in sorted(first)}


def _question(line: Any) -> dict:
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
