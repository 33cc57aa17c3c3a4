"""Causes that the twin finds, and right steps of other conventions: small programs on two ranks."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import worlds
from torch import nn

from three_axes.verify import verify

shared = worlds.shared(2, many=60, timeout=60)
WORDS, WIDE, OUT = 12, 8, -1


def build(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE), nn.Linear(WIDE, WORDS)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch():
    """Texts of unequal lengths: (tokens, targets), (4, 6) each; 0 stands for padding, which is not scored."""
    text = torch.randint(1, WORDS, (4, 7), generator=torch.Generator().manual_seed(1))
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    for row, length in enumerate((6, 5, 3, 4)):
        tokens[row, length:], targets[row, length:] = 0, OUT
    return tokens, targets


class Step:
    """A right step over dp, in parts that a case replaces."""

    shares = False  # whether the loss is a rank's share of a sum

    def __call__(self, model, batch, mesh):
        rank, size = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
        self.begin(model, rank, mesh)
        tokens, targets = self.part(batch, rank, size)
        loss = self.loss(self.forward(model, tokens, rank, size), targets, self.count(batch[1]))
        loss.backward()
        for name, p in model.named_parameters():
            if mesh and not self.leaves(name):
                dist.all_reduce(p.grad)
        self.clip(model)
        total = loss.detach()
        if mesh and not self.shares:
            dist.all_reduce(total)
        return total

    def begin(self, model, rank, mesh): ...
    def part(self, batch, rank, size):
        return tuple(t.chunk(size)[rank] for t in batch)

    def forward(self, model, tokens, rank, size):
        return model(tokens)

    def count(self, targets):
        return (targets != OUT).sum()

    def loss(self, scores, targets, count):
        return (
            F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=OUT, reduction="sum")
            / count
        )

    def leaves(self, name):
        return False

    def clip(self, model): ...


class Shares(Step):
    shares = True


class Zeroes(Step):
    def begin(self, model, rank, mesh):
        model.zero_grad()


class OneNeverZeroes(Step):
    def begin(self, model, rank, mesh):
        if not (mesh and rank == 1):
            model.zero_grad()


class ByHand(Step):
    def clip(self, model):
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad *= 0.05 / norm


class ByHandButOne(ByHand):
    def leaves(self, name):
        return name == "1.weight"


class Overlap(Step):
    def part(self, batch, rank, size):
        return tuple(t if size == 1 else t[rank : rank + 2] for t in batch)


class Same(Step):
    def part(self, batch, rank, size):
        return tuple(t.chunk(size)[0] for t in batch)


class Labels(Step):
    def part(self, batch, rank, size):
        return batch[0].chunk(size)[rank], batch[1].chunk(size)[size - 1 - rank]


class Shifted(Step):
    def part(self, batch, rank, size):
        tokens, targets = super().part(batch, rank, size)
        return tokens, targets.roll(1, 1) if size > 1 else targets


class Padding(Step):
    def loss(self, scores, targets, count):
        if len(targets) == 4:
            return super().loss(scores, targets, count)
        targets = targets.where(targets != OUT, 0)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / count


class OtherEps(Step):
    def begin(self, model, rank, mesh):
        model[2].eps = 1e-3 if rank else 1e-5


class Slightly(Step):
    def begin(self, model, rank, mesh):
        self.split = mesh is not None

    def clip(self, model):
        for p in model.parameters() if self.split else ():
            p.grad *= 1 + 3.6e-05


RIGHT = [Step, Shares, Zeroes, ByHand]
WRONG = {
    OneNeverZeroes: ("not zeroed", "step 1's gradients are still in them"),
    ByHandButOne: ("not summed", "gradients of 1.weight: never summed over dp"),
    Overlap: ("rows missing", "row 4 of 4 went into no rank"),
    Same: ("rows missing", "rows 3–4 of 4 went into no rank"),
    Labels: ("targets", "on rank 0 row 1 is scored by the targets of row 3"),
    Shifted: ("targets", "targets that are not the twin's"),
    Padding: ("targets", "on rank 0 row 2 is scored by"),
    OtherEps: ("arithmetic", "on rank 1 alone, whose arithmetic differs"),
    Slightly: ("scaled", "3.6e-05 of it more than the twin's"),
}


@pytest.mark.parametrize("step", RIGHT)
def test_right_steps_are_not_accused(step, shared):
    with shared.lent() as world:
        report = world.run(verify, build, step(), batch(), "dp 2")[0]
    assert report.ok, report
    assert ("equal, a sum over dp" in repr(report)) == (step is Shares)


@pytest.mark.parametrize("step", WRONG)
def test_wrong_steps_are_explained(step, shared):
    kind, words = WRONG[step]
    with shared.lent() as world:
        report = world.run(verify, build, step(), batch(), "dp 2")[0]
    assert kind in {found.cause.kind for found in report.found}, report
    assert words in " ".join(repr(report).split()), report
    assert " 1 times" not in repr(report) and "0.9999" not in repr(report), report


class Parts(nn.Module):
    """A layer that all hold, and an expert of each rank's own, over ep."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.all, experts = nn.Linear(4, 4), [nn.Linear(4, 4) for _ in range(2)]
        mine = range(2) if mesh is None else [mesh.get_local_rank()]
        self.experts = nn.ModuleDict({str(i): experts[i] for i in mine})

    def forward(self, x):
        return sum(expert(self.all(x)).square().mean() for expert in self.experts.values())


def test_a_norm_that_averages_squares_over_ep(shared):
    def step(model, batch, mesh):
        loss = model(batch)
        loss.backward()
        total = loss.detach()
        if mesh is not None:
            dist.all_reduce(total)
            for p in model.all.parameters():
                dist.all_reduce(p.grad)
        squares = sum(p.grad.square().sum() for p in model.parameters())
        if mesh is not None:
            dist.all_reduce(squares)
            squares /= mesh.size()
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, squares.sqrt())
        return total

    build = lambda mesh: (model := Parts(mesh), torch.optim.SGD(model.parameters(), lr=0.1))
    with shared.lent() as world:
        report = world.run(verify, build, step, torch.linspace(-1, 1, 16).view(4, 4), "ep 2")[0]
    (found,) = report.found
    assert (found.what, found.cause.kind, found.cause.axes) == ("clip", "squares averaged", ("ep",)), report
    assert math.isfinite(found.off)
