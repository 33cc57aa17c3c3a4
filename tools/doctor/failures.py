"""The check of what happens when something goes wrong on a rank, and of what is left behind."""

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

from helpers.ranks.failure import RankError, RanksInterrupted
from helpers.ranks.world import World

from .check import ROOT, Wrong, add_ones, check, expect, worlds


def _last_leaves() -> None:
    """All but the last rank wait for it."""
    if dist.get_rank() < dist.get_world_size() - 1:
        add_ones()


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
    "a rank that never comes, one that raises, one that is killed and the stop button: each named within"
    " seconds, the world usable after it, and no rank left when this process is killed",
    "on GPUs: report it with your NCCL's version. Until then restart the kernel after a failure",
)
def failures(meet: str) -> str:
    told = []
    for name, n, gpus in worlds(least=2):
        with World(n, gpus=gpus, timeout=30) as world:
            world.run(add_ones)
            for what, fn, kind, timeout in (
                ("never comes", _last_leaves, "timeout", 2),
                ("raises", _last_raises, "raised", 30),
                ("is killed", _last_dies, "died", 30),
            ):
                start = time.monotonic()
                try:
                    world.run(fn, timeout=timeout)
                    raise Wrong(f"on {name}: a rank that {what} was not noticed")
                except RankError as e:
                    # Those that wait are the ones seen in a collective.
                    at_fault = list(range(n - 1)) if kind == "timeout" else [n - 1]
                    expect(
                        e.kind == kind
                        and e.ranks == at_fault
                        and (kind != "timeout" or "all_reduce" in str(e)),
                        f"on {name}, a rank that {what}: {e}",
                    )
                    told.append(
                        f"{name}, {what}: {time.monotonic() - start:.1f} s, state"
                        f" {'kept' if e.state_kept else 'lost'}"
                    )
                expect(
                    world.run(add_ones) == [n] * n,
                    f"on {name} the world is of no use after a rank that {what}",
                )
            told.append(f"{name}, stop button: {_stopped(world):.1f} s")
            expect(world.run(add_ones) == [n] * n, f"on {name} the world is of no use after a stop")
        _orphans(n, gpus)
    return "\n".join(told)


def _stopped(world: World) -> float:
    """Press stop while ranks wait. Seconds until the world was free again."""
    # A shell's background job ignores it.
    pressed, before = ([], signal.signal(signal.SIGINT, signal.default_int_handler))
    timer = threading.Timer(1.0, lambda: (pressed.append(time.monotonic()), _thread.interrupt_main()))
    timer.start()
    try:
        world.run(_last_leaves, timeout=20)
    except RanksInterrupted:
        return time.monotonic() - pressed[0]
    except RankError as e:
        raise Wrong(f"the stop button did nothing: {e}") from None
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)
    raise Wrong("ranks that wait for one that never comes came to an end")


def _orphans(n: int, gpus: bool) -> None:
    """Kill a process that has a world; its ranks must go with it."""
    code = (
        f"from helpers import World; import time; w = World({n}, gpus={gpus}); print(*w.pids, flush=True);"
        " time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as kernel:
        pids = kernel.stdout.readline().split()
        kernel.kill()
    deadline = time.monotonic() + 5
    while (left := [pid for pid in pids if _runs(int(pid))]) and time.monotonic() < deadline:
        time.sleep(0.05)
    expect(
        bool(pids) and not left,
        f"processes {', '.join(left)} of {len(pids)} outlive the process that started them",
    )


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
