"""Drop 03, what its cells show: what a rank holds, and whether its gradients are the twin's."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .... import toy
from ....runtime import memory
from ....runtime.world import World


def memory_on(t: int, b: int = 8, s: int = 32) -> dict[str, int]:
    """Bytes by kind that rank 0 of t really holds in one tensor-parallel step with Adam."""

    def step():
        model = toy.split_width(toy.ToyTransformer(hidden=256))
        optimizer = torch.optim.AdamW(model.parameters())
        tokens, targets = toy.make_batch(b, s)
        with memory.saved_activations(model) as held:
            loss = toy.loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return memory.by_kind(model, optimizer, held.peak)

    with World(t) as world:
        return world.run(step)[0]


def gradients_match(world: World) -> list[bool]:
    """Whether each rank's gradients of a tensor-parallel step are its slices of the twin's, to float64's
    digits.
    """

    def compare():
        twin, batch = toy.ToyTransformer(hidden=64).double(), toy.make_batch(8, 16)
        toy.twin_step(twin, *batch)
        model = toy.ToyTransformer(hidden=64, seed=dist.get_rank()).double()
        toy.share_weights(model)
        toy.split_width(model)
        toy.tensor_parallel_step(model, *batch)
        rank, size = dist.get_rank(), dist.get_world_size()
        same = []
        for (name, whole), mine in zip(twin.named_parameters(), model.parameters()):
            part = whole.grad
            if whole.shape != mine.shape:
                part = part.chunk(size, 0 if any(f".{c}." in name for c in ("q", "k", "v", "up")) else 1)[
                    rank
                ]
            same.append(torch.allclose(part, mine.grad, rtol=1e-9, atol=1e-12))
        return all(same)

    return world.run(compare)
