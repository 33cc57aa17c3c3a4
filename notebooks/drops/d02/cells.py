"""Functions for the cells of drop 02's notebook."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from drops import lines, measured
from drops.formulas import TOY
from helpers import toy
from helpers.ranks import World
from three_axes.count import Traffic
from three_axes.table import Table, human

line = lines.all_reduce  # the reader's, or the course's
GRADIENTS = 4 * TOY  # bytes of the toy's gradients
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


def sent_in_all_reduce(ranks: int) -> Traffic:
    """What the ranks send in an all-reduce of the toy's gradients."""

    def run():
        dist.all_reduce(torch.ones(GRADIENTS // 4))

    with World(ranks) as world:
        world.run(run)
        return world.traffic


def table(sent: dict[int, Traffic]) -> Table:
    """The bytes of rank 0 in three ways. sent: number of ranks -> what they sent."""
    rows = [traffic.against(line(GRADIENTS, n)).rows[0][1:] for n, traffic in sent.items()]
    columns = ["ranks", "predicted", "counted", "on the wire", "wire ÷ predicted"]
    title = f"bytes sent by rank 0, to sum {human(GRADIENTS)}"
    return line.below(Table(columns, [[str(n), *row] for n, row in zip(sent, rows)], title=title))


def kept() -> Table:
    """What each rank keeps of a step of AdamW on 8 sequences, on 1, 2, 4 and 8 ranks."""
    rows = []
    for n in (1, 2, 4, 8):
        with World(n) as world:
            held = measured.one_step(world, {"dp": n}, lambda model: model, toy.data_parallel_step).kept[0]
        model, adam, activations = (
            sum(held[kind] for kind in kinds)
            for kinds in (("parameters", "gradients"), ("optimizer",), ("activations",))
        )
        rows.append([str(n), *map(human, (model, adam, activations, model + adam + activations))])
    columns = ["ranks", "weights, gradients", "Adam's numbers", "activations", "together"]
    return Table(columns, rows, title="kept by each rank in one step on 8 sequences")


def answer(sent: Traffic, options: Sequence[str]) -> tuple[str, str]:
    """The arguments of `guess.reveal`. sent: what eight ranks sent in an all-reduce of the gradients."""
    times = f"{(sent.wire[0] or sent.counted[0]) / GRADIENTS:.2f}·S"
    fits = (option for option in options if option.startswith(times))
    why = (
        "14 steps of *S*/8. On *d* ranks it is 2(*d*−1)/*d* · *S*. The factor never reaches 2, however many"
        " ranks you add. That is why data parallelism scales."
    )
    return next(fits, f"none of these: {times}"), why
