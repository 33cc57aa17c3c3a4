"""Functions for the cells of drop 03's notebook."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from drops import lines, measured
from drops.measured import Step
from helpers import toy
from helpers.ranks import World
from three_axes.table import Table

line, compute_line = lines.tp_sends, lines.compute  # the reader's, or the course's


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


def operations() -> Table:
    """The operations of the matrices in a step on one rank: by the line `compute`, and as PyTorch counts
    them.
    """
    model, batch = toy.ToyTransformer(hidden=256), toy.make_batch(b=8, s=32)
    with FlopCounterMode(display=False) as counter:
        toy.twin_step(model, *batch)
    predicted = compute_line(N=sum(p.numel() for p in model.parameters()), L=0, h=256, s=32, T=8 * 32, C=1)
    counted = counter.get_total_flops()
    rows = [["one", f"{predicted / 1e9:.2f}·10⁹", f"{counted / 1e9:.2f}·10⁹", f"{counted / predicted:.2f}"]]
    columns = ["ranks", "predicted", "counted", "counted ÷ predicted"]
    return compute_line.below(Table(columns, rows, title="operations of the matrices"))


def answer(world: World) -> tuple[str, str]:
    """The arguments of `guess.reveal`: the number of all-reduces in the MLP, forward and backward."""

    def both_ways():
        rank, size = dist.get_rank(), dist.get_world_size()
        x, up, down = torch.ones(8, 16, requires_grad=True), torch.ones(16, 64), torch.ones(64, 16)
        inside = F.gelu(toy.copy_to_tp(x) @ up.chunk(size, dim=1)[rank])
        toy.reduce_from_tp(inside @ down.chunk(size, dim=0)[rank]).sum().backward()

    world.run(both_ways)
    why = (
        "One forward, at *y*, and one backward, at *x*. Between the products nothing is sent: a"
        " rank's rows of `down` need just the columns that it has computed."
    )
    return str(world.traffic.calls("all_reduce")), why
