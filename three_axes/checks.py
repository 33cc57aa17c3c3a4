"""Checks a user's numbers and JSON files. An impossible value raises ValueError with one sentence."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

import numpy as np

from .foreign import plain, read_json


def whole(name: str, value, least: int = 1, most: int = 10**9) -> None:
    """Raises ValueError with a sentence unless `value` is a whole number from `least` to `most`."""
    if type(value) is int and least <= value <= most:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if value > most:
        raise ValueError(
            f"{name} must be at most {most:,}; a number of"
            f" {len(str(value)) if value < 10**100 else 'more than 100'} digits is given"
        )


def positive(
    name: str, value, zero: bool = False, least: float = 0.0, most: float = 1e20, unit: str = ""
) -> None:
    """Raises ValueError with a sentence unless `value` is a positive, finite number (or 0 if `zero` is True)
    from `least` to `most` in `unit`. The limits catch a number of GB/s where bytes/s are needed.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    try:
        good = number and math.isfinite(value) and (value > 0 or zero and value == 0)
    except OverflowError:  # a whole number too large for a float
        good, value = False, "a number that large"
    if not good:
        raise ValueError(
            f"{name} must be {'a number of at least 0' if zero else 'a positive number'}, not {value!r}"
        )
    if value and not least <= value <= most:
        bound = f"at least {least:g}" if value < least else f"at most {most:g}"
        raise ValueError(f"{name} is in {unit}, and must be {bound}; {value:g} is given")


@lru_cache(maxsize=1024)
def divisors(n: int) -> list[int]:
    """All divisors of n, smallest first."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k < n]


def unknown(name: str, known: Collection[str]) -> str:
    """For a message: the name, the most similar known name, and all known names."""
    from difflib import get_close_matches

    near = get_close_matches(name.lower(), known, 1, cutoff=0.3)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    return f"{name!r}{hint}. Known are {', '.join(known)}"


def check_fields(called: str, given: dict, kind: type) -> list[str]:
    """The names of the fields of a dataclass, `kind`. Raises ValueError if `given` has any other name."""
    names = [field.name for field in fields(kind)]
    if strange := sorted(set(given) - set(names)):
        raise ValueError(f"{called} has no field {strange[0]!r}; known are {', '.join(names)}")
    return names


def is_file(name: str) -> bool:
    """Whether a name on the command line means a JSON file."""
    return name.lower().endswith(".json")


def read_object(path: Path, what: str) -> dict:
    """The JSON object in `path`, which should describe a `what`. Raises ValueError if there is none."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object, so no {what}")
    return value


def named(called: str, given: object) -> str:
    """A name from a file, safe to print on a terminal. Raises ValueError if it is not a string."""
    if not isinstance(given, str):
        raise ValueError(f"{called} must be a text, not {given!r}")
    return plain(given)
