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

from three_axes.files import find
from three_axes.table import human

DIGITS = 3  # of an answer


@cache
def questions() -> dict[str, dict]:
    """Drop -> the question of its first line (see `_question`)."""
    found: dict[str, dict] = {}

    def line(drop, what, cases, _, mistakes, shown=human) -> Callable:
        def made(ours: Callable) -> Callable:
            wrong = [function for function, _ in mistakes.values()]
            differs = lambda given: any(function(*given) != ours(*given) for function in wrong)
            # The first cases are of the drop's own sizes. Asked is one that shows a known mistake.
            case, given = next((text, given) for text, given in cases.items() if differs(given))
            if drop not in found:
                found[drop] = _question(ours, what, case, given, shown, mistakes)
            return ours

        return made

    path = find("notebooks/drops/lines.py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    begin = next(i for i, node in enumerate(body) if getattr(node, "name", "") == "_line") + 1
    exec(compile(ast.Module(body[begin:], []), str(path), "exec"), {"_line": line, "human": human})
    return found


def _question(ours: Callable, what: str, case: str, given: tuple, shown: Callable, mistakes: dict) -> dict:
    """The data of a question. unit: of the number that is asked. shown: the right number with its unit.
    right: the number itself. near: how far an answer may be from it, half of its third digit. mistakes: [a
    wrong number, why] of each mistake.
    """
    value = ours(*given)
    text = shown(value).replace("%", " %")
    number, unit = text.split(" ")
    size = 10 ** round(math.log10(value / float(number)))  # of the unit: 1e6 of MB
    right = value / size
    named = zip(inspect.signature(ours).parameters, given)
    call = ", ".join(f"{name} = {argument:,.12g}" for name, argument in named)
    return {
        "name": ours.__name__,
        "what": what,
        "case": case,
        "call": f"{ours.__name__}({call})",
        "unit": unit,
        "shown": text,
        "right": right,
        "near": 10 ** (math.floor(math.log10(right)) + 1 - DIGITS) / 2,
        "mistakes": [[wrong(*given) / size, why] for wrong, why in mistakes.values()],
    }
