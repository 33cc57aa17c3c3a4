"""Functions for the cells of drop 03's notebook."""

from __future__ import annotations

import torch

from drops import measured
from drops.measured import Step
from helpers import toy
from helpers.practice import line
from helpers.ranks import World
from three_axes.count import Traffic


def one_and_four() -> dict[str, Step]:
    """A step of tensor parallelism on one rank and on four."""
    return measured.one_and_four("tp", toy.split_width, toy.tensor_parallel_step)


def gradients_match(world: World) -> list[bool]:
    """Whether each rank's gradients of a tensor-parallel step are its slices of one process's, in float64."""

    def compare():
        twin, model = (toy.ToyTransformer(hidden=64).double() for _ in range(2))
        batch = toy.make_batch(8, 16)
        toy.twin_step(twin, *batch)
        toy.tensor_parallel_step(toy.split_width(model), *batch)
        for p in twin.parameters():
            p.data = p.grad  # `split_width` then cuts the gradients as it cuts weights
        pairs = zip(toy.split_width(twin).parameters(), model.parameters())
        return all(torch.allclose(wanted, mine.grad, rtol=1e-9, atol=1e-12) for wanted, mine in pairs)

    return world.run(compare)


def answer(forward: Traffic) -> tuple[str, str]:
    """The arguments of `guess.reveal`: the number of all-reduces in the MLP's forward."""
    why = "The columns that a rank computed are the columns that its rows of down need."
    return str(forward.calls("all_reduce")), why


# Checks the number in the notebook's first code cell: columns of `up` on a rank.
first_line = line(256, "A rank has all 256 rows of 256 columns.", "The ranks share the 1,024 columns evenly.")
