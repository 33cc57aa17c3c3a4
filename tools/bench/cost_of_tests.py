"""What the tests cost, in imports of torch: `python tools/bench/cost_of_tests.py [--all]`, on a machine with
nothing else to do.

Core-seconds (user and system, of all processes, as /proc/stat counts them) of `tests/run_all.py` and of a
Python that imports torch, in one run: machines differ, their ratio hardly. Linux only.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
IMPORT = [sys.executable, "-c", "import torch, torch.distributed"]


def spent() -> float:
    """Core-seconds that this machine has worked since it started."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def cost(command: list[str]) -> float:
    before = spent()
    subprocess.run(command, cwd=ROOT, check=True)
    return spent() - before


def main() -> None:
    cost(IMPORT)  # its files are read from disk once
    one = statistics.median(cost(IMPORT) for _ in range(5))
    tests = cost([sys.executable, "tests/run_all.py", *sys.argv[1:]])
    print(f"an import {one:.2f} core-seconds, the tests {tests:.0f}: {tests / one:.0f} imports")


if __name__ == "__main__":
    main()
