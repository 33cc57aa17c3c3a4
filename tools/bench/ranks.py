"""How fast the ranks are, measured here and now: `make bench`, or `python tools/bench/ranks.py`.

What is measured, the median, and what is aimed at. Nothing here is a test: a slow or busy machine gives slow
figures. Ratios are of pairs measured in turn. What counting costs is in cost_of_counting.py.
"""

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist
from peers import dies, raises, stuck
from report import median_seconds, save, timed

from helpers import World
from helpers.ranks import memory
from helpers.ranks.failure import RankError, RanksInterrupted


def cold() -> tuple[float, float]:
    """Seconds from nothing to the first answer of 4 ranks, and to import the same modules once."""
    first = "from helpers import World; World(4).run(int)"
    imports = "import helpers.ranks.preload"
    pairs = [
        [timed(lambda: subprocess.run([sys.executable, "-c", code], check=True)) for code in (first, imports)]
        for _ in range(3)
    ]
    return statistics.median(a for a, _ in pairs), statistics.median(a / b for a, b in pairs)


def ready(n: int) -> float:
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        with World(n):
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def to_failure(world, fn) -> float:
    """Seconds until what a rank does is said."""

    def fail() -> None:
        with suppress(RankError):
            world.run(fn)

    return median_seconds(fail, 5)


def stopped(world) -> float:
    """Seconds from the stop button, while ranks wait in a collective, to a free cell."""
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.perf_counter())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Timer(0.3, press).start()
    with suppress(RanksInterrupted):
        world.run(stuck)
    return time.perf_counter() - pressed[0]


RECOVERY = """
import os, signal, sys, time
from pathlib import Path
from helpers.ranks import server
server.SPARES = int(sys.argv[1])
from helpers import World
from helpers.ranks.failure import RankError

with World(4) as world:
    world.run(int)
    for spare in server._spares:  # it has its name when it has imported all
        while Path(f"/proc/{spare.process.pid}/comm").read_text() != "a spare rank\\n":
            time.sleep(0.1)
    start = time.perf_counter()
    os.kill(world.pids[2], signal.SIGKILL)
    try:
        world.run(int)
    except RankError:
        world.run(int)
    print(time.perf_counter() - start)
"""


def recovery() -> list[tuple[str, str, str]]:
    """How long it takes from killing one rank of 4 to the next answer, by how ranks are started."""
    spawn = {"THREE_AXES_SPAWN": "1"}
    manners = {"forked": ({}, 0), "spawned, spares wait": (spawn, 4), "spawned, no spares": (spawn, 0)}

    def seconds(how: dict, spares: int) -> float:
        command = [sys.executable, "-c", RECOVERY, str(spares)]
        return float(subprocess.check_output(command, env=os.environ | how))

    rounds = [{name: seconds(*manner) for name, manner in manners.items()} for _ in range(5)]
    rows = []
    for name in manners:
        median = statistics.median(took[name] for took in rounds)
        ratio = statistics.median(took[name] / took["forked"] for took in rounds)
        rows.append((f"a rank is killed, to the next answer: {name}", f"{median:.2f} s, {ratio:.1f}×", ""))
    return rows


def main() -> None:
    seconds, ratio = cold()
    rows = [
        ("cold: from nothing to the first answer of 4 ranks", f"{seconds:.1f} s", ""),
        ("… over importing the same modules once", f"{ratio:.2f}×", "≤ 1.5×"),
        ("warm: 4 ranks ready", f"{ready(4):.2f} s", "≤ 0.3 s"),
        ("warm: 8 ranks ready", f"{ready(8):.2f} s", "≤ 0.5 s"),
    ]
    with World(4) as world:
        for _ in range(20):
            world.run(int)
        call = median_seconds(lambda: world.run(int), 200)
        free = statistics.median(stopped(world) for _ in range(5))
        rows += [
            ("a trivial call, 4 ranks", f"{1e3 * call:.1f} ms", "≤ 5 ms"),
            ("a rank raises, three wait: to the message", f"{to_failure(world, raises):.2f} s", "≤ 1 s"),
            ("a rank is killed: to the message", f"{to_failure(world, dies):.2f} s", "≤ 1.5 s"),
            ("stop button in a blocked collective: to a free cell", f"{free:.2f} s", "≤ 1 s"),
        ]
    with World(8) as world:
        world.run(dist.barrier)
        held = sum(map(memory.resident, world.pids))
        rows.append(("8 ranks together, proportional memory", f"{held / 1e6:.0f} MB", "≤ 450 MB"))
    rows += recovery()
    save("ranks", "How fast the ranks are", ["measured", "median", "aim"], [list(row) for row in rows])


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
    main()
