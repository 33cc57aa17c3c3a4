"""The world of ranks: calls, state, output, and every way in which a call can go wrong."""

import os
import pdb
import pickle
import re
import resource
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers import World
from helpers.ranks import memory, output, server, together
from helpers.ranks.failure import RankError, RanksInterrupted

ROOT = Path(__file__).resolve().parents[2]
# Limits in seconds are those of an idle laptop, times SLACK, because several tests run at once.
SLACK = 5

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def total():
    """On a rank: the sum of all ranks' numbers, counted from 1."""
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def assert_usable(world):
    """Check that a collective works on all ranks."""
    n = len(world)
    assert world.run(total) == [n * (n + 1) / 2] * n


def fails(world, fn, *args, within: float, **kwargs) -> RankError:
    """The error of a call, which must fail within about `within` seconds and leave the world usable."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        world.run(fn, *args, **kwargs)
    if caught.value.state_kept or not server.spawns():  # else ranks import PyTorch anew
        assert time.monotonic() - start < within * SLACK
    assert_usable(world)
    return caught.value


def alive(pids) -> list[int]:
    """Those of these processes that have not ended."""

    def state(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    # A zombie has ended; the process that adopted it may be slow to notice.
    return [p for p in pids if state(p) not in ("Z", "X", "gone")]


def all_end(pids, within: float) -> bool:
    """Whether none of these processes is alive after so many seconds."""
    deadline = time.monotonic() + within
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)


class Odd(Exception):
    """An exception that cannot be printed, nor unpickled: only `a` is in its `args`."""

    def __init__(self, a, b=None, *, notes=()):
        super().__init__(a)
        self.__notes__ = notes
        if b is None:
            raise TypeError("two are needed")

    def __str__(self):
        sys.exit(3)


# -- calls and state ---------------------------------------------------------------------


def test_an_error_without_a_message_is_raised_on_every_rank(world):
    def fails():
        if dist.get_rank() == 1:
            raise OSError

    # `together` raises a ValueError, whose message is here the error's type.
    with pytest.raises(RankError, match="raised ValueError: OSError") as caught:
        world.run(lambda: together(fails))
    assert all(status.error for status in caught.value.seen)


def test_results_come_in_rank_order(world):
    assert world.run(lambda a, b=0: (dist.get_rank(), a, b), 1, b=2) == [(r, 1, 2) for r in range(4)]
    tensors = world.run(lambda: torch.full((2,), float(dist.get_rank())))
    assert [x.tolist() for x in tensors] == [[r, r] for r in range(4)]


def test_names_stay_from_cell_to_cell(world):
    assert world.cell("x = rank * 10") == [None] * 4
    assert world.cell("x += 1\nx") == ["1", "11", "21", "31"]
    assert world.pull("x") == [1, 11, 21, 31]
    world.push(y=5)
    assert world.cell("x + y") == ["6", "16", "26", "36"]
    known = world.cell("world_size, str(device), torch.ones(1).item(), dist.get_rank() == rank")
    assert known[0] == "(4, 'cpu', 1.0, True)"


def test_pull_of_an_unknown_name_says_how_to_make_one(world):
    with pytest.raises(RankError, match=r"no variable 'nope'.*push\(nope=\.\.\.\)"):
        world.pull("nope")


def test_real_processes_with_one_thread_each(world):
    pids = world.run(os.getpid)
    assert pids == world.pids and len(set(pids)) == 4 and os.getpid() not in pids
    assert world.run(torch.get_num_threads) == [1] * 4


def test_a_world_starts_where_the_kernel_is(monkeypatch, tmp_path):
    """This holds in a folder without write permission too, and the kernel does not change its own folder."""
    monkeypatch.setenv("LESSON", "six")
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o500)
    if not server.spawns():
        monkeypatch.setattr(os, "chdir", lambda folder: pytest.fail(f"moved to {folder}"))
    with World(2) as w:
        assert w.run(lambda: (os.environ["LESSON"], os.getcwd())) == [("six", str(tmp_path))] * 2
    assert not os.listdir(tmp_path)


def test_two_worlds_at_once_in_a_kernel_that_has_computed(world):
    torch.ones(1500, 1500) @ torch.ones(1500, 1500)
    with World(2) as other:
        assert other.run(total) == [3.0] * 2
        assert_usable(world)
        assert "4 ranks on the CPU over gloo" in repr(world) and "2 ranks" in repr(other)
    assert_usable(world)


@pytest.mark.parametrize(
    "n, error", [(0, ValueError), (65, ValueError), ("4", TypeError), (2.0, TypeError), (True, TypeError)]
)
def test_a_bad_size_is_refused_in_one_sentence(n, error):
    with pytest.raises(error, match=r"whole number from 1 to 64, such as World\(4\)"):
        World(n)


def test_a_world_of_one_and_when_it_is_closed():
    w = World(1)
    assert w.run(total) == [1.0]
    assert fails(w, lambda: 1 / 0, within=2).state_kept
    w.close()
    w.close()
    assert repr(w) == "World(1), closed"
    with pytest.raises(RuntimeError, match="is closed; make a new one"):
        w.run(total)


def test_an_object_that_cannot_be_sent_to_ranks_is_refused(world):
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        world.run(print, threading.Lock())
    with pytest.raises(TypeError, match="takes a function"):
        world.run(3)
    with pytest.raises(TypeError, match="belongs to the notebook"):
        world.run(lambda: world.n)


def test_a_function_that_uses_an_attribute_called_ops_can_travel(world):
    class Plan:
        ops = [1, 2]

    plan = Plan()
    assert world.run(lambda: torch.ones(1).item() + len(plan.ops)) == [3.0] * 4


def test_nothing_goes_through_shared_memory(world):
    """So a container with 64 MB of /dev/shm, or none, is enough."""
    used = lambda: sum(f.stat().st_size for f in Path("/dev/shm").glob("*"))
    before = used()
    world.run(lambda x: x * 2, torch.zeros(1_000_000))
    assert used() == before


# -- output ------------------------------------------------------------------------------


def test_output_is_whole_ordered_and_folded(world, capfd):
    def speak():
        r = dist.get_rank()
        time.sleep(0.05 * (3 - r))
        print("hello" if r < 3 else "two\nlines")
        os.write(1, b"from C\n" if r == 3 else b"")

    world.run(speak)
    assert capfd.readouterr().out == "ranks 0–2 │ hello\nrank 3\n  │ two\n  │ lines\n  │ from C\n"


def test_a_long_call_prints_while_it_runs(world, capfd, monkeypatch):
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
    assert out.count("rank") > 1  # the lines were printed in several pieces
    assert "/6" in err  # the bar


@linux
def test_a_flood_of_output_is_cut(world, capfd):
    before = memory.resident()

    def flood():
        if dist.get_rank() == 1:
            print("first")
            line = b"x" * 1023 + b"\n"
            for _ in range(250):
                os.write(1, line * 1024)
            print("last")

    world.run(flood, timeout=120)
    out = capfd.readouterr().out
    assert "first" in out and out.rstrip().endswith("last")
    assert re.search(r"… 262 MB in 25\d,\d+ lines left out …", out)
    assert len(out) < 80_000 and memory.resident() - before < 100e6


def test_of_many_lines_the_first_and_the_last_are_shown(world, capfd):
    world.run(lambda: print(*range(20_000), sep="\n") if dist.get_rank() == 1 else None)
    lines = [line.strip(" │") for line in capfd.readouterr().out.splitlines()]
    assert lines[:2] == ["rank 1", "0"] and lines[-1] == "19999" and len(lines) < 210
    assert "… 19,800 lines left out …" in lines


def test_a_silent_call_says_in_one_line_how_long_it_runs_and_will_wait(monkeypatch, capsys):
    monkeypatch.setattr(output, "PATIENCE", 0)
    for timeout, until in ((30.0, "2 s of 30 s at most"), (None, "2 s. The stop")):
        view = output.View([output.Captured()], 0, timeout)
        for seconds in (1, 2, 2):
            view.started, view.updated = time.monotonic() - seconds, 0
            view.tick({}, 1)
        view.end()
        said, err = capsys.readouterr()
        assert not said and err.count(until) == 1 and not err.rpartition("\r")[2], err


def test_a_result_of_60_megabytes(world):
    sizes = [x.nbytes for x in world.run(lambda: torch.zeros(15_000_000 if dist.get_rank() == 2 else 1))]
    assert sizes == [4, 4, 60_000_000, 4]


# -- failures ----------------------------------------------------------------------------


def odd_with_a_cause():
    raise ValueError("outer") from Odd(1, 2)


def odd_with_notes():
    raise Odd(1, 2, notes=5)


def deep():
    return deep()


def a_long_message():
    raise ValueError("x" * 3_000_000)


def each_raises_its_own():
    raise (KeyError if dist.get_rank() % 2 else ValueError)(f"at {dist.get_rank()}")


def allocates_too_much():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
    torch.empty(1 << 40, dtype=torch.uint8)


@pytest.mark.parametrize(
    "fn, told",
    [
        (lambda: [][3], "^all 4 ranks raised IndexError"),
        (lambda: sys.exit(3), "raised SystemExit: 3"),
        (lambda: pdb.set_trace(), "^all 4 ranks raised BdbQuit: breakpoint.. and pdb read the keyboard"),
        (lambda: World(2), "made in the notebook"),
        (each_raises_its_own, "(?s)rank 0 raised.*rank 1 raised.*rank 2 raised.*rank 3 raised"),
        (odd_with_a_cause, r"raised ValueError: outer\ncaused by Odd: \(its message cannot be shown\)"),
        (odd_with_notes, r"raised Odd: \(its message cannot be shown\)"),
        (deep, r"(?s)^all 4 ranks raised RecursionError.*times\)"),
        (a_long_message, r"\(3,000,000 characters\)"),
        pytest.param(allocates_too_much, "^all 4 ranks raised RuntimeError.*allocate", marks=linux),
        (
            lambda: dist.send(torch.ones(2), dist.get_rank() + 1),
            "rank 3 would send to rank 4, which does not exist: ranks go from 0 to 3. Around a ring take",
        ),
        (lambda: dist.broadcast(torch.ones(2), 7), "rank 0 calls broadcast with root 7, which does not"),
    ],
)
def test_an_error_says_what_the_ranks_raised(world, fn, told):
    error = fails(world, fn, within=3)
    assert error.kind == "raised" and re.search(told, str(error)) and len(str(error)) < 3000


def test_the_rank_that_raised_comes_first_and_state_is_kept(world):
    world.push(kept=7)

    def one_fails():
        if dist.get_rank() == 1:
            time.sleep(0.3)  # until the others have come
            raise ValueError("no good")
        dist.barrier()

    error = fails(world, one_fails, within=2)
    text = str(error)
    assert (error.kind, error.ranks, error.state_kept) == ("raised", [1], True)
    assert text.startswith("rank 1 raised ValueError: no good\n    test_world.py, line ")
    assert 'raise ValueError("no good")' in text
    waited = r"ranks 0, 2 and 3 waited in barrier, \d+\.\d s   test_world.py, line \d+:  dist.barrier\(\)"
    assert re.search(waited, text)
    assert "torch/" not in text and "helpers/" not in text
    assert world.pull("kept") == [7] * 4


def test_a_syntax_error_in_a_cell(world):
    with pytest.raises(RankError, match="raised SyntaxError"):
        world.cell("x = = 1")
    assert_usable(world)


@pytest.mark.parametrize("odd", ["float32[200]", "float64[100]"])
def test_a_mismatch_is_explained_with_ranks_and_shapes(world, odd):
    def mismatched(odd):
        x = torch.ones(100)
        if dist.get_rank() == 2:
            x = torch.ones(200) if "200" in odd else x.double()
        dist.all_reduce(x)

    error = fails(world, mismatched, odd, within=3)
    text = str(error)
    assert (error.kind, error.state_kept) == ("died", False)
    assert "tensors that do not match" in text and "Every rank must bring the same shape and dtype" in text
    assert "ranks 0, 1 and 3 called all_reduce of float32[100]" in text
    assert f"rank 2 called all_reduce of {odd}" in text
    assert "variables of earlier cells are gone" in text


def different_collectives():
    dist.barrier() if dist.get_rank() == 3 else dist.all_reduce(torch.ones(3))


def absent():
    if dist.get_rank() != 3:
        dist.all_reduce(torch.ones(3))


def endless():
    while dist.get_rank() == 1:
        pass
    dist.barrier()


def all_receive_first():
    dist.recv(torch.ones(1), (dist.get_rank() - 1) % 4)
    dist.send(torch.ones(1), (dist.get_rank() + 1) % 4)


@pytest.mark.parametrize(
    "fn, kind, told",
    [
        (
            different_collectives,
            "deadlock",
            [
                r"ranks 0–2 waited in all_reduce of float32\[3\], \d+\.\d s .*dist\.all_reduce",
                r"rank 3 waited in barrier, \d+\.\d s .*dist\.barrier",
                r"rank 0 called all_reduce of float32\[3\], rank 3 barrier",
            ],
        ),
        (absent, "deadlock", ["rank 3 had finished", "ranks 0–2 wait for rank 3, which did not come"]),
        (endless, "timeout", ["rank 1 was at test_world.py", "wait for rank 1"]),
        (
            all_receive_first,
            "deadlock",
            [rf"rank {r} waited in recv of float32\[1\] from rank {(r - 1) % 4}" for r in range(4)]
            + [r"rank 3 waits to receive from rank 2 \(line \d+\).*everybody receives before anybody sends"],
        ),
        (lambda: time.sleep(5), "timeout", ["timeout=…"]),
        (partial(time.sleep, 5), "timeout", ["ranks 0–3 were in code that is not yours"]),
        (lambda: dist.broadcast(torch.ones(10**6), dist.get_rank() % 2), "deadlock", ["root 0", "root 1"]),
    ],
)
def test_a_hang_says_where_each_rank_is_and_keeps_the_state(world, fn, kind, told):
    world.push(kept=8)
    error = fails(
        world, fn, within=2.5 if kind == "timeout" else 4.5, timeout=0.5 if kind == "timeout" else 30
    )
    assert (error.kind, error.state_kept) == (kind, True)
    for text in told:
        assert re.search(text, str(error)), error
    assert world.pull("kept") == [8] * 4


def test_a_group_that_only_some_form_is_explained(world):
    form = lambda: dist.new_group([0, 1]) if dist.get_rank() == 0 else None
    text = str(fails(world, form, within=4, timeout=0.5))
    assert "rank 0 waited in new_group" in text and "Every rank must call new_group" in text


def test_groups_of_different_ranks_are_told_as_such(world):
    # Ranks 0 to 2 are each the first of their own pair, and rank 3 is in none, so nobody ever is the second.
    # Of [0, 1] and [2, 3] each pair finds its own ranks, now and then.
    form = lambda: dist.new_group([dist.get_rank() % 3, dist.get_rank() % 3 + 1]) and None
    text = str(fails(world, form, within=9, timeout=0.8))
    assert re.search(r"in new_group\(\[(0, 1|1, 2|2, 3)\]\)", text)
    assert "with the same ranks in the same order" in text
    assert "same collective" not in text


def test_a_stopped_rank_may_not_only_need_longer():
    with World(2, timeout=1.5) as world:
        stop = lambda: dist.barrier() if dist.get_rank() else os.kill(os.getpid(), signal.SIGSTOP)
        text = str(fails(world, stop, within=9))
    assert "rank 0 was stopped, by SIGSTOP or a debugger" in text and "only need longer" not in text


def test_a_hang_is_told_under_pytorchs_debug_level_too(monkeypatch):
    """At level DETAIL a collective blocks inside PyTorch's operator, until all ranks have called it."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with World(2) as world:
        error = fails(world, absent_of_two, within=6)
    assert error.kind == "deadlock" and "rank 1 waits for rank 0, which did not come" in str(error)


def absent_of_two():
    if dist.get_rank():
        dist.all_reduce(torch.ones(3))


def test_arithmetic_that_cannot_be_left_costs_the_state_not_the_kernel(world):
    def long_product():
        if dist.get_rank() == 0:
            x = torch.ones(1, 1).expand(8000, 8000)  # takes no memory
            x @ x

    error = fails(world, long_product, within=3, timeout=0.4)
    assert not error.state_kept and "variables of earlier cells are gone" in str(error)


killed, meet = lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: dist.barrier()


@pytest.mark.parametrize(
    "ends, others, why",
    [
        (killed, meet, "was killed (SIGKILL)"),
        (killed, lambda: time.sleep(30), "was killed (SIGKILL)"),
        (lambda: os._exit(3), meet, "ended by itself (exit status 3)"),
    ],
)
def test_a_rank_that_is_gone_is_noticed(world, ends, others, why):
    error = fails(world, lambda: ends() if dist.get_rank() == 2 else others(), within=1.5)
    assert (error.kind, error.ranks) == ("died", [2])
    assert f"rank 2 is gone: its process {why}" in str(error)
    assert ("out of memory" in str(error)) == ("SIGKILL" in why)


def test_a_rank_killed_between_calls_is_replaced(world):
    os.kill(world.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 is gone"):
        world.run(total)
    assert_usable(world)


def test_results_that_cannot_travel_are_refused(world):
    error = fails(world, lambda: (i for i in range(3)), within=1)
    assert error.kind == "result" and error.state_kept
    assert "generator" in str(error) and "Return numbers, strings, tensors" in str(error)
    error = fails(world, lambda: Odd(1, 2), within=3)
    told = "rank 0 ran to the end, but its result cannot be read in the notebook: TypeError: two are needed"
    assert told in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.ranks, again.kind) == (str(error), [0], "result")


def test_a_group_destroyed_by_the_reader_is_mended(world):
    world.run(lambda: dist.destroy_process_group())
    assert_usable(world)


def press_stop() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize("stuck", ["collective", "compute", "sleep"])
def test_stop_frees_the_cell(world, stuck):
    def hang(stuck):
        if stuck == "collective" and dist.get_rank() != 0:
            dist.barrier()
        while stuck == "compute":
            pass
        time.sleep(60)

    world.push(kept=9)
    start = time.monotonic()
    threading.Timer(0.5, press_stop).start()
    with pytest.raises(RanksInterrupted) as caught:
        world.run(hang, stuck)
    assert time.monotonic() - start < 0.5 + 1 * SLACK
    assert str(caught.value).startswith("stopped, as you asked.")
    if stuck == "collective":
        assert "ranks 1–3 waited in barrier" in str(caught.value)
    assert_usable(world)
    assert world.pull("kept") == [9] * 4
