"""How fast ranks recover: `make bench`, or `python tools/bench/ranks.py`. Beside others: peers.py. What
counting costs: cost_of_counting.py.
"""

import os
import statistics
import subprocess
import sys

from report import save

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


def recovery() -> list[list[str]]:
    """By how ranks are started."""
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
        rows.append([name, f"{median:.2f} s, {ratio:.1f}×"])
    return rows


if __name__ == "__main__":
    columns = ["from killing one rank of four to the next answer", "median"]
    save("ranks", "How fast ranks recover", columns, recovery())
