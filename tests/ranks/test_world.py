"""The world of ranks: calls, state, output, and every way in which a call can go wrong."""

import gc
import multiprocessing.util
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from helpers import World
from helpers.ranks import memory, output, server
from helpers.ranks.failure import RankError, RanksInterrupted

# A limit in seconds is what the reader should see on an idle laptop; these tests must also pass on
# a machine that runs several at once. tools/bench/ranks.py measures.
SLACK = 5

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def total():
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def assert_usable(world):
    n = len(world)
    assert world.run(total) == [n * (n + 1) / 2] * n


def fails(world, fn, *args, within: float, **kwargs) -> RankError:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        world.run(fn, *args, **kwargs)
    if caught.value.state_kept or not server.spawns():  # fresh ranks that are spawned import PyTorch first
        assert time.monotonic() - start < within * SLACK
    assert_usable(world)
    return caught.value


class Odd(Exception):
    """Cannot be shown, nor made again from its one argument."""

    def __init__(self, a, b=None, *, notes=()):
        super().__init__(a)
        self.__notes__ = notes
        if b is None:
            raise TypeError("two are needed")

    def __str__(self):
        sys.exit(3)


def odd_with_a_cause():
    raise ValueError("outer") from Odd(1, 2)


def odd_with_notes():
    raise Odd(1, 2, notes=5)


def test_an_exception_that_cannot_be_shown_costs_nothing(world):
    assert "raised ValueError: outer\ncaused by Odd: (its message cannot be shown)" in str(
        fails(world, odd_with_a_cause, within=3)
    )
    assert "raised Odd: (its message cannot be shown)" in str(fails(world, odd_with_notes, within=3))


def test_a_result_that_cannot_be_read_is_refused_with_its_rank(world):
    error = fails(world, lambda: Odd(1, 2), within=3)
    assert (
        error.kind == "result"
        and "rank 0 ran to the end, but its result cannot be read in the notebook: TypeError: two are needed"
        in str(error)
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.ranks, again.kind) == (str(error), [0], "result")


def test_arguments_that_come_too_late_are_no_lack_of_memory():
    with World(2) as pair:
        error = fails(pair, len, bytes(500_000_000), timeout=0.05, within=5)
        assert (
            error.kind == "timeout"
            and "both ranks had not taken the 500 MB of the call's arguments after 0.05 s" in str(error)
        )


def test_a_call_in_code_that_is_not_the_readers_has_not_finished(world):
    assert "ranks 0–3 were in code that is not yours" in str(
        fails(world, time.sleep, 100, timeout=0.5, within=3)
    )


@pytest.mark.slow
@linux
def test_a_fork_of_the_kernel_has_worlds_of_its_own():
    code = """
        import os
        from helpers import World
        with World(2) as world:
            if (child := os.fork()) == 0:
                try:
                    world.run(lambda: 1)
                except RuntimeError as e:
                    print(e, flush=True)
                with World(2) as mine:
                    print(mine.run(lambda: 6 * 7), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
            print(world.run(lambda: 1))
    """
    script = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100
    )
    assert (
        script.stdout.splitlines()[1:] == ["[42, 42]", "[1, 1]"]
        and "of which this one is a fork; make a new one here" in script.stdout
    ), script


# -- calls and state ---------------------------------------------------------------------


def test_results_come_in_rank_order(world):
    assert world.run(lambda a, b=0: (dist.get_rank(), a, b), 1, b=2) == [(r, 1, 2) for r in range(4)]


def test_tensors_come_back(world):
    for r, x in enumerate(world.run(lambda: torch.full((2,), float(dist.get_rank())))):
        assert torch.equal(x, torch.full((2,), float(r)))


def test_names_stay_from_cell_to_cell(world):
    assert world.cell("x = rank * 10") == [None] * 4
    assert world.cell("x += 1\nx") == ["1", "11", "21", "31"]
    assert world.pull("x") == [1, 11, 21, 31]
    world.push(y=5)
    assert world.cell("x + y") == ["6", "16", "26", "36"]
    assert (
        world.cell("world_size, str(device), torch.ones(1).item(), dist.get_rank() == rank")[0]
        == "(4, 'cpu', 1.0, True)"
    )


def test_pull_of_an_unknown_name_says_how_to_make_one(world):
    with pytest.raises(RankError, match=r"no variable 'nope'.*push\(nope=\.\.\.\)"):
        world.pull("nope")


def test_real_processes_with_one_thread_each(world):
    pids = world.run(os.getpid)
    assert pids == world.pids and len(set(pids)) == 4 and os.getpid() not in pids
    assert world.run(torch.get_num_threads) == [1] * 4


def test_a_world_of_one(capsys):
    with World(1) as w:
        assert w.run(total) == [1.0]
        assert fails(w, lambda: 1 / 0, within=2).state_kept


def test_environment_and_folder_are_the_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("LESSON", "six")
    monkeypatch.chdir(tmp_path)
    with World(2) as w:
        assert w.run(lambda: (os.environ["LESSON"], os.getcwd())) == [("six", str(tmp_path))] * 2


def test_two_worlds_at_once(world):
    with World(2) as other:
        assert other.run(total) == [3.0] * 2
        assert_usable(world)
        assert "4 ranks over gloo" in repr(world) and "2 ranks" in repr(other)
    assert_usable(world)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: dist.send(torch.ones(2), dist.get_rank() + 1),
            "rank 3 would send to rank 4, which does not exist: ranks go from 0 to 3. Around a ring take",
        ),
        (
            lambda: dist.recv(torch.ones(2), dist.get_rank() - 1),
            "rank 0 would receive from rank -1, which does not exist",
        ),
        (
            lambda: dist.broadcast(torch.ones(2), 7),
            "rank 0 calls broadcast with root 7, which does not exist",
        ),
    ],
)
def test_a_rank_that_does_not_exist_is_not_waited_for(world, call, message):
    assert message in str(fails(world, call, within=3))


@pytest.mark.parametrize(
    "n, error",
    [
        (0, ValueError),
        (-1, ValueError),
        (65, ValueError),
        ("4", TypeError),
        (2.0, TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_a_bad_size_is_refused_in_one_sentence(n, error):
    with pytest.raises(error, match=r"whole number from 1 to 64, such as World\(4\)"):
        World(n)


def test_a_closed_world_says_so():
    w = World(1)
    w.close()
    w.close()
    assert repr(w) == "World(1), closed"
    with pytest.raises(RuntimeError, match="is closed; make a new one"):
        w.run(total)


def test_no_world_inside_a_rank(world):
    assert "made in the notebook" in str(fails(world, lambda: World(2), within=5))


def test_what_cannot_be_sent_is_refused(world):
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        world.run(print, threading.Lock())
    with pytest.raises(TypeError, match="takes a function"):
        world.run(3)


# -- output ------------------------------------------------------------------------------


def test_output_is_whole_ordered_and_folded(world, capfd):
    def speak():
        r = dist.get_rank()
        time.sleep(0.05 * (3 - r))
        print("hello" if r < 3 else "two\nlines")
        os.write(1, b"from C\n" if r == 3 else b"")

    world.run(speak)
    assert capfd.readouterr().out == "ranks 0–2 │ hello\nrank 3\n  │ two\n  │ lines\n  │ from C\n"


def test_a_long_call_speaks_while_it_runs(world, capfd, monkeypatch):
    from helpers.ranks import world as module
    from helpers.ranks.current import progress

    monkeypatch.setattr(module, "STREAM_AFTER", 0.1)

    def speak():
        for i in progress(range(6)):
            print("step", i)
            time.sleep(0.15)

    world.run(speak)
    out, err = capfd.readouterr()
    steps = re.findall(r"step (\d)", out)
    assert sorted(set(steps)) == list("012345")
    assert out.count("│") > 1  # more than once
    assert "/6" in err  # the bar


@linux
def test_a_gigabyte_of_output_is_cut(world, capfd):
    before = memory.resident()

    def flood():
        if dist.get_rank() == 1:
            print("first")
            line = b"x" * 1023 + b"\n"
            for _ in range(1000):
                os.write(1, line * 1024)
            print("last")

    world.run(flood, timeout=120)
    out = capfd.readouterr().out
    assert "first" in out and out.rstrip().endswith("last")
    assert re.search(r"… 1\.05 GB in 1,02\d,\d+ lines left out …", out)
    assert len(out) < 80_000 and memory.resident() - before < 100e6


def test_of_many_lines_the_first_and_the_last_are_shown(world, capfd):
    world.run(lambda: print(*range(20_000), sep="\n") if dist.get_rank() == 1 else None)
    lines = [line.strip(" │") for line in capfd.readouterr().out.splitlines()]
    assert lines[:2] == ["rank 1", "0"] and lines[-1] == "19999" and len(lines) < 210
    assert "… 19,800 lines left out …" in lines


def test_a_silent_call_says_how_long_it_will_wait(monkeypatch, capsys):
    monkeypatch.setattr(output, "PATIENCE", 0)
    for timeout, until in ((30.0, "for 30 s at most"), (None, "without end")):
        view = output.View([output.Captured()], 0, timeout)
        for _ in range(2):
            view.shown -= 1
            view.tick({}, 1)
        assert capsys.readouterr().out.count(until) == 1


def test_a_result_of_200_megabytes(world):
    sizes = [x.nbytes for x in world.run(lambda: torch.zeros(50_000_000 if dist.get_rank() == 2 else 1))]
    assert sizes == [4, 4, 200_000_000, 4]


# -- failures ----------------------------------------------------------------------------


def test_the_rank_that_raised_comes_first_and_state_is_kept(world):
    world.push(kept=7)

    def one_fails():
        if dist.get_rank() == 1:
            raise ValueError("no good")
        dist.barrier()

    error = fails(world, one_fails, within=1)
    text = str(error)
    assert (error.kind, error.ranks, error.state_kept) == ("raised", [1], True)
    assert text.startswith("rank 1 raised ValueError: no good\n    test_world.py, line ")
    assert 'raise ValueError("no good")' in text
    assert re.search(
        r"ranks 0, 2 and 3 waited in barrier, \d+\.\d s   test_world.py, line \d+:  dist.barrier\(\)", text
    )
    assert "torch/" not in text and "helpers/" not in text
    assert world.pull("kept") == [7] * 4


def test_all_raise_alike_is_told_once(world):
    error = fails(world, lambda: [][3], within=1)
    assert error.ranks == [0, 1, 2, 3] and str(error).startswith("all 4 ranks raised IndexError")


def test_all_raise_differently(world):
    def raises():
        raise (KeyError if dist.get_rank() % 2 else ValueError)(f"at {dist.get_rank()}")

    error = fails(world, raises, within=1)
    assert error.ranks == [0, 1, 2, 3]
    assert all(f"rank {r} raised" in str(error) for r in range(4))


def test_sys_exit_is_an_error_not_a_death(world):
    error = fails(world, lambda: sys.exit(3), within=1)
    assert error.state_kept and "raised SystemExit: 3" in str(error)


def test_a_syntax_error_in_a_cell(world):
    with pytest.raises(RankError, match="raised SyntaxError"):
        world.cell("x = = 1")
    assert_usable(world)


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_a_mismatch_is_explained_with_ranks_and_shapes(world, what):
    def mismatched(what):
        odd = dist.get_rank() == 2
        x = torch.ones(
            200 if odd and what == "shape" else 100,
            dtype=torch.float64 if odd and what == "dtype" else torch.float32,
        )
        dist.all_reduce(x)

    error = fails(world, mismatched, what, within=3)
    text = str(error)
    assert (error.kind, error.state_kept) == ("died", False)
    assert "tensors that do not match" in text and "Every rank must bring the same shape and dtype" in text
    assert "ranks 0, 1 and 3 called all_reduce of float32[100]" in text
    assert "rank 2 called all_reduce of " + ("float32[200]" if what == "shape" else "float64[100]") in text
    assert "variables of earlier cells are gone" in text


def test_mismatched_collectives_end_in_a_table(world):
    def different():
        if dist.get_rank() == 3:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(3))

    error = fails(world, different, within=2, timeout=0.5)
    text = str(error)
    assert (error.kind, error.state_kept) == ("timeout", True)
    assert re.search(r"ranks 0–2 waited in all_reduce of float32\[3\], \d+\.\d s .*dist\.all_reduce", text)
    assert re.search(r"rank 3 waited in barrier, \d+\.\d s .*dist\.barrier", text)
    assert "different collectives" in text


def test_a_rank_that_never_comes_is_named(world):
    world.push(kept=8)

    def absent():
        if dist.get_rank() != 3:
            dist.all_reduce(torch.ones(3))

    text = str(fails(world, absent, within=2, timeout=0.5))
    assert "rank 3 had finished" in text and "ranks 0–2 wait for rank 3, which never came" in text
    assert world.pull("kept") == [8] * 4


def test_a_rank_that_computes_forever_is_named(world):
    def endless():
        while dist.get_rank() == 1:
            pass
        dist.barrier()

    error = fails(world, endless, within=2.5, timeout=0.5)
    assert (
        error.state_kept and "rank 1 was at test_world.py" in str(error) and "wait for rank 1" in str(error)
    )


def test_everybody_receives_first(world):
    def ring():
        dist.recv(torch.ones(1), (dist.get_rank() - 1) % 4)
        dist.send(torch.ones(1), (dist.get_rank() + 1) % 4)

    text = str(fails(world, ring, within=2, timeout=0.5))
    assert all(f"rank {r} waited in recv of float32[1] from rank {(r - 1) % 4}" in text for r in range(4))
    assert "Every one waits for another: 0 for 3, 1 for 0, 2 for 1, 3 for 2." in text


def test_slow_but_not_stuck_is_said_to_need_longer(world):
    error = fails(world, lambda: time.sleep(5), within=2, timeout=0.3)
    assert "timeout=…" in str(error) and error.state_kept


def test_arithmetic_that_cannot_be_left_costs_the_state_not_the_kernel(world):
    def long_product():
        if dist.get_rank() == 0:
            x = torch.ones(1, 1).expand(8000, 8000)  # there at once
            x @ x

    error = fails(world, long_product, within=3, timeout=0.4)
    assert not error.state_kept and "variables of earlier cells are gone" in str(error)


@pytest.mark.parametrize("where", ["barrier", "sleep"])
def test_a_killed_rank_is_noticed(world, where):
    def killed(where):
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier() if where == "barrier" else time.sleep(30)

    error = fails(world, killed, where, within=1.5)
    assert (error.kind, error.ranks) == ("died", [2])
    assert "rank 2 is gone: its process was killed (SIGKILL)" in str(error) and "out of memory" in str(error)


def test_a_rank_killed_between_calls_is_replaced(world):
    os.kill(world.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 is gone"):
        world.run(total)
    assert_usable(world)


def test_a_rank_that_leaves(world):
    error = fails(world, lambda: os._exit(3) if dist.get_rank() == 0 else dist.barrier(), within=1.5)
    assert "rank 0 is gone: its process ended by itself (exit status 3)" in str(error)


@linux
def test_out_of_memory_is_a_death_that_names_its_cause(world):
    def hog():
        import resource

        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
            torch.empty(1 << 40, dtype=torch.uint8)
        dist.barrier()

    text = str(fails(world, hog, within=1.5))
    assert text.startswith("rank 1 raised RuntimeError") and "allocate" in text


def test_results_that_cannot_be_pickled(world):
    error = fails(world, lambda: (i for i in range(3)), within=1)
    assert error.kind == "result" and error.state_kept
    assert "generator" in str(error) and "Return numbers, strings, tensors" in str(error)


def test_a_group_destroyed_by_the_reader_is_mended(world):
    world.run(lambda: dist.destroy_process_group())
    assert_usable(world)


@pytest.mark.parametrize("stuck", ["collective", "compute", "sleep"])
def test_stop_frees_the_cell(world, stuck):
    def hang(stuck):
        if stuck == "collective" and dist.get_rank() != 0:
            dist.barrier()
        if stuck == "compute":
            while True:
                pass
        time.sleep(60)

    world.push(kept=9)
    pressed = []

    def press():
        pressed.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Timer(0.5, press).start()
    with pytest.raises(RanksInterrupted) as caught:
        world.run(hang, stuck)
    assert time.monotonic() - pressed[0] < 1 * SLACK
    assert str(caught.value).startswith("stopped, as you asked.")
    if stuck == "collective":
        assert "ranks 1–3 waited in barrier" in str(caught.value)
    assert_usable(world)
    assert world.pull("kept") == [9] * 4


# -- nothing left behind -----------------------------------------------------------------

SCRIPT = """
    import sys, time
    from helpers import World
    world = World(4)
    print(*world.pids, flush=True)
    {then}
"""


def start_script(then: str, **kwargs) -> tuple[subprocess.Popen, list[int]]:
    script = tempfile.NamedTemporaryFile("w", suffix=".py", delete=False)
    script.write(textwrap.dedent(SCRIPT.format(then=then)))
    script.close()
    kernel = subprocess.Popen(
        [sys.executable, script.name],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=dict(os.environ, PYTHONPATH=os.getcwd()),
        **kwargs,
    )
    pids = list(map(int, kernel.stdout.readline().split()))
    os.unlink(script.name)
    assert len(pids) == 4
    return kernel, pids


def alive(pids) -> list[int]:
    def state(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    # A zombie has ended; whoever adopted it may take its time.
    return [p for p in pids if state(p) not in ("Z", "X", "gone")]


def test_worlds_made_in_several_threads_leave_multiprocessing_as_it_was():
    before = multiprocessing.util.spawnv_passfds
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: World(1).close(), range(8)))
    assert multiprocessing.util.spawnv_passfds is before


@linux
@pytest.mark.parametrize(
    "manner",
    [
        "kernel",
        "in a collective",
        *(
            pytest.param(manner, marks=pytest.mark.slow)
            for manner in ("group", "holding the interpreter", "ends", "exit")
        ),
    ],
)
def test_no_rank_outlives_the_kernel(manner):
    then = {
        "ends": "",
        "exit": "import os; os._exit(1)",
        "in a collective": (
            "import torch.distributed as dist; world.run(lambda: dist.get_rank() and dist.barrier(),"
            " timeout=None)"
        ),
        "holding the interpreter": "world.run(lambda: sum(range(10**10)), timeout=None)",
    }.get(manner, "time.sleep(60)")
    kernel, pids = start_script(then)
    if manner not in ("ends", "exit"):
        time.sleep(0.3)
        # Nothing is in the kernel's group: a kernel that is shut down would wait for it.
        its = [child.pid for child in psutil.Process(kernel.pid).children(recursive=True)]
        assert set(its) > set(pids) and kernel.pid not in map(os.getpgid, its)
        os.killpg(kernel.pid, signal.SIGKILL) if manner == "group" else kernel.kill()
    kernel.wait(10)
    deadline = time.monotonic() + 2 * SLACK
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pids)


@pytest.mark.slow
@linux
def test_a_script_needs_no_main_guard_and_runs_once():
    kernel, _ = start_script("print(world.run(lambda: 1))")
    assert kernel.wait(timeout=20 * SLACK) == 0
    # Not communicate(): it passes over what readline() has buffered.
    assert kernel.stdout.read() == "[1, 1, 1, 1]\n"


@pytest.mark.slow
@linux
def test_two_hundred_worlds_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others may be making worlds beside us

    def open_things():
        gc.collect()
        return (len(os.listdir("/proc/self/fd")), threading.active_count(), os.listdir(tmp_path))

    for _ in range(server.SPARES):  # where ranks are spawned, these take those that wait from the start
        with World(1):
            pass
    before = open_things()
    ended = []
    for i in range(200):
        w = World(1)
        ended += w.pids
        if i % 2:
            w.close()
        del w  # a world that is forgotten ends as well
    gc.collect()
    assert not alive(ended)
    assert open_things() == before


@linux
def test_a_world_leaves_the_kernel_in_its_folder(world, monkeypatch):
    """The fork server starts in another one; where it runs already, other threads of the kernel see nothing
    of that.
    """
    monkeypatch.setattr(os, "chdir", lambda folder: pytest.fail(f"moved to {folder}"))
    with World(1) as another:
        assert another.run(os.getcwd) == [os.getcwd()]


@linux
def test_nothing_listens_beyond_loopback(world):
    mine = {
        os.stat(f"/proc/{pid}/fd/{fd}").st_ino
        for pid in [os.getpid(), *world.pids]
        for fd in os.listdir(f"/proc/{pid}/fd")
        if os.path.exists(f"/proc/{pid}/fd/{fd}")
    }
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A" and int(inode) in mine:
                assert local.startswith("0100007F:") or local.startswith(
                    "0000000000000000FFFF00000100007F"
                ), local


def test_a_kernel_that_has_computed_can_still_start_ranks():
    x = torch.ones(1500, 1500)
    (x @ x).sum()
    with World(2) as w:
        assert_usable(w)


@linux
def test_a_read_only_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o500)
    with World(2) as w:
        assert_usable(w)
    assert not os.listdir(tmp_path)


def test_nothing_goes_through_shared_memory(world):
    """So a container with 64 MB of /dev/shm, or none, will do."""
    used = lambda: (
        sum(f.stat().st_size for f in Path("/dev/shm").glob("*")) if os.path.isdir("/dev/shm") else 0
    )
    before = used()
    world.run(lambda x: x * 2, torch.zeros(1_000_000))
    assert used() == before


def test_a_function_with_an_attribute_called_ops_can_travel(world):
    class Plan:
        ops = [1, 2]

    plan = Plan()
    assert world.run(lambda: torch.ones(1).item() + len(plan.ops)) == [3.0] * 4


def test_a_function_that_says_torch_and_ops_travels():
    """In a kernel that has loaded what makes a World and nothing else."""
    script = (
        "import cloudpickle, torch\n"
        "import helpers.ranks.world\n"
        "def schedule_of(x): return torch.zeros(1), x.ops\n"
        "cloudpickle.loads(cloudpickle.dumps(schedule_of))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
