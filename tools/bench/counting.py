"""What each counter sees of one training step on four ranks, beside what the operating system saw rank 0
send: `python tools/bench/counting.py`.

The course's meter, DTensor's CommDebugMode, the profiler and the flight recorder, for DDP, FSDP2, tensor
parallelism by DTensor and a 1F1B pipeline of PyTorch's. Bytes are those of the tensors, except by the book
(what a rank must send for them) and on the wire. Each counter watches a step of its own.
"""

from __future__ import annotations

import builtins
import math
import os
import pickle
import warnings

os.environ["TORCH_FR_BUFFER_SIZE"] = "10000"  # the flight recorder is off otherwise

import torch
import torch.distributed as dist
from report import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import ProfilerActivity, profile

from drops.d06 import merged_plan
from helpers import World, toy
from helpers.ranks.failure import RankError
from three_axes.table import human

SCHEMES = ("DDP", "FSDP2", "TP", "1F1B")


def prepare(scheme: str) -> None:
    """On a rank: make `step`, which the functions below find, and run it until its buffers are there."""
    torch.manual_seed(0)
    tokens, targets = toy.make_batch(b=8, s=32)
    n, me, model = dist.get_world_size(), dist.get_rank(), toy.ToyTransformer(hidden=256)
    mesh = init_device_mesh("cpu", (n,))
    if scheme == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif scheme == "FSDP2":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    elif scheme == "TP":
        plan = {name: how for name, how in merged_plan().items() if name != "mlp.gate"}  # the toy has none
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
    step = lambda: toy.loss_of(model(tokens), targets).backward()
    if scheme == "1F1B":
        stage = PipelineStage(toy.split_depth(model), me, n, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=toy.loss_of)
        last = {"target": targets, "losses": []} if me == n - 1 else {}
        step = lambda: schedule.step(*[tokens] * (me == 0), **last)
    builtins.step = step
    for _ in range(3):
        step()


def by_comm_debug() -> int:
    with CommDebugMode() as seen:
        builtins.step()
    return sum(seen.get_comm_counts().values())


def by_profiler() -> tuple[int, int]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        builtins.step()
    sizes = [
        4 * sum(math.prod(shape) for shape in e.input_shapes if shape)
        for e in seen.events()
        if e.name.startswith("gloo:") and "recv" not in e.name
    ]
    return len(sizes), sum(sizes)


def by_flight_recorder() -> tuple[int, int]:
    read = lambda: pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"]
    before = len(read())
    builtins.step()
    sizes = [4 * sum(math.prod(size) for size in e["input_sizes"]) for e in read()[before:]]
    return len(sizes), sum(sizes)


def seen(scheme: str, by):
    """What rank 0 says; None where the step cannot run while it is watched."""
    with World(4, counted=False) as world:
        world.run(prepare, scheme)
        try:
            return world.run(by)[0]
        except RankError:
            return None


def main() -> None:
    warnings.simplefilter("ignore")
    rows = []
    for scheme in SCHEMES:
        with World(4) as world:
            world.run(prepare, scheme)
            world.run(lambda: builtins.step())
            traffic = world.traffic
            calls = sum(row.calls for row in traffic.ranks[0] if row.op != "recv")
        others = [seen(scheme, by) for by in (by_comm_debug, by_profiler, by_flight_recorder)]
        fails = "the step fails under it"
        shown = lambda counted: f"{counted[0]} calls, {human(counted[1])}" if counted else fails
        by_debug = f"{others[0]} calls, no bytes" if others[0] else fails
        sent = [human(traffic.wire[0]), human(traffic.counted[0]), shown((calls, traffic.payload[0]))]
        rows.append([scheme, *sent, by_debug, *map(shown, others[1:])])
    counters = ["this course's meter", "CommDebugMode", "profiler", "flight recorder"]
    columns = ["", "on the wire", "by the book", *counters]
    note = (
        "The profiler prints shapes without their type (float32 is taken), and an all-gather's shard where"
        " the meter counts the whole; neither knows the axis, or what a rank must send."
    )
    save("counting", "Counting: what rank 0 sent in one step, and who saw it", columns, rows, note)


if __name__ == "__main__":
    main()
