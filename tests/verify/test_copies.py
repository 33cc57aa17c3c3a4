"""Copies on right jobs and on wrong ones, of many makes: none of the first is accused, each of the second is
found. A case is a function that every rank runs under a watch, several cases in one World.
"""

import io
from contextlib import redirect_stdout

import cloudpickle
import engine
import jobs
import pytest
import right_jobs
import worlds
import wrong_jobs
from sampled import sampled

from three_axes.verify.script import Watch

shared = worlds.shared(4, many=40, timeout=120)
for module in (engine, jobs, right_jobs, wrong_jobs):
    cloudpickle.register_pickle_by_value(module)


class Over(BaseException):
    """The last step has been watched."""


def watched(job, steps: int = 5) -> tuple[str, list[str]]:
    """On ranks: what was printed of a job, and the names of what is wrong; of rank 0."""

    def over():
        raise Over

    printed = io.StringIO()
    with redirect_stdout(printed):
        watch = Watch(steps, over)
        try:
            kept = job()  # noqa: F841
        except Over:
            pass
        finally:
            watch.stop()
        watch.end()
        watch.part()
        if watch.seen.copies is None:
            return printed.getvalue(), []
        watch.seen.conclude("job")
    return printed.getvalue(), [drift.name for drift in watch.seen.copies.wrong]


def notes(said: str) -> int:
    return sum("a note" in line and "random state differs" not in line for line in said.splitlines())


@pytest.mark.parametrize("name", sampled(right_jobs.JOBS))
def test_right_jobs_are_not_accused(name, shared):
    job, words = right_jobs.JOBS[name]
    with shared.lent() as world:
        said, wrong = world.run(watched, job)[0]
    assert not wrong and all(some in said for some in words), said
    assert notes(said) == sum("a note" in some for some in words), said


@pytest.mark.parametrize("name", sampled(wrong_jobs.JOBS))
def test_wrong_jobs_are_found(name, shared):
    job, words = wrong_jobs.JOBS[name]
    with shared.lent() as world:
        said, wrong = world.run(watched, job)[0]
    assert all(some in said for some in words), said
    assert bool(wrong) != any("a note" in some for some in words), said
