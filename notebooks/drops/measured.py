"""Runs one step of the toy, the course's small model, split over ranks: what ranks sent, what each rank
keeps. Measures the speed of a matrix product and of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from helpers import toy
from helpers.ranks import World, current, memory
from three_axes import devices
from three_axes.count import Traffic
from three_axes.paper import by_hand

BUSY = "Your machine was busy. Run the cells again."  # printed if the measured numbers are not plausible


class Step(NamedTuple):
    """What `helpers.draw.splits` draws of a step. sizes: axis -> ranks, the outermost first. traffic: what
    the ranks sent. kept: each rank's bytes by kind.
    """

    sizes: dict[str, int]
    traffic: Traffic
    kept: list[dict[str, int]]


def one_step(world: World, sizes: dict[str, int], split: Callable, step: Callable) -> Step:
    """Run one step on the ranks of a World.

    sizes: axis -> ranks, the outermost first; their product is the number of ranks. split(model) returns a
    rank's part of the model. step(part, tokens, targets) runs forward and backward, and leaves the gradients
    in the part. The batch has 8 sequences of 32 tokens. A step of AdamW follows, which sends nothing.
    """

    def run():
        return kept_by(split(toy.ToyTransformer(hidden=256)), step)

    kept = world.run(run)
    return Step(sizes, world.traffic, kept)


def kept_by(part: torch.nn.Module, step: Callable) -> dict[str, int]:
    """On a rank: run the step of `one_step` on its part of the model. Returns the bytes it keeps, by kind."""
    optimizer = torch.optim.AdamW(part.parameters())
    with memory.saved_activations(part) as held:
        step(part, *toy.make_batch(b=8, s=32))
    optimizer.step()
    return memory.by_kind(part, optimizer, held.peak)


def one_and_four(axis: str, split: Callable, step: Callable) -> dict[str, Step]:
    """The step of `one_step` on one rank and on four, which are split along `axis`."""
    made = {}
    for n, name in ((1, "one rank"), (4, "four ranks")):
        with World(n) as world:
            made[name] = one_step(world, {axis: n}, split, step)
    return made


def product_speed(dtype: torch.dtype = torch.float32) -> float:
    """FLOP/s of a matrix product on rank 0, while the others wait; they return 0. The matrices grow until a
    product takes 10 ms.
    """
    device, n, seconds = current.rank.device, 512, 0.0
    while dist.get_rank() == 0 and seconds < 0.01:
        n *= 2
        a = torch.randn(n, n, device=device, dtype=dtype)
        seconds = min(devices.seconds_of(lambda: a @ a, device) for _ in range(5))
    dist.barrier()
    return 2 * n**3 / seconds if seconds else 0.0


def reduce_speed() -> float:
    """The bus bandwidth of an all-reduce of 16 MB over all ranks, in bytes/s: the bytes that a rank must send
    in a ring, divided by the seconds of the fastest of five. Every rank calls it.
    """
    tensor = torch.zeros(4_000_000, device=current.rank.device)
    seconds = min(devices.seconds_of(lambda: dist.all_reduce(tensor), tensor.device) for _ in range(5))
    return by_hand.all_reduce_bytes(4 * tensor.numel(), dist.get_world_size()) / seconds
