"""Drop 11's emulated cluster: a step of the toy on nodes of four, measured axis by axis; on a healthy
cluster, and with three faults.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from helpers import toy
from helpers.emulate import Oversubscribed, networks
from helpers.ranks import World, current, span
from three_axes.count import Timeline, shortest
from three_axes.paper import SCHEDULES
from three_axes.table import Table

AXES = ("tp", "pp", "dp")

# Emulated: a rank sends 20 MB/s inside its node, and 2.5 MB/s out of it. Compute is emulated too.
NODES = networks.nodes("nodes of four", 4, 20e6, 2.5e6, 1e-3)
WORK = 0.040  # seconds of one block's forward for one sequence on one device; backward takes twice that
BATCH, TOKENS = 8, 64
SIZES = dict(hidden=64, heads=8, seq_len=TOKENS)


@dataclass
class Measured:
    """One step on real ranks. seconds: its length. parts: the seconds that the mean rank spent on each part;
    they sum to the length.

    The parts are compute; tp, pp and dp: waiting for that axis (pp has the bubble and the sends); rest:
    PyTorch and Python.
    """

    layout: tuple[int, int, int, int]  # d, t, p, m
    seconds: float
    parts: dict[str, float]
    timeline: Timeline
    waited: list[dict[str, float]]  # of each rank: seconds that it waited for tp, pp and dp

    @property
    def sequences_per_second_per_rank(self) -> float:
        d, t, p, _ = self.layout
        return BATCH / self.seconds / (d * t * p)


def undivided(d: int, t: int, p: int, m: int) -> str:
    """A sentence on what the sizes do not divide; '' if they divide everything."""
    if not (BATCH % (d * m) or SIZES["heads"] % t or 4 % p):
        return ""
    return (
        f"d = {d}, t = {t}, p = {p}, m = {m}: d·m must divide the batch of {BATCH} sequences (it is"
        f" {d * m}), t the {SIZES['heads']} heads, p the 4 blocks"
    )


def measure(
    d: int = 1, t: int = 1, p: int = 1, m: int = 1, network: networks.Network = NODES, slow: int | None = None
) -> Measured:
    """One step of the toy on d·t·p real ranks of the emulated cluster, tp innermost; the shortest of a few.
    The batch is always 8 sequences. slow: a rank that computes at half the speed.

    Raises ValueError if the sizes do not divide.
    """
    if reason := undivided(d, t, p, m):
        raise ValueError(reason)

    def run():
        grid = toy.grid_groups(d, p, t)
        stage = toy.on_grid(toy.ToyTransformer(seed=0, **SIZES), grid)
        forward = WORK * BATCH / (d * m) / t * (2 if dist.get_rank() == slow else 1)
        for block in stage:
            if isinstance(block, toy.Block):
                toy.pace(block, forward, 2 * forward)
        ops = SCHEDULES["1F1B"].make(p, m).ops[grid["pp"].get_local_rank()]
        batch = toy.make_batch(BATCH, TOKENS)
        for group in ("dp", "pp", "tp"):
            dist.barrier(grid[group].get_group())  # connections are made before the clock runs
        current.count_from_here()
        dist.barrier()
        with span("busy"):
            toy.grid_step(stage, *batch, ops, m, grid)

    with World(d * t * p, fabric=network, timeout=60) as world:

        def once():
            world.run(run)
            return _parts((d, t, p, m), world.timeline)

        return shortest(once, lambda step: step.seconds)


def _parts(layout: tuple, timeline: Timeline) -> Measured:
    d, t, p, _ = layout
    busy = [next(s for s in row if s.kind == "busy") for row in timeline.rows]
    seconds = max(s.end for s in busy) - min(s.start for s in busy)
    waits = [
        [s for s in row if s.kind == "wait" and s.start >= step.start]
        for row, step in zip(timeline.rows, busy)
    ]
    still = lambda mine, axis: sum(s.end - s.start for s in mine if s.label.split()[1] == axis)
    waited = [{axis: still(mine, axis) for axis in AXES} for mine in waits]
    mean = {axis: sum(rank[axis] for rank in waited) / len(waited) for axis in AXES}
    compute = 12 * WORK * BATCH / (d * t * p)  # four blocks, 1 + 2 each
    rest = seconds - compute - sum(mean.values())
    return Measured(layout, seconds, {"compute": compute, **mean, "rest": rest}, timeline, waited)


def lost(before: Measured, after: Measured) -> dict[str, float]:
    """Seconds of a step beyond perfect scaling, by cause.

    With the batch unchanged, perfect scaling divides every part by the ratio of ranks.
    """
    ratio = len(before.timeline.rows) / len(after.timeline.rows)
    beyond = {part: after.parts[part] - ratio * before.parts[part] for part in (*AXES, "rest")}
    return {"ideal": ratio * before.seconds} | beyond


# -- for the cells: three clusters with a fault, on which the right layout is slow ---------------------

SLOW_RANK = 5  # computes at half the speed
TCP = replace(
    NODES, name="through TCP", inter_node_bandwidth=NODES.inter_node_bandwidth / 4, inter_node_latency=1e-2
)
FOUR_TO_ONE = Oversubscribed(
    **{**vars(NODES), "name": "four ports to one", "uplink_bandwidth": NODES.inter_node_bandwidth}
)
NETWORKS = {"healthy": NODES, "TCP": TCP, "switch": FOUR_TO_ONE}


def ill() -> dict[str, Measured]:
    """A step of DP 2 · TP 4 on a healthy cluster, and on three clusters with a fault."""
    return {
        "healthy": measure(2, 4, 1),
        "slow rank": measure(2, 4, 1, slow=SLOW_RANK),
        **{name: measure(2, 4, 1, network=NETWORKS[name]) for name in ("TCP", "switch")},
    }


def beyond_healthy(steps: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """For each cluster with a fault: the healthy step, and each part's seconds beyond it. They sum to its
    step.
    """
    healthy = steps["healthy"]
    beyond = lambda step: {part: step.parts[part] - healthy.parts[part] for part in ("tp", "dp", "rest")}
    return {
        name: {"healthy": healthy.seconds} | beyond(step)
        for name, step in steps.items()
        if step is not healthy
    }


def stood_still(steps: dict[str, Measured]) -> Table:
    """Milliseconds that each rank waited for others or for the network, in one step."""
    rows = [
        [name, *(f"{1e3 * sum(rank.values()):.0f}" for rank in step.waited)] for name, step in steps.items()
    ]
    columns = ["cluster", *(f"rank {r}" for r in range(8))]
    return Table(columns, rows, title="ms that each rank stood still in a step")


LARGE = 50_000  # float32 numbers: 200 kB


def alone_and_together() -> dict[str, tuple[float, float, float]]:
    """Seconds of an all-reduce between two nodes, on each network: 8 bytes; 200 kB by one pair of ranks while
    the others are silent; 200 kB by all four pairs at once.
    """

    def sends():
        pairs = [dist.new_group([r, r + 4]) for r in range(4)]
        mine = dist.get_rank() % 4

        def takes(elements: int, everybody: bool) -> float:
            x = torch.ones(elements)
            dist.barrier()
            start = time.monotonic()
            if everybody or mine == 0:
                dist.all_reduce(x, group=pairs[mine])
            return time.monotonic() - start

        takes(2, True)  # a warm-up, which makes the connections
        return [min(takes(*how) for _ in range(3)) for how in ((2, False), (LARGE, False), (LARGE, True))]

    seconds = {}
    for name, network in NETWORKS.items():
        with World(8, fabric=network, timeout=60) as world:
            seconds[name] = tuple(max(column) for column in zip(*world.run(sends)))
    return seconds


def bandwidths(seconds: dict[str, tuple[float, float, float]]) -> Table:
    """The seconds that `alone_and_together` returned, as a table."""
    rows = [[name, *(f"{1e3 * s:.0f} ms" for s in row)] for name, row in seconds.items()]
    return Table(["network", "8 bytes", "200 kB, one pair alone", "200 kB, four pairs at once"], rows)
