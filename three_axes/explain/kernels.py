"""Finds by a kernel's name whether it computes or communicates, or that it is not recognised.

`data/kernels.csv` has patterns of names, in the order in which they are tried, each with its source.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from ..files import rows_of

COMPUTES, COMMUNICATES, UNRECOGNISED = "computes", "communicates", "not recognised"
_ENABLED = re.compile(r"^std::enable_if<.*?>::type ")  # the return type of cuBLAS's gemv


class Kernel(NamedTuple):
    """does: `COMPUTES`, `COMMUNICATES` or `UNRECOGNISED`. operation: the collective that the kernel runs; ''
    if it runs none, or if the kernel's name contains the name of the collective.
    """

    does: str
    operation: str = ""


@cache
def known(name: str) -> Kernel:
    """What the kernel of this name does. A kernel that multiplies and communicates at once is not recognised,
    since its name does not say how much time each takes.
    """
    function = function_of(name)
    for pattern, row in _table():
        if pattern.search(function):
            does = row["does"] if row["does"] in (COMPUTES, COMMUNICATES) else UNRECOGNISED
            return Kernel(does, row["operation"])
    return Kernel(UNRECOGNISED)


def function_of(name: str) -> str:
    """'void at::native::(anonymous namespace)::f<int>(int)' -> 'at::native::f'."""
    plain = _ENABLED.sub("", name.replace("(anonymous namespace)::", ""))
    words = re.split(r"[<(]", plain, maxsplit=1)[0].split()
    return words[-1] if words else name


@cache
def _table() -> list[tuple[re.Pattern, dict[str, str]]]:
    return [(re.compile(row["name"], re.IGNORECASE), row) for row in rows_of("kernels.csv")]
