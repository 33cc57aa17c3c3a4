"""Causes that `verify` finds by comparing with the whole model on one rank, and unusual right steps."""

import math

import pytest
import torch
import torch.distributed as dist
import worlds
from torch import nn

from drops import b5
from three_axes.verify import verify

shared_world = worlds.shared(2, many=60, timeout=60)
WORDS, WIDE, OUT = 12, 8, -1  # OUT: the target of padding, which has no loss


def build(mesh):
    """A small language model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE), nn.Linear(WIDE, WORDS)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch():
    """(tokens, targets), (4, 6) each, of texts with different lengths. 0 is padding, which has no loss."""
    text = torch.randint(1, WORDS, (4, 7), generator=torch.Generator().manual_seed(1))
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    for row, length in enumerate((6, 5, 3, 4)):
        tokens[row, length:], targets[row, length:] = 0, OUT
    return tokens, targets


STEP = f"""
import torch
import torch.distributed as dist
import torch.nn.functional as F

OUT = {OUT}

def step(model, batch, mesh):
    rank, size = (mesh.get_local_rank(), mesh.size()) if mesh else (0, 1)
    tokens, targets = (t.chunk(size)[rank] for t in batch)
    scores, count = model(tokens).flatten(0, 1), (batch[1] != OUT).sum()
    loss = F.cross_entropy(scores, targets.flatten(), ignore_index=OUT, reduction="sum") / count
    loss.backward()
    for name, p in model.named_parameters():
        if mesh:
            dist.all_reduce(p.grad)
    total = loss.detach()
    if mesh:
        dist.all_reduce(total)
    return total
"""
BY_HAND = (
    "    total = =>     norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()⏎"
    "    for p in model.parameters(): p.grad *= 0.05 / norm⏎    total ="
)
# name -> edit of STEP: `old => new`; ⏎ ends a line, and & separates edits
RIGHT = {
    "as it is": "",
    "each rank's loss is its share of a sum": "    if mesh:⏎        dist.all_reduce(total)⏎ => ",
    "gradients are set to zero": "    loss. =>     model.zero_grad()⏎    loss.",
    "clipped by hand": BY_HAND,
}
# name -> (edit, kind of the cause, words of the report)
WRONG = {
    "one rank sets none to zero": (
        "    loss. =>     if not (mesh and rank == 1): model.zero_grad()⏎    loss.",
        "not zeroed",
        "step 1's gradients are still in them",
    ),
    "clipped by hand, and one is not summed": (
        f'{BY_HAND} &         if mesh: =>         if mesh and name != "1.weight":',
        "not summed",
        "gradients of 1.weight: never summed over dp",
    ),
    "rows overlap": (
        "t.chunk(size)[rank] => (t[rank : rank + 2] if mesh else t)",
        "rows missing",
        "row 4 of 4 went into no rank",
    ),
    "all ranks take the first rows": (
        "t.chunk(size)[rank] => t.chunk(size)[0]",
        "rows missing",
        "rows 3–4 of 4 went into no rank",
    ),
    "the other rank's targets": (
        "    scores, =>     targets = batch[1].chunk(size)[size - 1 - rank]⏎    scores,",
        "targets",
        "on rank 0 row 1 is scored by the targets of row 3",
    ),
    "targets are shifted": (
        "targets.flatten() => (targets.roll(1, 1) if mesh else targets).flatten()",
        "targets",
        "targets that are not the twin's",
    ),
    "padding is scored": (
        "targets.flatten() => targets.where(targets != OUT, 0 if mesh else OUT).flatten()",
        "targets",
        "on rank 0 row 2 is scored by",
    ),
    "another eps on one rank": (
        "    scores, =>     model[2].eps = 1e-3 if rank else 1e-5⏎    scores,",
        "arithmetic",
        "on rank 1 alone, whose arithmetic differs",
    ),
    "slightly too large": (
        "    total = =>     for p in model.parameters(): p.grad *= 1 + 3.6e-05 * bool(mesh)⏎    total =",
        "scaled",
        "3.6e-05 of it more than the twin's",
    ),
}


def verified(edit: str):
    """Run `verify` on a rank, on the step with an edit. Returns its report."""
    exec(b5.changed(STEP, edit, "the step") if edit else STEP, names := {})
    return verify(build, names["step"], batch(), "dp 2")


@pytest.mark.parametrize("name", RIGHT)
def test_right_steps_are_not_accused(name, world):
    report = world.run(verified, RIGHT[name])[0]
    assert report.ok, report
    assert ("equal, a sum over dp" in repr(report)) == ("share" in name)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_steps_are_explained(name, world):
    edit, kind, words = WRONG[name]
    report = world.run(verified, edit)[0]
    assert kind in {found.cause.kind for found in report.found}, report
    assert words in " ".join(repr(report).split()), report
    assert " 1 times" not in repr(report) and "0.9999" not in repr(report), report


class Parts(nn.Module):
    """A layer that all ranks hold, and one expert on each rank of ep."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.all, experts = nn.Linear(4, 4), [nn.Linear(4, 4) for _ in range(2)]
        mine = range(2) if mesh is None else [mesh.get_local_rank()]
        self.experts = nn.ModuleDict({str(i): experts[i] for i in mine})

    def forward(self, x):
        return sum(expert(self.all(x)).square().mean() for expert in self.experts.values())


def test_a_norm_that_averages_squares_over_ep(world):
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
    report = world.run(verify, build, step, torch.linspace(-1, 1, 16).view(4, 4), "ep 2")[0]
    (found,) = report.found
    assert (found.what, found.cause.kind, found.cause.axes) == ("clip", "squares averaged", ("ep",)), report
    assert math.isfinite(found.off)
