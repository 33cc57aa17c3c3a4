"""Drop 05, what its cells show: a data-parallel step on the clock, with and without overlap."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .... import toy
from ....runtime import current
from ....runtime.clock import Timeline, shortest, span
from ....runtime.traffic import Traffic
from ....runtime.world import World
from ....theory.hardware import Network

# Emulated: four machines with one rank each, on 100 Mb/s Ethernet. Compute is emulated too, 20 and 40 ms a
# block.
NETWORK = Network(
    name="100 Mb/s Ethernet", gpus_per_node=1, inter_node_bandwidth=12.5e6, inter_node_latency=0.2e-3
)
FORWARD, BACKWARD = 0.020, 0.040
BUCKET = 100_000


def paced_model() -> toy.ToyTransformer:
    """The toy with hidden 64, whose blocks take as long as if each rank had a device of its own."""
    model = toy.ToyTransformer(hidden=64, seed=0)
    for block in model.blocks:
        toy.pace(block, FORWARD, BACKWARD)
    return model


def step(model, average, optimizer, batch) -> None:
    """One step with its parts on the clock. average(): what is left to do after backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, targets = (toy.my_share(t, rank, size) for t in batch)
    with span("F"):
        loss = toy.loss_of(model(tokens), targets)
    with span("B"):
        loss.backward()
    average()
    with span("step"):
        optimizer.step()
        optimizer.zero_grad()


def _trace(how: str) -> None:
    model = paced_model()
    average = lambda: None
    if how == "after":
        average = lambda plain=model: toy.average_gradients(plain)
    elif how == "buckets":
        average = toy.overlap_gradients(model, BUCKET)
    elif how == "DDP":
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(3):  # DDP makes its buckets after the first step
        current.count_from_here()  # the last step only
        dist.barrier()
        step(model, average, optimizer, toy.make_batch(16, 16, seed=i))


def trace(world: World, how: str) -> tuple[Timeline, Traffic]:
    """A data-parallel step on the clock, and its bytes: the shortest of a few.

    how: 'alone' (nothing is sent), 'after' backward, in 'buckets' under it, or PyTorch's 'DDP'.
    """

    def once():
        world.run(_trace, how)
        return world.timeline, world.traffic

    return shortest(once, lambda pair: pair[0].makespan)


def exposed(timeline: Timeline, alone: Timeline) -> float:
    """Seconds by which communication makes a step longer than the same step without."""
    return timeline.makespan - alone.makespan
