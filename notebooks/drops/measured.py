"""One step of the toy under a split, on a World's ranks: what it moved and what each rank keeps."""

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

BUSY = "Your machine was busy. Run the cells again."  # where what was measured cannot be


class Step(NamedTuple):
    """What `draw.splits` draws: axis -> ranks, the outermost first; what moved; each rank's bytes by kind."""

    sizes: dict[str, int]
    traffic: Traffic
    kept: list[dict[str, int]]


def one_step(world: World, sizes: dict[str, int], split: Callable, step: Callable) -> Step:
    """One step, for `draw.splits`.

    sizes: axis -> ranks, the outermost first; their product is the world's ranks. split: a whole model -> a
    rank's part of it. step: (the part, tokens, targets) -> anything; it leaves gradients. The batch has 8
    sequences of 32 tokens. An optimizer's step by Adam follows, which moves nothing.
    """

    def run():
        return kept_by(split(toy.ToyTransformer(hidden=256)), step)

    kept = world.run(run)
    return Step(sizes, world.traffic, kept)


def kept_by(part: torch.nn.Module, step: Callable) -> dict[str, int]:
    """On a rank: its bytes by kind in one step, `one_step`'s, of a part that it holds."""
    optimizer = torch.optim.AdamW(part.parameters())
    with memory.saved_activations(part) as held:
        step(part, *toy.make_batch(b=8, s=32))
    optimizer.step()
    return memory.by_kind(part, optimizer, held.peak)


def one_and_four(axis: str, split: Callable, step: Callable) -> dict[str, Step]:
    """One step, on one rank and on four."""
    made = {}
    for n, name in ((1, "one rank"), (4, "four ranks")):
        with World(n) as world:
            made[name] = one_step(world, {axis: n}, split, step)
    return made


def product_speed() -> float:
    """FLOP/s of a float32 matrix product on rank 0, while the others wait.

    It is made large enough to take 10 ms.
    """
    device, n, seconds = current.rank.device, 512, 0.0
    while dist.get_rank() == 0 and seconds < 0.01:
        n *= 2
        a = torch.randn(n, n, device=device)
        seconds = min(devices.seconds_of(lambda: a @ a, device) for _ in range(5))
    dist.barrier()
    return 2 * n**3 / seconds if seconds else 0.0


def reduce_speed() -> float:
    """The busbw of an all-reduce of 16 MB over all ranks, in bytes/s: what a rank must send by the book, over
    the seconds of the fastest of five. Every rank calls it.
    """
    tensor = torch.zeros(4_000_000, device=current.rank.device)
    seconds = min(devices.seconds_of(lambda: dist.all_reduce(tensor), tensor.device) for _ in range(5))
    return by_hand.all_reduce_bytes(4 * tensor.numel(), dist.get_world_size()) / seconds
