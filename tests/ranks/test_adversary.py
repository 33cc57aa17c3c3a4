"""What a hostile or unlucky reader does to the ranks. Each of these once broke something."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from test_world import alive, assert_usable, fails, linux

from drops import d01, d02
from helpers import World
from helpers.ranks.failure import RankError, RanksInterrupted


@pytest.fixture
def pair():
    with World(2, timeout=10) as world:
        yield world


def run_script(text: str, seconds: float = 60) -> str:
    script = textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=seconds,
        start_new_session=True,
        env=dict(os.environ, PYTHONPATH=os.getcwd()),
    ).stdout


@pytest.mark.slow
@linux
def test_stop_during_warm_up_leaves_the_server_alive():
    out = run_script("""
        import os, signal, threading, time
        threading.Timer(0.6, lambda: os.kill(0, signal.SIGINT)).start()  # to all in the group, as Jupyter
        try:
            from helpers import World
            time.sleep(1)
        except KeyboardInterrupt:
            from helpers import World
        print(World(2).run(lambda: 1))
    """)
    assert out == "[1, 1]\n"


@pytest.mark.slow
@linux
def test_another_package_of_this_name_where_the_kernel_starts(tmp_path):
    """The fork server imports ours, and ranks start where the kernel is, with all imported."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "helpers.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import gc, os\nfrom helpers import World\n"
        "print(World(2).run(lambda: (os.getcwd(), gc.get_freeze_count() > 0)))"
    )
    out = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ, PYTHONPATH=os.getcwd()),
    )
    assert out.stdout == f"{[(str(here), True)] * 2}\n", out.stderr


@pytest.mark.slow
def test_stop_during_the_import_is_put_off():
    out = run_script("""
        import signal, threading
        main = threading.main_thread().ident
        threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        try:
            from helpers import World
            print("too late")
        except KeyboardInterrupt:
            print("stopped")
        from helpers import World
        print(World(2).run(lambda: 1))
    """)
    assert out.splitlines()[-1] == "[1, 1]"


@linux
def test_a_stopped_rank_does_not_stop_the_kernel(pair):
    os.kill(pair.pids[1], signal.SIGSTOP)
    error = fails(pair, lambda x: 1, torch.zeros(1_000_000), timeout=1, within=2)
    assert "rank 1 had not taken the 4.00 MB of the call's arguments after 1 s" in str(error)


@pytest.mark.slow
@linux
def test_a_forked_child_of_the_kernel_touches_nothing():
    out = run_script(
        """
        import os, sys, time
        from helpers import World
        w = World(2)
        w.push(kept=1)
        if os.fork() == 0:
            sys.exit(0)
        os.wait()
        print(w.pull("kept"), flush=True)
        print(*w.pids, flush=True)
        if os.fork() == 0:
            time.sleep(4)
            os._exit(0)
        os._exit(0)
    """.replace("time.sleep(4)", "os.close(1); os.close(2); time.sleep(2)")
    )
    first, pids = out.splitlines()
    assert first == "[1, 1]"
    time.sleep(0.5)
    assert not alive(map(int, pids.split()))


@linux
def test_a_rank_that_forks_is_one_rank(pair, capfd):
    assert pair.cell("import os\npid = os.fork()\nprint('hi') if pid else None\npid > 0") == ["True", "True"]
    child = pair.pull("pid")
    pair.close()
    time.sleep(0.5)
    assert not alive(child)


@linux
def test_a_rank_that_imports_world_starts_no_server_of_its_own(pair):
    """As a reader's own module does that is used on ranks; it took seconds on each."""

    def imports():
        from helpers import World, progress  # noqa: F401
        from helpers.ranks import server

        return server._runs()

    assert pair.run(imports) == [False, False]


def test_dataloader_workers_on_ranks(pair):
    def load():
        from torch.utils.data import DataLoader

        return sum(int(x.sum()) for x in DataLoader(torch.arange(10), batch_size=5, num_workers=1))

    assert pair.run(load, timeout=60) == [45, 45]


def test_what_nobody_waited_for_is_waited_for(pair):
    def forgotten():
        x = torch.ones(5_000_000)
        dist.all_reduce(x, async_op=True)

    for _ in range(3):
        pair.run(forgotten)
        if pair.traffic.wire[0] is not None:
            assert pair.traffic.wire == pytest.approx([20e6, 20e6], rel=0.01)
    assert_usable(pair)

    def one_sided():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3), async_op=True)

    assert "ranks 1" not in str(fails(pair, one_sided, within=3, timeout=1))


@linux
def test_bytes_of_groups_that_are_gone_still_count(pair):
    def short_lived():
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(100_000), group=group)
        dist.destroy_process_group(group)

    pair.run(short_lived)
    assert pair.traffic.wire == pytest.approx([400_000] * 2, rel=0.02)


@pytest.mark.parametrize(
    "mismatch",
    [
        lambda r: dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][r])),
        lambda r: (
            dist.broadcast(torch.ones([4, 8][r]), 0)
            if r == 0
            else dist.broadcast(torch.ones(4, dtype=torch.int32), 0)
        ),
    ],
)
def test_a_silent_mismatch_is_told(pair, capfd, mismatch):
    pair.run(lambda: mismatch(dist.get_rank()))
    assert "warning: collective number 1 of the call does not agree" in capfd.readouterr().out


def test_an_old_mesh_finds_no_other_group(pair):
    pair.cell(
        "from torch.distributed.device_mesh import init_device_mesh\nmesh = init_device_mesh('cpu', (2, 1),"
        " mesh_dim_names=('dp', 'tp'))\nold = dist.new_group([0, 1])"
    )
    with pytest.raises(RankError, match="must be made again"):
        pair.cell("1 / 0")
    pair.cell("new = dist.new_group([1, 0])")
    with pytest.raises(RankError):
        pair.cell("dist.all_reduce(torch.ones(1), group=old)")
    assert_usable(pair)


def test_new_group_by_some_only_is_explained(pair):
    text = str(
        fails(pair, lambda: dist.new_group([0, 1]) if dist.get_rank() == 0 else None, within=4, timeout=1)
    )
    assert "rank 0 waited in new_group" in text and "Every rank must call new_group" in text


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_a_senseless_timeout_is_refused(pair, timeout):
    with pytest.raises(ValueError, match="positive number of seconds, or None"):
        pair.run(int, timeout=timeout)
    with pytest.raises(ValueError, match="positive number"):
        World(1, timeout=timeout)


def test_any_exception_in_the_kernel_leaves_the_world_usable(pair, capfd):
    class Own(Exception):
        pass

    def ring(*_):
        raise Own

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Own):
            pair.run(lambda: time.sleep(30))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_usable(pair)
    assert "the last call was broken off" in capfd.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        "sys.stdout = None",
        "sys.stdout.close()",
        "sys.stderr = 3",
        "os.chdir('/')",
        "sys.path.clear()",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
    ],
)
def test_a_damaged_rank_answers(pair, damage):
    pair.push(kept=1)
    pair.cell("import sys, os, signal\n" + damage)
    assert_usable(pair)
    assert pair.pull("kept") == [1, 1]


def test_odd_exceptions(pair):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    def mute():
        raise Mute

    assert "raised Mute: (its message cannot be shown)" in str(fails(pair, mute, within=1))

    def loud():
        raise ValueError("x" * 3_000_000)

    assert "(3,000,000 characters)" in str(fails(pair, loud, within=2))

    def deep(n=0):
        return deep(n + 1)

    text = str(fails(pair, deep, within=2))
    assert "both ranks raised RecursionError" in text and "times)" in text and len(text) < 3000

    def chained():
        try:
            1 / 0
        except ZeroDivisionError as e:
            raise ValueError("above") from e

    assert "caused by ZeroDivisionError: division by zero" in str(fails(pair, chained, within=1))


def test_swallowed_exceptions_do_not_keep_a_rank(pair):
    def stubborn():
        while True:
            try:
                dist.barrier() if dist.get_rank() else time.sleep(0.1)
            except Exception:
                pass

    fails(pair, stubborn, within=3, timeout=0.5)


def test_a_second_thread_is_told_to_wait(pair):
    thread = threading.Thread(target=lambda: pair.run(lambda: time.sleep(0.5)))
    thread.start()
    time.sleep(0.1)
    with pytest.raises(RuntimeError, match="busy with a call from another thread"):
        pair.run(int)
    thread.join()
    assert_usable(pair)


def test_the_temporary_folder_may_go(pair):
    import shutil

    shutil.rmtree(pair._folder)
    fails(pair, lambda: 1 / 0, within=3)


def test_a_double_stop(pair):
    for delay in (0.3, 0.4):
        threading.Timer(
            delay, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ).start()

    def product():
        x = torch.ones(6000, 6000)
        x @ x

    with pytest.raises(RanksInterrupted, match="stopped, as you asked"):
        pair.run(product)
    time.sleep(0.3)
    assert_usable(pair)


def test_a_world_does_not_travel(pair):
    with pytest.raises(TypeError, match="belongs to the notebook"):
        pair.run(lambda: pair.n)


def test_ranks_draw_different_numbers(pair):
    drawn = pair.run(lambda: (torch.rand(1).item(), numpy.random.rand(), random.random()))
    assert all(a != b for a, b in zip(*drawn))


def test_roots_that_differ_are_different_collectives(pair):
    text = str(
        fails(pair, lambda: dist.broadcast(torch.ones(1_000_000), dist.get_rank()), within=3, timeout=1)
    )
    assert "root 0" in text and "root 1" in text


def test_a_rank_that_is_not_there(pair):
    error = fails(pair, lambda: dist.send(torch.ones(1), 7), within=3, timeout=2)
    assert "IndexError" not in str(error)


def test_modules_found_later_are_found(pair, tmp_path, monkeypatch):
    (tmp_path / "found_later.py").write_text("value = 5")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert pair.run(lambda: __import__("found_later").value) == [5, 5]


def test_odd_attempts_at_exercises():
    assert (
        d01.fingerprints.check(lambda small, large: numpy.zeros(4)).misconception
        == "not one of the three answers"
    )
    assert d01.fingerprints.check(lambda small, large: sys.exit(1)).kind == "crashed"
    assert d01.fingerprints.check(max).kind in ("wrong", "crashed")
    assert (
        d02.average.check(lambda gradient, examples: d02.weighted_average(gradient, examples).double()).kind
        == "right"
    )
    assert (
        d02.ring.check(lambda x, rank, world_size, extra=1: d02.ring_all_reduce(x, rank, world_size)).kind
        == "right"
    )
    assert (
        d02.ring.check(
            lambda x, rank, world_size: x.mul_(world_size * (world_size + 1) / 2 / (rank + 1))
        ).kind
        == "wrong"
    )
    assert d02.ring.check(lambda x, rank, world_size: os._exit(1)).kind == "crashed"
