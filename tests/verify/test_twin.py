"""Causes that `verify` finds by comparing with the whole model on one rank, and unusual right steps."""

import math

import pytest
import torch
import worlds
from torch import nn

from drops import b5
from three_axes.verify import verify
from three_axes.verify.causes import of_norms
from three_axes.verify.shards import Mesh

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
ACCUMULATED = f"""
import torch.nn.functional as F

def step(model, batch, mesh):
    total = 0.0
    for i in range(2):
        tokens, targets = (t.chunk(2)[i].flatten() for t in batch)
        loss = F.cross_entropy(model(tokens), targets, ignore_index={OUT}, reduction="sum") / 18
        loss.backward()
        # after a microbatch
        total += loss.detach()
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
        "unexplained",
        "step 2, gradients of 0.weight, 1.weight and 5 more: wrong on all ranks",
    ),
    "a mean of means": (
        "(batch[1] != OUT).sum() => (targets != OUT).sum() * size",
        "rows weighted",
        "loss: rows 1–2 0.818 times, rows 3–4 1.286 times what they should count: a mean of means",
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
    "targets are shifted": (
        "targets.flatten() => (targets.roll(1, 1) if mesh else targets).flatten()",
        "loss",
        "No module's output that could be compared differs",
    ),
    "another eps on one rank": (
        "    scores, =>     model[2].eps = 1e-3 if rank else 1e-5⏎    scores,",
        "some tokens",
        "loss of 2: right for 12 of 12 tokens of rank 0, 0 of 12 tokens of rank 1",
    ),
    "slightly too large": (
        "    total = =>     for p in model.parameters(): p.grad *= 1 + 3.6e-05 * bool(mesh)⏎    total =",
        "scaled",
        "3.6e-05 of it more than the twin's",
    ),
}


def verified(edit: str, step: str = STEP):
    """Run `verify` on a rank, on a step with an edit. Returns its report."""
    exec(b5.changed(step, edit, "the step") if edit else step, names := {})
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


@pytest.mark.parametrize(
    "edit, kind, words",
    [
        ("p.grad /= 2", "rows weighted", "rows 1–2 0.25 times, rows 3–4 0.5 times what they should count"),
        ("p.grad *= i", "rows missing", "rows 1–2 of 4 missing; rows 3–4 once what they should count"),
    ],
)
def test_microbatches_that_count_unequally(edit, kind, words, world):
    after = f"# after a microbatch => for p in model.parameters() if mesh else (): {edit}"
    (found,) = world.run(verified, after, ACCUMULATED)[0].found
    assert found.cause.kind == kind and words in found.cause.text, found


SQUARES = {
    "layers.0.q": 4.13,
    "layers.1.q": 1.07,
    "norm": 2.71,
    "layers.0.up": 3.31,
    "layers.1.up": 5.77,
    "frozen": 0.0,
}
PARTS = {"layers.0.up", "layers.1.up"}  # tp cuts these; it has copies of the others
ALL = sum(SQUARES.values())
CUT = sum(SQUARES[name] for name in PARTS)


@pytest.mark.parametrize(
    "squares, kind, words",
    [
        ((ALL + 2.71,) * 2, "squares counted often", "the squares of norm were counted 2 times, over tp"),
        ((ALL + 3.31,) * 2, "squares counted often", "the squares of layers.0.up were counted 2 times"),
        ((2 * ALL - CUT,) * 2, "squares counted often", "of all that tp has copies of were counted 2 times"),
        ((ALL - CUT + 3.31, ALL - CUT + 5.77), "norm of a part", "the squares were never summed over tp"),
        ((ALL - CUT / 2,) * 2, "squares averaged", "what tp holds in parts were averaged over it"),
        ((4 * ALL,) * 2, "scaled", "2 times the twin's, the size of tp"),
        ((ALL * (1 + 1e-7),) * 2, "scaled", "5e-08 of it more than the twin's"),
        ((ALL + 4.13 + 2.71,) * 2, "scaled", "1.184 times the twin's"),  # two tensors: no cause is guessed
    ],
)
def test_a_wrong_norm_has_one_cause_or_none(squares, kind, words):
    got = dict(enumerate(map(math.sqrt, squares)))
    cause = of_norms(got, math.sqrt(ALL), Mesh({"tp": 2}), 1e-9, SQUARES, {("tp",): PARTS})
    assert cause.kind == kind and words in cause.text, cause


def test_in_coarse_numbers_no_tensor_is_blamed_for_a_norm():
    """Within the rounding of bfloat16, the squares of one of many tensors fit by chance."""
    got = dict.fromkeys(range(2), math.sqrt(ALL + SQUARES["norm"]))
    of = lambda tolerance: of_norms(
        got, math.sqrt(ALL), Mesh({"tp": 2}), tolerance, SQUARES, {("tp",): PARTS}
    )
    assert of(1e-9).kind == "squares counted often" and of(1e-2).kind == "scaled"
