"""One step of the toy under a split, on a World's ranks: what it moved and what each rank keeps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from helpers import toy
from helpers.draw import Split
from helpers.ranks import memory
from helpers.ranks.world import World


def one_step(world: World, sizes: dict[str, int], split: Callable, step: Callable) -> Split:
    """The split that `draw.splits` draws.

    sizes: axis -> ranks, the outermost first; their product is the world's ranks. split: a whole model -> a
    rank's part of it. step: (the part, tokens, targets) -> anything; it leaves gradients. The batch has 8
    sequences of 32 tokens. An optimizer's step by Adam follows, which moves nothing.
    """

    def run():
        part = split(toy.ToyTransformer(hidden=256))
        optimizer = torch.optim.AdamW(part.parameters())
        with memory.saved_activations(part) as held:
            step(part, *toy.make_batch(b=8, s=32))
        optimizer.step()
        return memory.by_kind(part, optimizer, held.peak)

    kept = world.run(run)
    return Split(sizes, world.traffic, kept)


def one_and_four(axis: str, split: Callable, step: Callable) -> dict[str, Split]:
    """The same step on one rank and on four."""
    made = {}
    for n, name in ((1, "one rank"), (4, "four ranks")):
        with World(n) as world:
            made[name] = one_step(world, {axis: n}, split, step)
    return made
