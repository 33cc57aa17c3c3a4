"""Functions for the cells of drop 02's notebook."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from drops import measured
from drops.measured import Step
from helpers import toy
from helpers.practice import line
from helpers.ranks import World

OPTIMIZERS = {"SGD": (torch.optim.SGD, 0.1), "AdamW": (torch.optim.AdamW, 0.001)}  # name -> (class, rate)


def losses(world: World, optimizer: str, combine: str, steps: int = 12) -> list[float]:
    """The ranks' mean loss in each step of data-parallel training on one batch.

    optimizer: "SGD" or "AdamW". combine: "mean" of the ranks' gradients, or their "sum".
    """

    def train():
        model, (kind, rate) = toy.ToyTransformer(hidden=64), OPTIMIZERS[optimizer]
        update = kind(model.parameters(), rate)
        curve = []
        for _ in range(steps):
            model.zero_grad()
            curve.append(toy.data_parallel_step(model, *toy.make_batch()))
            if combine == "sum":
                for p in model.parameters():
                    p.grad *= dist.get_world_size()
            update.step()
        return curve

    return [sum(step) / len(step) for step in zip(*world.run(train))]


def twin_after(steps: int) -> tuple[torch.nn.Module, float]:
    """The toy after one or more steps of plain SGD on the whole batch in one process, and the last loss."""
    twin = toy.ToyTransformer(hidden=256, seed=0)
    for _ in range(steps):
        twin.zero_grad()
        loss = toy.twin_step(twin, *toy.make_batch(b=8, s=32))
        for p in twin.parameters():
            p.data -= 0.1 * p.grad
    return twin, loss


def sent_in_all_reduce(world: World, megabytes: float) -> float:
    """Megabytes that a rank sends in an all-reduce of `megabytes`: on the wire, or counted where the system
    does not count the wire.
    """

    def run():
        dist.all_reduce(torch.ones(round(megabytes * 250_000)))

    world.run(run)
    return (world.traffic.wire[0] or world.traffic.counted[0]) / 1e6


def one_and_four() -> dict[str, Step]:
    """A step of data parallelism on one rank and on four."""
    return measured.one_and_four("dp", lambda model: model, toy.data_parallel_step)


def answer(sent: float, options: Sequence[str]) -> tuple[str, str]:
    """The arguments of `guess.reveal`. sent: megabytes that a rank sent to all-reduce 1 MB."""
    fits = (option for option in options if option.startswith(f"{sent:.2f}·S"))
    why = (
        f"14 steps of *S*/8: for a tensor of 1 MB a rank sent {sent:.2f} MB. On *d* ranks it is"
        " 2(*d*−1)/*d* · *S*. The factor never reaches 2, however many ranks you add. That is why data"
        " parallelism scales."
    )
    return next(fits, f"none of these: {sent:.2f}·S"), why


# Checks the number in the notebook's first code cell: examples of a rank.
first_line = line(2, "Each rank has 2 of the 8, and all of the model.", "The ranks share the batch evenly.")
