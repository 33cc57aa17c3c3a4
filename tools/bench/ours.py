"""Measures the cost of counting, of the search for a hang and of `verify`:

    python tools/bench/ours.py [counting looking verify]

Two measurements that are compared take turns, so that other work of the machine slows both equally. A ratio
is the median over the pairs, with the smallest and the largest.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers import World, toy
from helpers.ranks import polls
from three_axes import counting
from three_axes.table import Table
from three_axes.verify import verify


def timed(action: Callable[[], object]) -> float:
    """The seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def paired(pairs: Sequence[tuple[float, float]]) -> str:
    """'1.02 (0.97 to 1.08)': the median and the extremes of the pairs' ratios, the second to the first."""
    ratios = sorted(second / first for first, second in pairs)
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


# -- the cost of counting and verifying -----------------------------------------------------------


PAIRS, STEPS = 40, 4


def steps_of_ddp():
    """A function that runs a number of DDP steps on a rank. Two steps have run already, as a warm-up."""
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
    """(seconds alone, seconds under `counting`) of some DDP steps on a rank, for each pair. The order
    alternates.
    """
    steps = steps_of_ddp()

    def turn() -> float:
        steps(1)  # after a change, the first step has cold caches
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
    """The seconds of DDP steps on a rank, so many that the call is polled several times."""
    steps = steps_of_ddp()
    dist.barrier()
    return timed(lambda: steps(4 * STEPS))


def cost_of_looking(pairs: int = 20) -> None:
    """Compare a call of a World that is polled for a hang five times a second with a call that is never
    polled.
    """
    soon, never, took = polls.FIRST, math.inf, []
    try:
        with World(4, timeout=900) as world:
            for i in range(pairs):
                of_call = {}
                for first in (soon, never) if i % 2 else (never, soon):
                    polls.FIRST = first
                    of_call[first] = world.run(one_long_call)
                took.append((of_call[never], of_call[soon]))
    finally:
        polls.FIRST = soon
    of_ranks = [[(alone[r], polled[r]) for alone, polled in took] for r in range(4)]
    rows = [
        [str(rank), f"{median(alone for alone, _ in turns):.2f} s", paired(turns)]
        for rank, turns in enumerate(of_ranks)
    ]
    title = f"What looking for a hang costs: {pairs} pairs of {4 * STEPS} steps of DDP, counted, four ranks"
    print(Table(["rank", "never polled", "polled, of never polled"], rows, title=title))


def cost_of_counting() -> None:
    """Measure a step of DDP on the toy (hidden 256), on four gloo ranks, with and without counting."""
    with World(4, counted=False, timeout=900) as world:
        of_ranks = world.run(steps_counted, PAIRS)
    rows = [
        [str(rank), f"{1e3 * median(alone for alone, _ in pairs) / STEPS:.1f} ms", paired(pairs)]
        for rank, pairs in enumerate(of_ranks)
    ]
    title = f"What counting costs: {PAIRS} pairs of {STEPS} steps of DDP, hidden 256, four ranks"
    print(Table(["rank", "a step alone", "counted, of alone"], rows, title=title))


def steps_verified(number: int, steps: int = 2) -> tuple[float, float]:
    """(seconds of the steps that a comparison needs, seconds of `verify`) on a rank. The steps are those
    under FSDP2, and those of the whole model on rank 0. The order alternates.
    """
    torch.set_default_dtype(torch.float64)
    batch = toy.make_batch(16, 64)

    def build(mesh):
        torch.manual_seed(0)
        model = toy.ToyTransformer(256, seq_len=64)
        for part in (*model.blocks, model) if mesh else ():
            fully_shard(part, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model, batch, mesh):
        tokens, targets = (t.chunk(mesh.size())[mesh.get_local_rank()] if mesh else t for t in batch)
        loss = toy.loss_of(model(tokens), targets)
        loss.backward()
        return loss.detach()

    def plain() -> None:
        whole = [None] * (dist.get_rank() == 0)
        for mesh in (init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), *whole):
            model, optimizer = build(mesh)
            for _ in range(steps):
                step(model, batch, mesh)
                optimizer.step()
                optimizer.zero_grad()

    def compared() -> None:
        assert verify(build, step, batch, ["dp 4"], steps=steps).ok

    seconds = {}
    for run in (plain, compared) if number % 2 else (compared, plain):
        dist.barrier()
        seconds[run] = timed(lambda run=run: (run(), dist.barrier()))
    return seconds[plain], seconds[compared]


def cost_of_verify(times: int = 5) -> None:
    with World(4, timeout=600) as world:
        world.run(steps_verified, 0)  # warm-up
        pairs = [world.run(steps_verified, number)[0] for number in range(times)]
    row = [*(f"{median(column):.2f} s" for column in zip(*pairs)), paired(pairs)]
    columns = ["the steps that it compares", "verify", "of the steps"]
    print(Table(columns, [row], title="What verify costs: four FSDP2 ranks, float64"))


TABLES = {"counting": cost_of_counting, "looking": cost_of_looking, "verify": cost_of_verify}

if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(TABLES):
        sys.exit(f"unknown: {', '.join(unknown)}. The tables are {', '.join(TABLES)}")
    for name in sys.argv[1:] or TABLES:
        TABLES[name]()
