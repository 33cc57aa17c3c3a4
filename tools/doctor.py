"""Five checks of what the course needs from a machine: its packages, its ranks on processors and GPUs, and
training that is split over them.

    three-axes doctor        all of them, about a minute
    three-axes doctor 1 5    the first and the fifth

Each check prints its result. A wrong result is marked WRONG, with the expected result and what to do. The
report can be pasted into an issue. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from helpers.ranks import RankError, World, current
from helpers.train import Config, Trainer
from three_axes import devices, nccl
from three_axes.terminal import fitted, fold

OLDEST = (2, 11)  # the oldest PyTorch whose collectives accept fake tensors
CLOSE = 1e-5  # relative difference of a loss from the twin's


class Wrong(Exception):
    """The result is not the expected one."""


@dataclass(frozen=True)
class Check:
    """A check. expected: the right result. advice: what to do about a wrong one. run: returns the result as a
    text, or raises Wrong.
    """

    name: str
    expected: str
    advice: str
    run: Callable[[], str]


CHECKS: list[Check] = []


def check(name: str, expected: str, advice: str):
    """A decorator that adds a function to the checks."""
    return lambda run: CHECKS.append(Check(name, expected, advice, run)) or run


def expect(right: bool, result: str) -> None:
    """Raise Wrong with the result, unless it is right."""
    if not right:
        raise Wrong(result)


def can_share() -> bool:
    """Whether ranks can share a GPU here, with the NCCL that is loaded or another that is installed."""
    return bool(devices.gpus() and (nccl.shares() or nccl.newer()))


def worlds() -> list[tuple[str, int, bool]]:
    """(name, ranks, whether on GPUs) of the worlds that this machine can have: four ranks on the CPU, and a
    rank on each GPU, on at most eight; on a single GPU four, if ranks can share it.
    """
    gpus = min(devices.gpus(), 8)
    on_gpus = [(f"{gpus} GPU{'s' * (gpus > 1)}", 4 if gpus == 1 and can_share() else gpus, True)]
    return [("the CPU", 4, False), *on_gpus * (gpus > 0)]


def add_ones() -> float:
    """Run an all-reduce of 1,000 ones on a rank. Returns their sum, which should be the number of ranks."""
    x = torch.ones(1000, device=current.rank.device)
    dist.all_reduce(x)
    return x[0].item()


# -- the checks ------------------------------------------------------------------------------------


@check(
    "versions and devices",
    "Python 3.11 or newer, PyTorch 2.11 or newer, and with GPUs a PyTorch that can use them over NCCL",
    "install PyTorch as https://pytorch.org says for your driver; without GPUs any build will do",
)
def versions() -> str:
    cuda, rocm = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU"
    by_nccl = nccl.written(nccl.version())
    rest = ", ".join(f"{name} {_version(name)}" for name in ("accelerate", "jupyterlab", "nbval"))
    found = [
        f"Python {platform.python_version()}, PyTorch {torch.__version__} ({build}), NCCL {by_nccl}, {rest}",
        f"{os.cpu_count()} cores, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}",
    ]
    for i in range(devices.gpus()):
        about = torch.cuda.get_device_properties(i)
        found.append(f"GPU {i}: {about.name}, {about.total_memory / 1e9:.0f} GB, {about.major}.{about.minor}")
    if devices.gpus():
        which = "the NCCL that is loaded" if nccl.shares() else nccl.newer()
        found.append(f"ranks can share a GPU over {which}" if which else "ranks cannot share a GPU")
    else:
        found.append("no GPU that PyTorch and NCCL can use")
    recent = tuple(map(int, torch.__version__.split(".")[:2])) >= OLDEST
    expect(recent and (dist.is_nccl_available() or not torch.cuda.is_available()), "\n".join(found))
    return "\n".join(found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


@check(
    "ranks and one all-reduce",
    "ranks that start, add up to their number, and count one call of 4,000 bytes",
    "free the GPU's memory (nvidia-smi says who has it); with NCCL_DEBUG=WARN NCCL says what it lacks",
)
def ranks() -> str:
    x = torch.ones(600, 600, device="cuda" if devices.gpus() else "cpu")
    (x @ x).sum().item()  # ranks must start although this process has used its threads and its GPU
    took = []
    for name, n, gpus in worlds():
        began = time.monotonic()
        with World(n, gpus=gpus, timeout=60) as world:
            sums = world.run(add_ones)
            expect(sums == [n] * n, f"{n} ranks on {name}: all-reduce of ones gives {sums}")
            for r, rows in enumerate(world.traffic.ranks):
                counted = [(row.op, row.calls, row.payload) for row in rows]
                text = f"rank {r} on {name} counted (collective, calls, bytes) {counted}"
                expect(counted == [("all_reduce", 1, 4000)], text)
        took.append(f"{n} on {name} after {time.monotonic() - began:.1f} s")
    return f"all-reduce exact and counted: {', '.join(took)}"


@check(
    "more ranks than GPUs",
    "World(n, gpus=True) lets ranks share a GPU, or is refused in a sentence",
    "report it with the message",
)
def sharing() -> str:
    n = max(2, devices.gpus() + 1)
    try:
        with World(n, gpus=True, timeout=60) as world:
            expect(can_share(), f"World({n}, gpus=True) was not refused, with {devices.gpus()} GPUs")
            expect(world.run(add_ones) == [n] * n, f"{n} ranks that share add up wrongly")
            return devices.placed(n, devices.gpus())
    except (ValueError, RuntimeError) as e:
        expect(not can_share(), str(e))
        return str(e)


def _last_leaves() -> None:
    """The last rank returns; the others wait for it in a collective."""
    if dist.get_rank() < dist.get_world_size() - 1:
        add_ones()


@check(
    "a hang",
    "the ranks that wait for one that never arrives are named within seconds, and the world is of use again",
    "report it with your NCCL's version. Until then restart the kernel after a failure",
)
def hang() -> str:
    lines = []
    for name, n, gpus in worlds():
        if n == 1:
            continue
        with World(n, gpus=gpus, timeout=30) as world:
            world.run(add_ones)
            start = time.monotonic()
            try:
                world.run(_last_leaves, timeout=5)
            except RankError as e:
                named = e.ranks == list(range(n - 1)) and "all_reduce" in str(e)
                expect(named, f"on {name}: {e}")
                state = "kept" if e.state_kept else "lost"
            else:
                raise Wrong(f"on {name}: a rank that never arrives was not noticed")
            lines.append(f"{name}: {time.monotonic() - start:.1f} s, state {state}")
            expect(world.run(add_ones) == [n] * n, f"on {name} the world is of no use after it")
    return "\n".join(lines)


def _train(config: Config, steps: int) -> list[float]:
    """Train on a rank. Returns the losses of the steps."""
    trainer = Trainer(config, current.rank.device)
    return [trainer.step()["loss"] for _ in range(steps)]


@check(
    "training",
    f"the twin's losses in every layout of dp, tp and pp, within {CLOSE:.0e}",
    "report it with the layout that differs",
)
def training() -> str:
    from drops.d14 import twin

    gpus = devices.gpus()
    n = 4 if gpus >= 4 or can_share() or not gpus else 2 if gpus > 1 else 1
    sizes = [(t, p) for t in (1, 2, 4) for p in (1, 2, 4) if n % (t * p) == 0]
    layouts = [{"dp": n // (t * p), "tp": t, "pp": p} for t, p in sizes]
    config = lambda **layout: Config(**layout, hidden=32, seq_len=16, batch=16, steps=20, warmup=5)
    alone, worst = twin(config(), 4), 0.0
    with World(n, gpus=gpus > 0, timeout=120) as world:
        for layout in layouts:
            losses = world.run(_train, config(**layout), 4)[0]
            apart = max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True))
            expect(apart < CLOSE, f"{layout}: losses differ from the twin's by {apart:.1e}")
            worst = max(worst, apart)
    where = "GPUs" if gpus else "the CPU"
    return f"{len(layouts)} layouts of {n} ranks on {where}: within {worst:.0e} of the twin"


# -- the report ------------------------------------------------------------------------------------


def examine(numbers: list[int], say: Callable[[str], None] = print) -> bool:
    """Run checks by number from 1 (by default all) and print their results. Returns whether nothing is wrong.
    Raises ValueError for a number without a check.
    """
    if beyond := [n for n in numbers if not 1 <= n <= len(CHECKS)]:
        raise ValueError(f"there is no check {beyond[0]}: they are 1 to {len(CHECKS)}")
    tally = {"ok": 0, "WRONG": 0}
    began = time.monotonic()
    say(f"Three Axes doctor: {platform.system()} {platform.machine()}, {time.strftime('%Y-%m-%d')}")
    for n in numbers or range(1, len(CHECKS) + 1):
        check, start = CHECKS[n - 1], time.monotonic()
        if sys.stdout.isatty():
            print(f"{n} {check.name} …", end="\r", flush=True)
        try:
            outcome, result = "ok", check.run()
        except Exception as e:  # noqa: BLE001  whatever goes wrong is what the check has found
            outcome, result = "WRONG", str(e) if isinstance(e, Wrong) else f"{type(e).__name__}: {e}"
        tally[outcome] += 1
        say(f"{n} {check.name}: {outcome}, {time.monotonic() - start:.1f} s")
        if outcome == "WRONG":
            say(f"  expected: {check.expected}")
        for i, line in enumerate(result.splitlines()):
            say("  " + "seen: " * (outcome == "WRONG" and i == 0) + line)
        if outcome == "WRONG":
            say(f"  do: {check.advice}")
    counts = ", ".join(f"{count} {outcome}" for outcome, count in tally.items())
    say(f"{counts}, {time.monotonic() - began:.0f} s")
    return not tally["WRONG"]


def run(args: Namespace) -> int:
    with fitted(sys.stdout):
        fine = examine(args.checks, lambda line: print(fold(line), flush=True))
    return 0 if fine else 1
