"""Drop 02, what its cells show: the mean against the sum, and what data parallelism does not save."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .... import toy
from ....runtime import memory
from ....runtime.world import World

# -- what data parallelism does not save ----------------------------------------------------------


def losses(world: World, optimizer: str, combine: str, steps: int = 12) -> list[float]:
    """The mean loss of all ranks, step by step, of data-parallel training on one batch.

    optimizer: "SGD" (rate 0.1) or "AdamW" (rate 0.001). combine: "mean" of the ranks' gradients, or their
    "sum".
    """

    def train():
        model = toy.ToyTransformer(hidden=64)
        update = {"SGD": lambda p: torch.optim.SGD(p, 0.1), "AdamW": lambda p: torch.optim.AdamW(p, 0.001)}[
            optimizer
        ](model.parameters())
        tokens, targets = toy.make_batch(b=8, s=32)
        curve = []
        for _ in range(steps):
            model.zero_grad()
            curve.append(toy.data_parallel_step(model, tokens, targets))
            if combine == "sum":
                for p in model.parameters():
                    p.grad *= dist.get_world_size()
            update.step()
        return curve

    return [sum(step) / len(step) for step in zip(*world.run(train))]


def memory_on(n: int, b: int = 8, s: int = 32) -> dict[str, int]:
    """Bytes by kind that rank 0 of n really holds in one data-parallel step with Adam."""

    def step():
        model = toy.ToyTransformer(hidden=256)
        optimizer = torch.optim.AdamW(model.parameters())
        rank, size = dist.get_rank(), dist.get_world_size()
        tokens, targets = (toy.my_share(x, rank, size) for x in toy.make_batch(b, s))
        with memory.saved_activations(model) as held:
            loss = toy.loss_of(model(tokens), targets)
        loss.backward()
        toy.average_gradients(model)
        optimizer.step()
        return memory.by_kind(model, optimizer, held.peak)

    with World(n) as world:
        return world.run(step)[0]
