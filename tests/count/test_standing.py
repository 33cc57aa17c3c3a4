"""A World ends a call in which no rank moves, and says who waits for whom. It never ends a program that would
end by itself.
"""

import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import ending
import hanging
import pytest
import torch
import torch.distributed as dist

from helpers import World
from helpers.ranks.failure import RankError
from helpers.ranks.output import View
from three_axes import lines
from three_axes.paper import Network

pytestmark = pytest.mark.waits
# Ranks need not import these files.
cloudpickle.register_pickle_by_value(ending)
cloudpickle.register_pickle_by_value(hanging)


def thread_of_an_earlier_call(world):
    def begins():
        if dist.get_rank() == 0:
            threading.Thread(target=ending.sends_later).start()

    def wait():
        if dist.get_rank() == 1:
            dist.recv(torch.ones(4), 0)
            dist.send(torch.ones(4), 0)
        elif dist.get_rank() == 0:
            dist.recv(torch.ones(4), 1)

    world.run(begins)
    world.run(wait)


def processes_that_are_stopped(world):
    """All ranks are stopped for 6 s while rank 0 computes and the others wait for it."""

    def stop():
        for number in (signal.SIGSTOP, signal.SIGCONT):
            time.sleep(1 if number == signal.SIGSTOP else 6)
            for pid in world.pids:
                os.kill(pid, number)

    stopper = threading.Thread(target=stop)
    stopper.start()
    world.run(lambda: (dist.get_rank() or time.sleep(2), dist.barrier()))
    stopper.join()


def slow_network(world):
    """An all-reduce of 8 s."""
    slow = Network(name="slow", intra_node_bandwidth=1e6)
    with World(2, fabric=slow) as emulated:
        emulated.run(lambda: dist.all_reduce(torch.ones(2_000_000)))


WHOLE = {run.__name__: run for run in (thread_of_an_earlier_call, processes_that_are_stopped, slow_network)}


def in_worlds(programs: dict) -> dict:
    """name -> the RankError of a program that a World of its own runs, or None. Several run side by side,
    because they mostly wait. (All have ended when a test begins: pytest then changes this process's
    environment, and a World copies it.)
    """

    def run(program) -> RankError | None:
        with World(4, timeout=30) as world:
            try:
                program(world)
            except RankError as error:
                return error
        return None

    with ThreadPoolExecutor(5) as pool:
        return dict(zip(programs, pool.map(run, programs.values())))


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    given = {"group_that_comes_again": [str(tmp_path_factory.mktemp("meets"))]}
    run = lambda name: lambda world: world.run(ending.ENDS[name], *given.get(name, []))
    return in_worlds({name: run(name) for name in ending.ENDS} | WHOLE)


@pytest.mark.parametrize("name", [*ending.ENDS, *WHOLE])
def test_a_program_that_ends_by_itself_is_left_alone(ended, name):
    assert ended[name] is None, ended[name]


@pytest.fixture(scope="module")
def hung():
    return in_worlds({program: lambda world, its=program: world.run(its) for program in hanging.HANGS})


@pytest.mark.parametrize("program", hanging.HANGS)
def test_a_hang_ends_the_call_and_says_who_waits_for_whom(hung, program):
    error = hung[program]
    assert error.kind == "deadlock", error
    assert "no rank has moved for 2 s" in str(error) and hanging.HANGS[program] in str(error), error


@pytest.mark.parametrize("program", hanging.NOTED)
def test_where_something_unknown_may_free_a_rank_there_is_only_a_note(world, program, monkeypatch):
    notes = []
    monkeypatch.setattr(world, "quiet", 0.6)
    monkeypatch.setattr(lines, "STILL", 0.5)
    monkeypatch.setattr(View, "set_places", lambda view, places: notes.append(places))
    with pytest.raises(RankError) as caught:
        world.run(program, timeout=2)
    assert caught.value.kind == "timeout"
    assert any("rank" in places for places in notes)
    if program is hanging.second_forward_of_ddp:
        assert re.search(r", with broadcast of int32\[\d+\], root 0 begun", notes[-1])
    if program is hanging.ring_beside_a_thread:
        assert re.search(r"rank 0 has a thread .*, so it may still go on", str(caught.value))
