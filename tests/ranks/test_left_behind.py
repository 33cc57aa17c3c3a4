"""Scripts and kernels in processes of their own: in whatever way they end, no rank, file or socket is left
behind, and nothing else in the kernel is changed.
"""

import gc
import itertools
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from test_world import SLACK, alive, all_end, linux

from helpers import World
from helpers.ranks import server

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("kills_kernels")


def start(*script, cwd=None) -> subprocess.Popen:
    """Start Python with this script in a process group of its own, as Jupyter starts a kernel."""
    how = dict(start_new_session=True, cwd=cwd, env=dict(os.environ, PYTHONPATH=str(ROOT)))
    return subprocess.Popen([sys.executable, *script], stdout=subprocess.PIPE, text=True, **how)


def printed(script: str) -> list[str]:
    """The lines that a script prints, in a process of its own."""
    return start("-c", textwrap.dedent(script)).communicate(timeout=100)[0].splitlines()


def test_worlds_made_in_several_threads_leave_multiprocessing_as_it_was():
    before = multiprocessing.util.spawnv_passfds
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: World(1).close(), range(8)))
    assert multiprocessing.util.spawnv_passfds is before


# How a kernel ends: its process group is killed; it is killed in a long computation; or it ends by itself.
OTHERS = ("group", "holding the interpreter", "ends", "exit")
SLOW = [pytest.param(manner, marks=pytest.mark.slow) for manner in OTHERS]


@linux
@pytest.mark.parametrize("manner", ["in a collective", *SLOW])
def test_no_rank_outlives_the_kernel(manner):
    then = {
        "ends": "",
        "exit": "import os; os._exit(1)",
        "group": "import time; time.sleep(60)",
        "in a collective": (
            "import time, torch.distributed as dist;"
            " world.run(lambda: dist.barrier() if dist.get_rank() else time.sleep(60), timeout=None)"
        ),
        "holding the interpreter": "world.run(lambda: sum(range(10**10)), timeout=None)",
    }[manner]
    make = "from helpers import World; world = World(4); print(*world.pids, flush=True);"
    kernel = start("-c", make + then)
    pids = list(map(int, kernel.stdout.readline().split()))
    assert len(pids) == 4
    if manner not in ("ends", "exit"):
        time.sleep(0.3)
        # No process is left in the kernel's group: a kernel that is shut down would wait for it.
        its = [child.pid for child in psutil.Process(kernel.pid).children(recursive=True)]
        assert set(its) > set(pids) and kernel.pid not in map(os.getpgid, its)
        os.killpg(kernel.pid, signal.SIGKILL) if manner == "group" else kernel.kill()
    kernel.wait(10)
    assert all_end(pids, within=2 * SLACK)


# A kernel that starts the fork server, makes a world and runs a call.
STARTS = """
import os, time
from helpers.ranks import server
server.warm()
print(flush=True)  # the server starts
from helpers import World
world = World(2)
world.run(time.sleep, 60, timeout=None)
"""


@pytest.mark.slow
@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["the server starts", "it imports torch", "a call runs"])
def test_a_kernel_that_is_killed_leaves_no_process_after_ten_seconds(moment, number):
    kernel = start("-c", STARTS)
    kernel.stdout.readline()
    its = lambda: psutil.Process(kernel.pid).children(recursive=True)
    imports = lambda: any("libtorch" in Path(f"/proc/{p.pid}/maps").read_text() for p in its())
    calls = lambda: len(its()) == 4  # a tracker, the server, two ranks
    until = {"the server starts": its, "it imports torch": imports, "a call runs": calls}[moment]
    while not until():
        time.sleep(0.02)  # within the limit of a test
    pids = [p.pid for p in its()]
    kernel.send_signal(number)
    kernel.wait(10)
    assert pids and all_end(pids, within=10)


def starts_a_pool():
    """A server that the rank starts forks the process."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver"))
    multiprocessing.kept = pool
    return [pool.submit(os.getpid).result(), pool.submit(os.getppid).result()]


@linux
def test_processes_that_a_rank_starts_end_with_its_world():
    with World(2) as world:
        pids = [*itertools.chain(*world.run(starts_a_pool))]
        assert alive(pids)
    assert all_end(pids, within=2 * SLACK)


@pytest.mark.slow
@linux
def test_a_script_needs_no_main_guard_and_may_start_beside_another_helpers_package(tmp_path):
    """The fork server imports this project, and ranks start in the kernel's folder with all imports done."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "helpers.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(
        "import gc, os\nfrom helpers import World\n"
        "print(World(2).run(lambda: (os.getcwd(), gc.get_freeze_count() > 0)))"
    )
    assert start(str(script), cwd=here).communicate(timeout=100)[0] == f"{[(str(here), True)] * 2}\n"


@pytest.mark.slow
@linux
def test_forks_of_the_kernel_have_worlds_of_their_own_and_hold_none_of_its_ranks():
    *said, pids = printed("""
        import os, sys, time
        from helpers import World
        world = World(2)
        world.push(kept=1)
        if os.fork() == 0:
            try:
                world.run(lambda: 1)
            except RuntimeError as e:
                print(e, flush=True)
            with World(2) as mine:
                print(mine.run(lambda: 6 * 7), flush=True)
            sys.exit(0)
        os.wait()
        print(world.pull("kept"), flush=True)
        print(*world.pids, flush=True)
        if os.fork() == 0:
            os.close(1)
            os.close(2)
            time.sleep(2)
        os._exit(0)
    """)
    assert said[1:] == ["[42, 42]", "[1, 1]"]
    assert "of which this one is a fork; make a new one here" in said[0]
    time.sleep(0.5)
    assert not alive(map(int, pids.split()))


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    "seconds, press",
    [
        (0.3, "signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)"),  # during the import
        (0.6, "os.kill(0, signal.SIGINT)"),  # to all in the group, as Jupyter does; the server warms up
    ],
)
def test_a_stop_before_the_first_world_harms_no_world(seconds, press):
    said = printed(f"""
        import os, signal, threading, time
        threading.Timer({seconds}, lambda: {press}).start()
        try:
            from helpers import World
            time.sleep(1)
        except KeyboardInterrupt:
            from helpers import World
        print(World(2).run(lambda: 1))
    """)
    assert said == ["[1, 1]"]


@pytest.mark.slow
@linux
def test_two_hundred_worlds_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests may be making worlds

    def open_things():
        gc.collect()
        return (len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir(tmp_path))

    for _ in range(server.SPARES):  # where ranks are spawned, these use up the spares
        with World(1):
            pass
    before = open_things()
    ended = []
    for i in range(200):
        w = World(1)
        ended += w.pids
        if i % 2:
            w.close()
        del w  # a world without references ends as well
    gc.collect()
    assert not alive(ended)
    assert open_things() == before


@linux
def test_nothing_listens_beyond_loopback(world):
    folders = [Path(f"/proc/{pid}/fd") for pid in [os.getpid(), *world.pids]]
    mine = {file.stat().st_ino for folder in folders for file in folder.iterdir() if file.exists()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A" and int(inode) in mine:
                assert local.startswith(("0100007F:", "0000000000000000FFFF00000100007F")), local


@linux
def test_a_limit_on_open_files_gets_a_sentence():
    (files,) = printed("""
        import resource
        from helpers import World
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        try:
            World(8)
        except RuntimeError as e:
            print(e, flush=True)
    """)
    assert files.startswith("no ranks can start here ([Errno 24]") and "`ulimit -n`" in files


def test_a_script_ends_while_a_call_runs_in_another_of_its_threads():
    *said, pids = printed("""
        import sys, threading, time
        from helpers import World
        world = World(2)
        print(*world.pids, flush=True)
        def calls():
            try:
                world.run(time.sleep, 60)
            except RuntimeError as e:
                print(e, flush=True)
        threading.Thread(target=calls, daemon=True).start()
        time.sleep(0.5)
        sys.exit(0)
    """)[::-1]
    assert said == ["this World(2) was closed while its call ran"]
    assert not alive(map(int, pids.split()))
