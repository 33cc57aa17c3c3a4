"""A World in a process whose folder is gone, whose output is ASCII, or that may not start processes. And
calls after an operation that failed.
"""

import time
from contextlib import suppress
from datetime import timedelta

import forked
import pytest
import torch
import torch.distributed as dist

from helpers import rank_state

BEGIN = "import os, multiprocessing, sys\nfrom helpers import World\n"
# name -> (a program, which follows BEGIN; what it must print)
PROGRAMS = {
    "in a folder that is gone": (
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
        "with World(2) as world: print(world.run(lambda: 7))",
        "[7, 7]",
    ),
    "without Unicode": ("with World(2) as world: world.run(lambda: print('it│is'))", "ranks 0 and 1 | it|is"),
    "in a daemonic process": (
        "def child():\n    try: World(2)\n    except RuntimeError as e: print(e, flush=True)\n"
        "child = multiprocessing.get_context('fork').Process(target=child, daemon=True)\n"
        "child.start(), child.join()",
        "a daemonic process of multiprocessing may start no ranks: make the World in its parent",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("where", PROGRAMS)
def test_a_world_works_or_says_why_not_in_strange_places(where, tmp_path):
    program, printed = PROGRAMS[where]
    done = forked.python(BEGIN + program, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert printed in done.stdout and done.returncode == 0, done


def no_longer_waits():
    """All ranks except rank 0 begin an all-reduce and stop waiting for it. It never completes."""
    if dist.get_rank():
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(3), async_op=True).wait(timedelta(seconds=0.3))


def fails_to_meet():
    if dist.get_rank() != 2:
        with suppress(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=0.3))


@pytest.mark.parametrize("fails", [no_longer_waits, fails_to_meet])
def test_a_failure_that_was_caught_fails_no_later_call(world, fails):
    world.timeout = 20
    world.run(lambda: rank_state().update(kept=7))
    start = time.monotonic()
    world.run(fails)
    assert time.monotonic() - start < 20
    assert world.run(lambda: dist.all_reduce(torch.ones(3)) or rank_state()["kept"]) == [7] * 4
