"""Functions for the cells of drop 01's notebook, and constants that its exercises use too."""

from __future__ import annotations

from drops import measured
from drops.measured import Step
from helpers import toy
from helpers.practice import line
from helpers.ranks import World
from three_axes.count import Traffic
from three_axes.table import human

# Name -> (function that takes the model and returns a rank's part of it, function that runs a step)
SCHEMES = {
    "tensor": (toy.split_width, toy.tensor_parallel_step),
    "data": (lambda model: model, toy.data_parallel_step),
    "pipeline": (toy.split_depth, toy.pipeline_step),
}
AXES = {"data": "dp", "tensor": "tp", "pipeline": "pp"}


def three_cuts(world: World) -> dict[str, Step]:
    """One step of each scheme: the bytes that ranks sent, and the bytes that each rank keeps."""
    return {name: measured.one_step(world, {AXES[name]: world.n}, *SCHEMES[name]) for name in AXES}


def answer(runs: dict[str, tuple[Traffic, float]]) -> tuple[str, str]:
    """The arguments of `guess.reveal`. runs: scheme -> (its traffic, the bytes predicted for a rank)."""
    most = max(runs, key=lambda name: max(runs[name][0].counted))
    gradients, activation = runs["data"][1] / 1.5, runs["tensor"][1] / 1.5 / 16  # 1.5: 2·(n−1)/n, n = 4
    return most, (
        f"The gradients are {human(gradients)}. The activations of so small a batch are {human(activation)},"
        " in each of 16 all-reduces."
    )


# Checks the number in the notebook's first code cell: megabytes of all gradients of the toy.
first_line = line(
    13.2,
    "3,297,792 · 4 bytes are 13.2 MB. Soon you see how often they travel.",
    "Multiply the parameters by 4, and divide by a million.",
)
