"""`verify` compares the copies of tensors on different ranks. It must accuse no right job and find each wrong
one. jobs.csv has the jobs. Several jobs run in one World, one after the other.
"""

import io
from contextlib import redirect_stdout, suppress

import jobs
import pytest
import worlds
from sampled import sampled

from three_axes.verify.script import WatchedScript

shared_world = worlds.shared(4, many=40, timeout=120)
JOBS = jobs.jobs()


class Over(BaseException):
    """Ends a job after the last step that is watched."""


def watched(job: jobs.Job, steps: int = 5) -> tuple[str, list[str]]:
    """Run a job under `verify`'s watch, on a rank: the printed text, and the names of wrong tensors."""

    def over():
        raise Over

    names, printed = {}, io.StringIO()
    with redirect_stdout(printed):
        watch = WatchedScript(steps, over)
        try:
            with suppress(Over):
                job.run(names)
            watch.stop()
            watch.end()
            watch.leave_last()
            if watch.compared.copies is not None:
                watch.compared.conclude("job")
        finally:
            watch.stop()
            names.clear()  # the garbage collector does not free hooks and the objects that they hold
    copies = watch.compared.copies
    return printed.getvalue(), [drift.name for drift in copies.wrong] if copies else []


@pytest.mark.parametrize("name", sampled(JOBS))
def test_right_jobs_are_not_accused_and_wrong_ones_are_found(name, world):
    job = JOBS[name]
    said, wrong = world.run(watched, job)[0]
    assert all(words in said for words in job.says), said
    assert bool(wrong) == (job.verdict == "wrong"), said
    assert job.verdict == "wrong" or ("a note" in said) == (job.verdict == "noted"), said
