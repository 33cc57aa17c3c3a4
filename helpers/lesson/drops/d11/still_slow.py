"""Drop 11: the right layout, and slow all the same: three clusters that are ill, and a step's own traces."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from .... import toy
from ....explain import Explained
from ....runtime.uplink import Oversubscribed
from ....runtime.world import World
from ....table import Table
from .shown import BATCH, NODES, TOKENS, Measured, measure

SLOW_RANK = 5  # computes at half the speed
TCP = replace(
    NODES, name="through TCP", inter_node_bandwidth=NODES.inter_node_bandwidth / 4, inter_node_latency=1e-2
)
FOUR_TO_ONE = Oversubscribed(
    **{**vars(NODES), "name": "four ports to one", "uplink_bandwidth": NODES.inter_node_bandwidth}
)
NETWORKS = {"healthy": NODES, "TCP": TCP, "switch": FOUR_TO_ONE}


def ill() -> dict[str, Measured]:
    """A step of DP 2 · TP 4 on a healthy cluster and on three that are not."""
    return {
        "healthy": measure(2, 4, 1),
        "slow rank": measure(2, 4, 1, slow=SLOW_RANK),
        **{name: measure(2, 4, 1, network=NETWORKS[name]) for name in ("TCP", "switch")},
    }


def beyond_healthy(steps: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """For each ill cluster: the healthy step, and what each part has beyond it. They sum to its step."""
    healthy = steps["healthy"]
    return {
        name: {"healthy": healthy.seconds}
        | {part: step.parts[part] - healthy.parts[part] for part in ("tp", "dp", "rest")}
        for name, step in steps.items()
        if step is not healthy
    }


def stood_still(steps: dict[str, Measured]) -> Table:
    """Milliseconds that each rank waited for others or for the network, in one step."""
    rows = [
        [name, *(f"{1e3 * sum(rank.values()):.0f}" for rank in step.waited)] for name, step in steps.items()
    ]
    return Table(
        ["cluster", *(f"rank {r}" for r in range(8))], rows, title="ms that each rank stood still in a step"
    )


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

        takes(2, True)  # connections are made
        return [min(takes(*how) for _ in range(3)) for how in ((2, False), (LARGE, False), (LARGE, True))]

    seconds = {}
    for name, network in NETWORKS.items():
        with World(8, fabric=network, timeout=60) as world:
            seconds[name] = tuple(max(column) for column in zip(*world.run(sends)))
    return seconds


def bandwidths(seconds: dict[str, tuple[float, float, float]]) -> Table:
    """What `alone_and_together` found, as a table."""
    rows = [[name, *(f"{1e3 * s:.0f} ms" for s in row)] for name, row in seconds.items()]
    return Table(["network", "8 bytes", "200 kB, one pair alone", "200 kB, four pairs at once"], rows)


# -- the reader's own ----------------------------------------------------------------------------

STEPS, SLOW_READER = 3, 2


def record(folder: str) -> str:
    """On a rank: write a trace of three steps of DDP to the folder, and return its file. One rank is slow to
    prepare its examples.
    """
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "6"
    )  # without, the profiler prints a line at each start and stop
    rank = dist.get_rank()
    model = DistributedDataParallel(toy.ToyTransformer(seed=0, hidden=64, heads=8, seq_len=TOKENS))
    optimizer = torch.optim.AdamW(model.parameters())
    file = os.path.join(folder, f"rank{rank}.json.gz")
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(file),
    ) as recorded:
        for step in range(1 + STEPS):
            if rank == SLOW_READER:
                time.sleep(0.2)
            ids, targets = toy.make_batch(BATCH, TOKENS, seed=step)
            toy.loss_of(model(ids), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorded.step()
    return file


def own_waterfall(explained: Explained, *ranks: int) -> dict[str, dict[str, float]]:
    """A step of each of these ranks, part by part, from its trace."""
    return {
        f"rank {split.rank}": {part: seconds / split.steps for part, seconds in split.parts.items()}
        for split in explained.splits
        if split.rank in ranks
    }
