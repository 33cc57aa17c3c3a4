"""Thirteen checks of what the course needs from a machine: its processors, its GPUs, its network, its
launchers.

    three-axes doctor                  all of them, some minutes
    three-axes doctor 4 10             the fourth and the tenth
    three-axes doctor 13 --meet HOST   on two machines at once; HOST is
                                       the name of one of them

Each check prints its result. A wrong result is marked WRONG, with the expected result and what to do. The
report can be pasted into an issue. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable

from three_axes.terminal import fitted, fold

from . import collectives, failures, machine, training
from .check import Skipped, Wrong

CHECKS = [
    machine.versions,
    machine.fork,
    machine.start,
    collectives.exact,
    machine.too_many,
    training.states,
    failures.failures,
    machine.spans,
    machine.results,
    training.training,
    training.accelerate,
    training.torchrun,
    training.two_hosts,
]


def examine(numbers: list[int], meet: str = "", say: Callable[[str], None] = print) -> bool:
    """Run checks by number from 1 (by default all) and print their results. Returns whether nothing is wrong.
    Raises ValueError for a number without a check.
    """
    if beyond := [n for n in numbers if not 1 <= n <= len(CHECKS)]:
        raise ValueError(f"there is no check {beyond[0]}: they are 1 to {len(CHECKS)}")
    tally = dict.fromkeys(("ok", "WRONG", "skipped"), 0)
    began = time.monotonic()
    say(f"Three Axes doctor: {platform.system()} {platform.machine()}, {time.strftime('%Y-%m-%d')}")
    for n in numbers or range(1, len(CHECKS) + 1):
        check, start = CHECKS[n - 1], time.monotonic()
        if sys.stdout.isatty():
            print(f"{n:2d} {check.name} …", end="\r", flush=True)
        try:
            outcome, result = "ok", check.run(meet)
        except Skipped as e:
            outcome, result = "skipped", str(e)
        except Exception as e:  # noqa: BLE001  whatever goes wrong is what the check has found
            outcome, result = "WRONG", str(e) if isinstance(e, Wrong) else f"{type(e).__name__}: {e}"
        tally[outcome] += 1
        say(f"{n:2d} {check.name}: {outcome}, {time.monotonic() - start:.1f} s")
        if outcome == "WRONG":
            say(f"   expected: {check.expected}")
        for i, line in enumerate(result.splitlines()):
            say("   " + "seen: " * (outcome == "WRONG" and i == 0) + line)
        if outcome == "WRONG":
            say(f"   do: {check.advice}")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in tally.items())
    say(f"{counts}, {time.monotonic() - began:.0f} s")
    return not tally["WRONG"]


def run(args: Namespace) -> int:
    with fitted(sys.stdout):
        fine = examine(args.checks, args.meet, lambda line: print(fold(line), flush=True))
    return 0 if fine else 1
