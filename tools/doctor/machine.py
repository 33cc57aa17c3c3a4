"""Checks of `three-axes doctor` on this machine: versions, devices, ranks, clocks, results."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from helpers.ranks import World, current, span
from three_axes import devices, nccl

from .check import add_ones, both, check, expect, own_device, worlds

OLDEST = (2, 11)  # the oldest PyTorch whose collectives accept fake tensors


@check(
    "versions and devices",
    "Python 3.11 or newer, PyTorch 2.11 or newer, and with GPUs a PyTorch that can use them over NCCL",
    "install PyTorch as https://pytorch.org says for your driver; without GPUs any build will do",
)
def versions(meet: str) -> str:
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


def _product() -> tuple[bool, bool, float]:
    """Multiply on a rank. Returns (whether CUDA fails because of a fork, whether a GPU is visible, the sum of
    the product).
    """
    ones = torch.ones(64, 64, device=own_device())
    return torch.cuda._is_in_bad_fork(), torch.cuda.is_available(), (ones @ ones).sum().item()


@check(
    "ranks beside a busy kernel",
    "ranks that compute, although this process has used its cores' threads and its GPU",
    "report it: the process that ranks are forked from has touched a GPU",
)
def fork(meet: str) -> str:
    x = torch.ones(600, 600, device="cuda" if devices.gpus() else "cpu")
    (x @ x).sum().item()
    for name, n, gpus in worlds():
        with World(n, gpus=gpus) as world:
            for r, (bad, visible, total) in enumerate(world.run(_product)):
                text = f"rank {r} on {name}: in a bad fork {bad}, sees a GPU {visible}, product {total:g}"
                expect(not bad and visible == gpus and total == 64.0**3, text)
    return f"ranks on {both(name for name, *_ in worlds())} multiply; those on the CPU see no GPU"


@check(
    "worlds",
    "ranks that start and add up to their number",
    "free the GPU's memory (nvidia-smi says who has it), or make smaller worlds",
)
def start(meet: str) -> str:
    took = []
    for name, n, gpus in worlds():
        began = time.monotonic()
        with World(n, gpus=gpus, timeout=60) as world:
            sums = world.run(add_ones)
            expect(sums == [n] * n, f"{n} ranks on {name}: all-reduce of ones gives {sums}")
        took.append(f"{n} on {name} after {time.monotonic() - began:.1f} s")
    return "first all-reduce: " + ", ".join(took)


@check(
    "more ranks than GPUs",
    "World(n) on the CPU, its meshes' axes named; World(n, gpus=True) shares the GPUs, or is refused in a"
    " sentence",
    "report it with the message",
)
def too_many(meet: str) -> str:
    n = max(2, devices.gpus() + 1)
    can = devices.gpus() and (nccl.shares() or nccl.newer())
    try:
        with World(n, gpus=True, timeout=60) as world:
            expect(bool(can), f"World({n}, gpus=True) was not refused, with {devices.gpus()} GPUs")
            expect(world.run(add_ones) == [n] * n, f"{n} ranks that share add up wrongly")
            result = devices.placed(n, devices.gpus())
    except (ValueError, RuntimeError) as e:
        expect(not can, str(e))
        result = str(e)
    with World(n) as world:
        world.run(_over_a_mesh)
        axes = {row.axis for row in world.traffic.ranks[0]}
    over = f"collectives over a mesh of one axis of {n} ranks and one of two are shown on the axes"
    expect(axes == {"first", "second"}, f"{over} {sorted(axes)}")
    return result


def _over_a_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    n = dist.get_world_size()
    for names in (("first",), ("first", "second")):
        mesh = init_device_mesh("cpu", (n, 1)[: len(names)], mesh_dim_names=names)
        dist.all_reduce(torch.ones(4), group=mesh.get_group(names[-1]))


def _timed() -> tuple[float, float]:
    """Run products on a rank. Returns their seconds by a span, and by the device's own clock."""
    device = own_device()
    x = torch.randn(1024, 1024, device=device)
    times = int(max(1, 0.03 / min(devices.seconds_of(lambda: x @ x, device) for _ in range(3))))  # of 30 ms
    mark = (lambda: torch.cuda.Event(enable_timing=True)) if device.type == "cuda" else _Clock
    begin, end = mark(), mark()
    with span("F"):
        begin.record()
        for _ in range(times):
            y = x @ x  # noqa: F841
        end.record()
    recorded = current.rank.recorder.spans[-1]
    return recorded.end - recorded.start, begin.elapsed_time(end) / 1e3


class _Clock:
    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Clock) -> float:
        return 1e3 * (end.at - self.at)


@check(
    "spans against the device's clock",
    "a span that lasts as long as the products in it, within a fifth and 2 ms",
    "report it: timelines on this GPU show when work was asked for, not when it was done",
)
def spans(meet: str) -> str:
    lines = []
    for name, n, gpus in worlds(most=1):
        with World(1, gpus=gpus) as world:
            runs = [world.run(_timed)[0] for _ in range(3)]
        by_span, by_clock = min(runs, key=lambda both: abs(both[0] - both[1]))
        text = f"on {name} the span says {1e3 * by_span:.1f} ms, the device {1e3 * by_clock:.1f} ms"
        expect(abs(by_span - by_clock) <= 0.2 * by_clock + 0.002, text)
        lines.append(f"{name}: {1e3 * by_span:.1f} ms, by the device {1e3 * by_clock:.1f} ms")
    return ", ".join(lines)


def _on_device() -> dict:
    layer = torch.nn.Linear(2, 2, device=own_device())
    torch.nn.init.ones_(layer.weight)
    return {"tensor": torch.arange(3, device=own_device()), "layer": layer}


@check(
    "results",
    "a rank's tensors and modules in this process, on the CPU",
    "return x.cpu() until it is mended, and report it",
)
def results(meet: str) -> str:
    for name, n, gpus in worlds(most=1):
        with World(1, gpus=gpus) as world:
            got = world.run(_on_device)[0]
        tensor, weight = got["tensor"], got["layer"].weight
        same = tensor.tolist() == [0, 1, 2] and weight.sum().item() == 4.0
        here = tensor.device == weight.device == devices.CPU and isinstance(weight, torch.nn.Parameter)
        expect(same and here, f"from {name} came {tensor!r} and a weight {weight!r}")
    return f"from {both(name for name, *_ in worlds(most=1))}, as they were"
