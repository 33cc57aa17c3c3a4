"""A backward in two parts. I computes the gradient of the stage's input, for which another stage waits. W
computes the gradients of the weights, for which no stage waits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

_jobs: list[Callable[[], None]] | None = None  # while an I runs, the list that collects W's work


@contextmanager
def late_weights(jobs: list[Callable[[], None]] | None):
    """In this block, W's work is added to `jobs`, to be called later. With None it is done at once."""
    global _jobs
    before, _jobs = _jobs, jobs
    try:
        yield
    finally:
        _jobs = before


def do_or_put_off(job: Callable[[], None]) -> None:
    """Run W's work now, or add it to the list of the enclosing `late_weights`."""
    job() if _jobs is None else _jobs.append(job)
