"""Numbers that a user gives: whether they can be, and what divides them."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np


def whole(name: str, value, least: int = 1, most: int = 10**9) -> None:
    """Raises ValueError, in a sentence, unless `value` is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if value > most:
        raise ValueError(
            f"{name} must be at most {most:,}; a number of"
            f" {len(str(value)) if value < 10**100 else 'more than 100'} digits is given"
        )


def positive(name: str, value, zero: bool = False) -> None:
    """Raises ValueError, in a sentence, unless `value` is a positive and finite number, or 0 where zero is
    allowed.
    """
    try:
        good = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (value > 0 or zero and value == 0)
        )
    except OverflowError:  # a whole number that no float holds
        good, value = False, "a number that large"
    if not good:
        raise ValueError(
            f"{name} must be {'a number of at least 0' if zero else 'a positive number'}, not {value!r}"
        )


@lru_cache(maxsize=1024)
def divisors(n: int) -> list[int]:
    """All of them, the smallest first."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k < n]
