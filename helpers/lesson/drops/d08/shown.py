"""Drop 08, what its cells show: bytes by axis, the twin, and three orders of the axes."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from .... import toy
from ....runtime import current
from ....runtime.clock import shortest
from ....runtime.traffic import Traffic
from ....runtime.world import World
from ....table import Table, human
from ....theory import MODELS, Job, Layout, placement
from ....theory.frameworks import TOY
from ....theory.hardware import Network
from ....theory.placement import Sizes
from ....theory.schedules import one_f_one_b
from ....theory.traffic import sent

# Emulated: two nodes of four, with ports out of a node that are 20 times slower than links inside.
NODES = Network(
    name="two nodes of four",
    gpus_per_node=4,
    intra_node_bandwidth=20e6,
    inter_node_bandwidth=1e6,
    intra_node_latency=1e-4,
    inter_node_latency=5e-4,
)


def expected_bytes(
    hidden: int, b: int, s: int, d: int, p: int, t: int, rank: int = 0, layers: int = 4
) -> dict[str, float]:
    """Bytes that a rank sends along each axis in one step of the toy, in float32: the theory's list of
    operations, read for what is sent.
    """
    layout = Layout(dp=d, tp=t, pp=p, sequence_parallel=False)
    model = replace(MODELS["toy"], hidden=hidden, layers=layers, ffn=4 * hidden, head_dim=hidden // 4)
    stage = placement.coordinates(rank, layout.sizes)["pp"]
    return sent(Job(model, global_batch=b, seq_len=s, framework=TOY), layout, stage)


def by_axis(traffic: Traffic, sizes: Sizes, predicted: dict[str, float], rank: int = 0) -> Table:
    """Bytes that `rank` sent along each axis, three ways.

    Two ranks share one axis at most, so who sent to whom tells the axis.
    """
    counted = {axis: sum(row.book for row in traffic.ranks[rank] if row.axis == axis) for axis in sizes}
    wire: dict = dict.fromkeys(sizes, 0 if traffic.matrix else None)
    for other, size in enumerate(traffic.matrix[rank] if traffic.matrix else []):
        if axis := placement.axis_between(rank, other, sizes):
            wire[axis] += size
    rows = [
        [
            axis,
            human(predicted[axis]),
            human(counted[axis]),
            human(wire[axis]),
            "n/a" if wire[axis] is None or not predicted[axis] else f"{wire[axis] / predicted[axis]:.2f}",
        ]
        for axis in reversed(sizes)
    ]
    return Table(
        ["axis", "predicted", "counted", "on the wire", "wire ÷ predicted"],
        rows,
        title=f"bytes sent by rank {rank}, along each axis",
    )


def compare_with_twin(world: World, d: int, p: int, t: int, m: int = 2, steps: int = 3) -> str:
    """Three steps of SGD on the grid and in one process, in float64. What differs, or that nothing does."""

    def run():
        rank = dist.get_rank()
        grid = toy.grid_groups(d, p, t)
        model, twin = (
            toy.ToyTransformer(hidden=32, seed=rank).double(),
            toy.ToyTransformer(hidden=32, seed=0).double(),
        )
        stage = toy.on_grid(model, grid)
        ops = one_f_one_b(p, m).ops[grid["pp"].get_local_rank()]
        worst = 0.0
        for i in range(steps):
            batch = toy.make_batch(8, 16, seed=i)
            stage.zero_grad(), twin.zero_grad()
            toy.grid_step(stage, *batch, ops, m, grid)
            toy.twin_step(twin, *batch)
            with torch.no_grad():
                for q in [*stage.parameters(), *twin.parameters()]:
                    q -= 0.1 * q.grad
        mine = toy.split_depth(toy.split_width(twin, grid["tp"].get_group()), grid["pp"].get_group())
        for a, b in zip(stage.parameters(), mine.parameters()):
            worst = max(worst, ((a - b).norm() / b.norm()).item())
        return worst

    worst = max(world.run(run))
    return f"after {steps} steps every weight of every rank is the twin's: {worst < 1e-12}"


def step_seconds(
    world: World, order: tuple[str, ...], d: int = 2, p: int = 2, t: int = 2, b: int = 8, s: int = 128
) -> float:
    """One step on the world's fabric with the axes placed in this order, outermost first.

    The shortest of a few.
    """

    def run():
        import time

        grid = toy.grid_groups(d, p, t, order)
        stage = toy.on_grid(toy.ToyTransformer(hidden=64, seq_len=s), grid)
        ops = one_f_one_b(p, 2).ops[grid["pp"].get_local_rank()]
        batch = toy.make_batch(b, s)
        current.count_from_here()
        dist.barrier()
        start = time.monotonic()
        toy.grid_step(stage, *batch, ops, 2, grid)
        return time.monotonic() - start

    return shortest(lambda: max(world.run(run)), float)
