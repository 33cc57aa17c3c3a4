"""A backward in two parts: I finds the input's gradient, which another stage awaits; W finds the weights',
which no stage awaits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

_jobs: list[Callable[[], None]] | None = None  # where W's work is put while an I runs


@contextmanager
def late_weights(jobs: list[Callable[[], None]] | None):
    """While it lasts, what is W's goes into `jobs`, to be called later. With None it is done at once."""
    global _jobs
    before, _jobs = _jobs, jobs
    try:
        yield
    finally:
        _jobs = before


def do_or_put_off(job: Callable[[], None]) -> None:
    """Run W's work now, or leave it to the `late_weights` under way."""
    job() if _jobs is None else _jobs.append(job)
