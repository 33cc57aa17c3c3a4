"""Calls and cells that harm the ranks or their processes. Each of these cases once failed."""

import os
import pickle
import random
import re
import signal
import threading
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
import worlds
from test_world import alive, assert_usable, fails, linux, press_stop

from helpers import World
from helpers.ranks.failure import RankError, RanksInterrupted
from helpers.ranks.worker import Rank

shared_world = worlds.shared(2, timeout=10)


@linux
def test_a_stopped_rank_does_not_stop_the_kernel(world):
    os.kill(world.pids[1], signal.SIGSTOP)
    error = fails(world, lambda x: 1, torch.zeros(1_000_000), timeout=1, within=2)
    assert error.kind == "timeout"
    assert "rank 1 had not taken the 4.00 MB of the call's arguments after 1 s" in str(error)


@linux
def test_a_rank_that_forks_is_one_rank(world, capfd):
    assert world.cell("import os\npid = os.fork()\nprint('hi') if pid else None\npid > 0") == ["True", "True"]
    child = world.pull("pid")
    world.close()
    time.sleep(0.5)
    assert not alive(child)


@linux
def test_a_rank_that_imports_world_starts_no_server_of_its_own(world):
    """As a module does that a notebook sends to the ranks: its import once took seconds on each rank."""

    def imports():
        from helpers import World, progress  # noqa: F401
        from helpers.ranks import server

        return server.is_running()

    assert world.run(imports) == [False, False]


CELL = """
class D(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.tensor(i)
int(sum(torch.utils.data.DataLoader(D(), num_workers=1)))
"""


@linux
def test_a_loader_over_a_dataset_that_a_cell_defines(world):
    assert world.cell(CELL, timeout=60) == ["6", "6"]
    unpicklable = pickle.PicklingError("Can't pickle <class '__main__.D'>: attribute lookup D failed")
    told = lambda device: Rank._describe(SimpleNamespace(device=torch.device(device)), unpicklable).message
    assert "write num_workers=0" in told("cuda:0") and "num_workers" not in told("cpu")


def test_a_collective_without_a_wait_ends_before_its_call_does(world):
    def forgotten():
        x = torch.ones(5_000_000)
        dist.all_reduce(x, async_op=True)

    for _ in range(3):
        world.run(forgotten)
        if world.traffic.wire[0] is not None:
            assert world.traffic.wire == pytest.approx([20e6, 20e6], rel=0.01)
    assert_usable(world)


@linux
def test_bytes_of_groups_that_are_gone_still_count(world):
    def short_lived():
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(100_000), group=group)
        dist.destroy_process_group(group)

    world.run(short_lived)
    assert world.traffic.wire == pytest.approx([400_000] * 2, rel=0.02)


def two_sums():
    dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][dist.get_rank()])


def receives_more():
    dist.recv(torch.ones(8), 0) if dist.get_rank() else dist.send(torch.ones(4), 1)


@pytest.mark.parametrize("fn", [two_sums, receives_more])
def test_unequal_calls_that_end_are_an_error(world, fn):
    with pytest.raises(RankError, match="agree") as e:
        world.run(fn)
    assert e.value.kind in ("disagree", "deadlock") and e.value.ranks == [0, 1] and e.value.state_kept


@pytest.mark.parametrize("meet", [lambda x: dist.all_reduce(x), lambda x: dist.broadcast(x, 0)])
def test_a_silent_mismatch_is_an_error(world, meet):
    sentence = "collective number 1 of the call does not agree|do not agree on"
    with pytest.raises(RankError, match=sentence) as e:
        world.run(lambda: meet(torch.ones(4, dtype=[torch.float32, torch.int32][dist.get_rank()])))
    assert e.value.ranks == [0, 1] and e.value.state_kept


def test_an_old_mesh_finds_no_other_group(world):
    world.cell(
        "from torch.distributed.device_mesh import init_device_mesh\nmesh = init_device_mesh('cpu', (2, 1),"
        " mesh_dim_names=('dp', 'tp'))\nold = dist.new_group([0, 1])"
    )
    with pytest.raises(RankError, match="must be made again"):
        world.cell("1 / 0")
    world.cell("new = dist.new_group([1, 0])")
    with pytest.raises(RankError):
        world.cell("dist.all_reduce(torch.ones(1), group=old)")
    assert_usable(world)


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_a_senseless_timeout_is_refused(world, timeout):
    with pytest.raises(ValueError, match="positive number of seconds, or None"):
        world.run(int, timeout=timeout)
    with pytest.raises(ValueError, match="positive number"):
        World(1, timeout=timeout)


def test_any_exception_in_the_kernel_leaves_the_world_usable(world, capfd):
    class Own(Exception):
        pass

    def ring(*_):
        raise Own

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Own):
            world.run(lambda: time.sleep(30))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_usable(world)
    assert "the last call was broken off" in capfd.readouterr().out


@pytest.mark.parametrize("stdout", ["sys.stdout = None", "sys.stdout.close()"])
def test_a_damaged_rank_answers(world, stdout):
    world.push(kept=1)
    world.cell(
        "import sys, os, signal\nsys.stderr = 3\nos.chdir('/')\nsys.path.clear()\n"
        f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{stdout}"
    )
    assert_usable(world)
    assert world.pull("kept") == [1, 1]
    world.close()


def test_swallowed_exceptions_do_not_keep_a_rank(world):
    def stubborn():
        while True:
            try:
                dist.barrier() if dist.get_rank() else time.sleep(0.1)
            except Exception:
                pass

    fails(world, stubborn, within=3, timeout=0.5)


def test_a_second_thread_is_refused_while_a_call_runs(world):
    thread = threading.Thread(target=lambda: world.run(lambda: time.sleep(0.5)))
    thread.start()
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match="busy with a call from another thread"):
        world.run(int)
    thread.join(60)
    assert_usable(world)


@pytest.mark.parametrize("after", [0.0, 0.3])
@pytest.mark.parametrize("fn", [lambda: time.sleep(30), lambda: os._exit(3), len])
def test_a_world_that_another_thread_closes_ends_its_call(fn, after):
    world, said = World(2), []

    def calls() -> None:
        try:
            while True:
                world.run(fn, *["x" * 10**6] * (fn is len))  # more than a pipe holds
        except Exception as e:
            said.append(str(e))
            if isinstance(e, RankError):
                calls()

    thread = threading.Thread(target=calls)
    thread.start()
    time.sleep(after)
    world.close()
    thread.join(20)
    assert not thread.is_alive() and not world.is_open and not world._ranks.processes
    assert re.match(r"this World\(2\) (was closed while its call ran|is closed)", said[-1])
    assert not os.path.exists(world._folder)


def test_a_double_stop(world, tmp_path):
    def product():
        (tmp_path / f"{dist.get_rank()}").touch()
        x = torch.ones(6000, 6000)
        x @ x

    def twice():
        while len(list(tmp_path.iterdir())) < 2:  # earlier, the stop would hit the test and not the call
            time.sleep(0.01)
        press_stop()
        time.sleep(0.1)
        press_stop()

    threading.Thread(target=twice).start()

    with pytest.raises(RanksInterrupted, match="stopped, as you asked"):
        world.run(product)
    time.sleep(0.3)
    assert_usable(world)


def test_ranks_draw_different_numbers(world):
    drawn = world.run(lambda: (torch.rand(1).item(), numpy.random.rand(), random.random()))
    assert all(a != b for a, b in zip(*drawn))


def test_ranks_find_modules_of_folders_that_are_added_later(world, tmp_path, monkeypatch):
    (tmp_path / "found_later.py").write_text("value = 5")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert world.run(lambda: __import__("found_later").value) == [5, 5]
