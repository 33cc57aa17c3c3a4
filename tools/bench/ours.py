"""What the course's own parts cost and see: `make bench`, or

    python tools/bench/ours.py [recovery counting verify counters planner]

Each table is printed and written to build/bench. What takes turns is paired: a ratio is the median over the
pairs, with the smallest and the largest of them, so that whatever else the machine does meets both alike.
Ranks beside what people use instead: peers.py.
"""

from __future__ import annotations

import builtins
import math
import os
import pickle
import subprocess
import sys
import time
import warnings
from statistics import median

os.environ["TORCH_FR_BUFFER_SIZE"] = "10000"  # the flight recorder is off otherwise

import torch
import torch.distributed as dist
from report import paired, save, timed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import ProfilerActivity, profile

from drops.d06 import merged_plan
from helpers import World, toy
from helpers.ranks import standstill
from helpers.ranks.failure import RankError
from three_axes import counting
from three_axes.plan import CLUSTERS, MODELS, Job, plan
from three_axes.table import human
from three_axes.verify import verify

# -- from killing a rank to the next answer -------------------------------------------------------

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


def recovery() -> None:
    """By how ranks are started: forked as on Linux, spawned as on macOS."""
    spawn = {"THREE_AXES_SPAWN": "1"}
    manners = {"forked": ({}, 0), "spawned, spares wait": (spawn, 4), "spawned, no spares": (spawn, 0)}

    def seconds(how: dict, spares: int) -> float:
        command = [sys.executable, "-c", RECOVERY, str(spares)]
        return float(subprocess.check_output(command, env=os.environ | how))

    rounds = [{name: seconds(*manner) for name, manner in manners.items()} for _ in range(5)]
    rows = []
    for name in manners:
        ratio = paired([(took["forked"], took[name]) for took in rounds])
        rows.append([name, f"{median(took[name] for took in rounds):.2f} s", ratio])
    save("recovery", "From killing one rank of four to the next answer", ["", "median", "of forked"], rows)


# -- what counting and verifying cost -------------------------------------------------------------

PAIRS, STEPS = 40, 4


def steps_of_ddp():
    """On a rank: a function that does so many steps of DDP, warm by now."""
    model = torch.nn.parallel.DistributedDataParallel(toy.ToyTransformer(hidden=256))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = toy.make_batch(b=8, s=32)

    def steps(number: int) -> None:
        for _ in range(number):
            toy.loss_of(model(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(2)
    return steps


def steps_counted(pairs: int) -> list[tuple[float, float]]:
    """On a rank: seconds of some steps of DDP, alone and under `counting`, in turn first."""
    steps = steps_of_ddp()

    def turn() -> float:
        steps(1)  # the first after a change finds cold caches
        dist.barrier()
        return timed(lambda: steps(STEPS))

    def counted() -> float:
        with counting():
            return turn()

    turns = []
    for i in range(pairs):
        first = counted() if i % 2 == 0 else None
        alone = turn()
        turns.append((alone, first or counted()))
    return turns


def one_long_call() -> float:
    """On a rank: seconds of steps for some looks."""
    steps = steps_of_ddp()
    dist.barrier()
    return timed(lambda: steps(4 * STEPS))


def cost_of_looking(pairs: int = 20) -> None:
    """A call of a World, looked at five times a second for a hang, and the same that is never looked at."""
    soon, never, took = standstill.FIRST, math.inf, []
    with World(4, timeout=900) as world:
        for i in range(pairs):
            of_call = {}
            for first in (soon, never) if i % 2 else (never, soon):
                standstill.FIRST = first
                of_call[first] = world.run(one_long_call)
            took.append((of_call[never], of_call[soon]))
    of_ranks = [[(alone[r], looked[r]) for alone, looked in took] for r in range(4)]
    rows = [
        [str(rank), f"{median(alone for alone, _ in turns):.2f} s", paired(turns)]
        for rank, turns in enumerate(of_ranks)
    ]
    title = f"What looking for a hang costs: {pairs} pairs of {4 * STEPS} steps of DDP, counted, four ranks"
    save("looking", title, ["rank", "without a look", "with looks, of without"], rows)


def cost_of_counting() -> None:
    """A step of DDP on the toy at hidden 256, on four gloo ranks."""
    with World(4, counted=False, timeout=900) as world:
        of_ranks = world.run(steps_counted, PAIRS)
    rows = [
        [str(rank), f"{1e3 * median(alone for alone, _ in pairs) / STEPS:.1f} ms", paired(pairs)]
        for rank, pairs in enumerate(of_ranks)
    ]
    title = f"What counting costs: {PAIRS} pairs of {STEPS} steps of DDP, hidden 256, four ranks"
    save("counting", title, ["rank", "a step alone", "counted, of alone"], rows)
    cost_of_looking()


def build(mesh):
    torch.manual_seed(0)
    model = toy.ToyTransformer(256, seq_len=64)
    if mesh is not None:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model, batch, mesh):
    tokens, targets = batch if mesh is None else (t.chunk(mesh.size())[mesh.get_local_rank()] for t in batch)
    loss = toy.loss_of(model(tokens), targets)
    loss.backward()
    return loss.detach()


def steps_verified(number: int, steps: int = 2) -> tuple[float, float]:
    """On a rank: seconds of the steps on the mesh and of the whole model on rank 0, which anybody takes who
    compares; and seconds of `verify`. The two take turns in being first.
    """
    torch.set_default_dtype(torch.float64)
    batch = toy.make_batch(16, 64)

    def plain(mesh) -> None:
        model, optimizer = build(mesh)
        for _ in range(steps):
            step(model, batch, mesh)
            optimizer.step()
            optimizer.zero_grad()

    def both() -> None:
        plain(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
        if dist.get_rank() == 0:
            plain(None)
        dist.barrier()

    def compared() -> None:
        assert verify(build, step, batch, ["dp 4"], steps=steps).ok
        dist.barrier()

    seconds = {}
    for run in (both, compared) if number % 2 else (compared, both):
        dist.barrier()
        seconds[run] = timed(run)
    return seconds[both], seconds[compared]


def cost_of_verify(times: int = 5) -> None:
    """Four ranks under FSDP2, in float64."""
    with World(4, timeout=600) as world:
        world.run(steps_verified, 0)  # to be warm
        pairs = [world.run(steps_verified, number)[0] for number in range(times)]
    row = [*(f"{median(column):.2f} s" for column in zip(*pairs)), paired(pairs)]
    save("verify", "What verify costs", ["the steps that it compares", "verify", "of the steps"], [row])


# -- what each counter sees of a step -------------------------------------------------------------

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


def counters() -> None:
    """One training step on four ranks, beside what the operating system saw rank 0 send."""
    warnings.simplefilter("ignore")
    rows = []
    fails = "the step fails under it"
    shown = lambda counted: f"{counted[0]} calls, {human(counted[1])}" if counted else fails
    for scheme in SCHEMES:
        with World(4) as world:
            world.run(prepare, scheme)
            world.run(lambda: builtins.step())
            traffic = world.traffic
        calls = sum(row.calls for row in traffic.ranks[0] if row.op != "recv")
        others = [seen(scheme, by) for by in (by_comm_debug, by_profiler, by_flight_recorder)]
        by_debug = f"{others[0]} calls, no bytes" if others[0] else fails
        sent = [human(traffic.wire[0]), human(traffic.counted[0]), shown((calls, traffic.payload[0]))]
        rows.append([scheme, *sent, by_debug, *map(shown, others[1:])])
    watching = ["this course's meter", "CommDebugMode", "profiler", "flight recorder"]
    columns = ["", "on the wire", "by the book", *watching]
    note = (
        "The profiler prints shapes without their type (float32 is taken), and an all-gather's shard where"
        " the meter counts the whole; neither knows the axis, or what a rank must send."
    )
    save("counters", "Counting: what rank 0 sent in one step, and who saw it", columns, rows, note)


# -- the planner ----------------------------------------------------------------------------------

COMMAND = ("-m", "three_axes", "plan", "llama-3-70b", "--gpus", "64")


def planner(pairs: int = 15) -> None:
    """The whole command beside a Python that imports NumPy alone, and the planner inside a process."""

    def took(*arguments: str) -> float:
        command = [sys.executable, *arguments]
        return timed(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True))

    both = [(took("-c", "import numpy"), took(*COMMAND)) for _ in range(pairs)]
    rows = [[" ".join(COMMAND[1:]), f"{1e3 * median(b for _, b in both):.0f} ms", paired(both)]]
    for model, gpus, batch in (("llama-3-70b", 64, 128), ("deepseek-v3", 2048, 15360)):
        job = Job(MODELS[model], CLUSTERS["dgx-h100"], batch, 4096)
        seconds = median(timed(lambda: plan(job, gpus=gpus)) for _ in range(5))
        rows.append([f"plan() of {model} on {gpus:,}", f"{1e3 * seconds:.0f} ms", ""])
    save("planner", "How soon the planner answers", ["", "median", "of `import numpy`"], rows)


TABLES = {
    "recovery": recovery,
    "counting": cost_of_counting,
    "verify": cost_of_verify,
    "counters": counters,
    "planner": planner,
}

if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(TABLES):
        sys.exit(f"unknown: {', '.join(unknown)}. The tables are {', '.join(TABLES)}")
    for name in sys.argv[1:] or TABLES:
        start = time.monotonic()
        TABLES[name]()
        print(f"({name}: {time.monotonic() - start:.0f} s)", flush=True)
