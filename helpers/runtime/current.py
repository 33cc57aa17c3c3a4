"""The rank that this process is, and how far it has come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import Rank

rank: Rank | None = None  # None in the kernel, and in what a rank forks


def progress(iterable, total: int | None = None):
    """Loop over `iterable`, showing in the notebook how far the slowest rank has come.

    Works in a function that runs on ranks, and does nothing elsewhere.
    """
    total = len(iterable) if total is None and hasattr(iterable, "__len__") else total
    told, done = 0.0, 0
    for item in iterable:
        if rank and time.monotonic() - told > 0.1:
            told = time.monotonic()
            rank.tell(done, total)
        yield item
        done += 1
    if rank:
        rank.tell(done, total)
