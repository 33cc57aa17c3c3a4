"""Functions for the cells of drop 08's notebook; its exercises use some of them."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from drops import lines, measured
from drops.measured import BUSY, Step
from helpers import toy
from helpers.emulate import networks
from helpers.ranks import World, current
from three_axes.count import Traffic, shortest
from three_axes.paper import SCHEDULES, Placement
from three_axes.plan import Job, Layout, find_model, sent
from three_axes.table import Table, human

line = lines.bandwidth  # the reader's, or the course's
AXES = ("pp", "dp", "tp")  # outermost first


def layouts(texts: str) -> list[dict[str, int]]:
    """'pp2 tp4, …' -> [{"pp": 2, "tp": 4}, …]"""
    return [{part[:2]: int(part[2:]) for part in text.split()} for text in texts.split(", ")]


def in_words(sizes: dict[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items()) + ", outermost first,"


# Emulated: a rank sends 20 MB/s inside its node, and 1 MB/s out of it.
NODES = networks.nodes("two nodes of four", 4, 20e6, 1e6)


def by_lines() -> dict[str, float]:
    """Bytes that rank 0 sends along each axis in the notebook's step of 2 × 2 × 2, by the cost model's lines:
    the toy's first two blocks, half of each tensor of them, and half of 8 sequences of 32 tokens.
    """
    h, T, e, parameters = 256, 4 * 32, 4, 870_400
    return {
        "tp": lines.tp_sends(L=2, h=h, T=T, t=2, e=e),
        "dp": lines.all_reduce(e * parameters, 2),
        "pp": lines.stage_sends(h=h, T=T, t=1, e=e),  # both tp ranks have the whole activation
    }


def bandwidths(world: World) -> Table:
    """Bytes a second that an all-reduce reaches, by the line `bandwidth` and measured: over groups of two
    ranks with each distance, and over all eight. The tensors are so large that latency hardly counts.
    """

    def seconds(axis: str, size: int) -> float:
        group = toy.grid_groups(2, 2, 2)[axis].get_group() if axis else None
        x = torch.zeros(size // 4)
        dist.barrier()
        start = time.monotonic()
        dist.all_reduce(x, group=group)
        return time.monotonic() - start

    rows = []
    node, W, R = NODES.gpus_per_node, NODES.intra_node_bandwidth, NODES.inter_node_bandwidth
    groups = (("two side by side", "tp", 2, 1), ("two, 2 apart", "dp", 2, 2), ("two, 4 apart", "pp", 2, 4))
    for name, axis, ranks, stride in (*groups, ("all eight", "", 8, 1)):
        predicted = line(ranks, stride, node, W, R)
        size = int(0.3 * predicted) // 8 * 8
        took = shortest(lambda axis=axis, size=size: max(world.run(seconds, axis, size)), float)
        measured_ = lines.all_reduce(size, ranks) / took
        rows.append([name, f"{predicted / 1e6:.1f} MB/s", f"{measured_ / 1e6:.1f} MB/s"])
    return line.below(Table(["the group", "predicted", "measured"], rows, title="an all-reduce, emulated"))


def by_axis(traffic: Traffic, sizes: dict[str, int], predicted: dict[str, float], rank: int = 0) -> Table:
    """Bytes that `rank` sent along each axis, in three ways: predicted (`by_lines`), counted, on the wire.

    Two ranks share a group of at most one axis, so a byte's receiver determines its axis.
    """
    rows, place = [], Placement(sizes)
    for axis in reversed(sizes):
        counted = sum(row.algorithmic for row in traffic.ranks[rank] if row.axis == axis)
        along = [r for r in range(len(traffic.ranks)) if place.axis_between(rank, r) == axis]
        wire = sum(traffic.matrix[rank][r] for r in along) if traffic.matrix else None
        ratio = "n/a" if wire is None or not predicted[axis] else f"{wire / predicted[axis]:.2f}"
        rows.append([axis, *map(human, (predicted[axis], counted, wire)), ratio])
    columns = ["axis", "predicted", "counted", "on the wire", "wire ÷ predicted"]
    made = Table(columns, rows, title=f"bytes sent by rank {rank}, along each axis")
    return lines.tp_sends.below(made, lines.all_reduce, lines.stage_sends)


def one_step(world: World, sizes: dict[str, int]) -> Step:
    """A step of the toy on the grid, in two microbatches: the bytes that each rank sent, and the bytes
    in its memory.
    """

    def run():
        grid = toy.grid_groups(sizes["dp"], sizes["pp"], sizes["tp"], tuple(sizes))
        stage = toy.on_grid(toy.ToyTransformer(hidden=256), grid)
        ops = SCHEDULES["1F1B"].make(sizes["pp"], 2).ops[grid["pp"].get_local_rank()]
        current.count_from_here()  # making the groups is not counted
        return measured.kept_by(stage, lambda *given: toy.grid_step(*given, ops, 2, grid))

    kept = world.run(run)
    return Step(sizes, world.traffic, kept)


def compare_with_twin(world: World, d: int, p: int, t: int) -> str:
    """A sentence: whether the weights are the same after three steps of SGD on the grid and in one process,
    in float64.
    """

    def run():
        grid = toy.grid_groups(d, p, t)
        twin, model = (toy.ToyTransformer(hidden=32).double() for _ in range(2))
        stage = toy.on_grid(model, grid)
        ops = SCHEDULES["1F1B"].make(p, 2).ops[grid["pp"].get_local_rank()]
        for i in range(3):
            batch = toy.make_batch(8, 16, seed=i)
            stage.zero_grad(), twin.zero_grad()
            toy.grid_step(stage, *batch, ops, 2, grid)
            toy.twin_step(twin, *batch)
            with torch.no_grad():
                for q in [*stage.parameters(), *twin.parameters()]:
                    q -= 0.1 * q.grad
        mine = toy.split_depth(toy.split_width(twin, grid["tp"].get_group()), grid["pp"].get_group())
        pairs = zip(stage.parameters(), mine.parameters())
        return all((a - b).norm() < 1e-12 * b.norm() for a, b in pairs)

    return f"after 3 steps every weight of every rank is the twin's: {all(world.run(run))}"


def of_the_70b() -> str:
    """The bytes that a GPU sends in a step along each axis, in the 70B's layout of drop 14."""
    job = Job(find_model("llama-3-70b"), global_batch=128, seq_len=8192)
    moved = sent(job, Layout(dp=4, tp=8, pp=2, zero=1))
    return ", ".join(f"{axis} {human(moved[axis])}" for axis in sorted(moved, key=moved.get, reverse=True))


def step_seconds(world: World, order: tuple[str, ...]) -> float:
    """Seconds of one step of 2 × 2 × 2 on the world's fabric, the shortest of a few. order: the axes, the
    outermost first.
    """

    def run():
        grid = toy.grid_groups(2, 2, 2, order)
        stage = toy.on_grid(toy.ToyTransformer(hidden=64, seq_len=128), grid)
        ops = SCHEDULES["1F1B"].make(2, 2).ops[grid["pp"].get_local_rank()]
        batch = toy.make_batch(8, 128)
        dist.barrier()
        start = time.monotonic()
        toy.grid_step(stage, *batch, ops, 2, grid)
        return time.monotonic() - start

    return shortest(lambda: max(world.run(run)), float)


def answer(inside: float, outside: float) -> tuple[str, str]:
    """The arguments of `guess.reveal`. inside, outside: a step's seconds with tp innermost, and outermost."""
    times = outside / inside
    spans = {
        "as long as with tp innermost": (0, 1.2),
        "up to twice as long": (1.2, 2.1),
        "more than three times as long": (3, math.inf),
    }
    option = next((name for name, (least, most) in spans.items() if least < times < most), "")
    why = (
        "tp sends in every layer, and every product waits for it. So **tp innermost**: it stays in the node,"
        " or NVLink domain."
    )
    return (option, why) if option else (f"none of these: {times:.1f} times as long", BUSY)
