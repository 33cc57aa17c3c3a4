"""A check of `three-axes doctor`: ranks that fail are named, and no process is left behind."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import torch.distributed as dist

from helpers.ranks import RankError, RanksInterrupted, World

from .check import ROOT, Wrong, add_ones, check, expect, worlds


def _last_leaves() -> None:
    """The last rank returns; the others wait for it in a collective."""
    if dist.get_rank() < dist.get_world_size() - 1:
        add_ones()


def _last_sleeps() -> None:
    """The last rank sleeps; the others wait for it in a collective."""
    add_ones() if dist.get_rank() < dist.get_world_size() - 1 else time.sleep(60)


def _last_raises() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("as planned")
    add_ones()


def _last_dies() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    add_ones()


@check(
    "failures",
    "a rank that never arrives, one that raises, one that is killed and the stop button: each named within"
    " seconds, the world usable after it, and no rank left when this process is killed",
    "on GPUs: report it with your NCCL's version. Until then restart the kernel after a failure",
)
def failures(meet: str) -> str:
    lines = []
    for name, n, gpus in worlds(least=2):
        with World(n, gpus=gpus, timeout=30) as world:
            world.run(add_ones)
            for what in FAILURES:
                lines.append(f"{name}, {what}: {_failed(world, name, what)}")
                usable = world.run(add_ones) == [n] * n
                expect(usable, f"on {name} the world is of no use after a rank that {what}")
            lines.append(f"{name}, stop button: {_stopped(world):.1f} s")
            expect(world.run(add_ones) == [n] * n, f"on {name} the world is of no use after a stop")
        _orphans(n, gpus)
    return "\n".join(lines)


# What the last rank does: the function, the kind of error that must be reported, the world's timeout.
FAILURES = {
    "never arrives": (_last_leaves, "deadlock", 2),
    "raises": (_last_raises, "raised", 30),
    "is killed": (_last_dies, "died", 30),
}


def _failed(world: World, name: str, what: str) -> str:
    """Let the last rank fail. Returns a text with the seconds until the error and whether state was kept."""
    fn, kind, timeout = FAILURES[what]
    kinds = (kind, "timeout") if world.gpus and kind == "deadlock" else (kind,)  # a GPU's wait has no proof
    start = time.monotonic()
    try:
        world.run(fn, timeout=timeout)
    except RankError as e:
        seconds = time.monotonic() - start
        ranks, where = [world.n - 1], ""
        if kind == "deadlock":  # the ranks that wait must be those inside a collective
            ranks, where = list(range(world.n - 1)), "all_reduce"
        named = e.kind in kinds and e.ranks == ranks and where in str(e)
        expect(named, f"on {name}, a rank that {what}: {e}")
        return f"{seconds:.1f} s, state {'kept' if e.state_kept else 'lost'}"
    raise Wrong(f"on {name}: a rank that {what} was not noticed")


def _stopped(world: World) -> float:
    """Press the stop button while ranks wait. Returns the seconds until the call ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    pressed: list[float] = []
    timer = threading.Timer(1.0, lambda: (pressed.append(time.monotonic()), _thread.interrupt_main()))
    timer.start()
    try:
        world.run(_last_sleeps, timeout=20)
    except RanksInterrupted:
        return time.monotonic() - pressed[0]
    except RankError as e:
        raise Wrong(f"the stop button did nothing: {e}") from None
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    raise Wrong("a call ended although its ranks wait for one that never arrives")


def _orphans(n: int, gpus: bool) -> None:
    """Kill a process that has a world. Raises Wrong unless its ranks end within 5 seconds."""
    code = f"""from helpers import World
import time
world = World({n}, gpus={gpus})
print("ranks:", *world.pids, flush=True)
time.sleep(60)"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as kernel:
        # If ranks share a GPU, lines about that come first.
        pids = next((line for line in kernel.stdout if line.startswith("ranks:")), "").split()[1:]
        kernel.kill()
    deadline = time.monotonic() + 5
    while (left := [pid for pid in pids if _runs(int(pid))]) and time.monotonic() < deadline:
        time.sleep(0.05)
    left_over = f"processes {', '.join(left)} of {len(pids)} outlive the process that started them"
    expect(bool(pids) and not left, left_over)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
