"""`verify` finds mistakes that no scale or sum over an axis explains. It repeats the step with single rows of
the batch, and recomputes a gradient norm from sums of squares.
"""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import worlds
from torch import nn

from three_axes.verify import verify
from three_axes.verify.causes import of_norms
from three_axes.verify.pieces import Mesh

shared_world = worlds.shared(2, many=30, timeout=60)
ROWS, TOKENS, WORDS, WIDE = 8, 6, 16, 8


class Tiny(nn.Module):
    """A small model: (rows, tokens) -> (rows, tokens, words)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDE)
        self.mix, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WORDS)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.words(tokens))))


def batch(rows: int = ROWS) -> list[torch.Tensor]:
    """[tokens, targets, counts]. counts is 0.0 for padding: the second half of each of the last rows."""
    chance = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(WORDS, (2, rows, TOKENS), generator=chance)
    counts = torch.ones(rows, TOKENS)
    counts[-rows // 4 :, TOKENS // 2 :] = 0
    return [tokens, targets, counts]


def mine(batch, mesh):
    """This rank's rows, and a function that sums a tensor over all ranks."""
    if mesh is None:
        return batch, lambda tensor: tensor
    group = mesh.get_group()

    def total(tensor):
        dist.all_reduce(tensor, group=group)
        return tensor

    return [t.chunk(mesh.size())[mesh.get_local_rank()] for t in batch], total


def losses(model, tokens, targets):
    """The loss of each token, (rows, tokens)."""
    each = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return each.view(targets.shape)


def right(model, batch, mesh, *, pads: bool = False, of_means: bool = False):
    """The loss is the mean over counted tokens. pads: rank 1 counts padding; of_means: a mean of means."""
    (tokens, targets, counts), total = mine(batch, mesh)
    if pads and mesh is not None and mesh.get_local_rank() == 1:
        counts = torch.ones_like(counts)
    among = counts.sum() * (mesh.size() if mesh else 1) if of_means else total(counts.sum())
    loss = (losses(model, tokens, targets) * counts).sum() / among
    loss.backward()
    for p in model.parameters():
        total(p.grad)
    return total(loss.detach())


def accumulated(model, batch, mesh, *, refuses=lambda part: None):
    """A step that calls the model twice, with half of the batch each. On a mesh it halves the gradients after
    each backward, so those of the first half are halved twice.
    """
    tokens, targets, _ = batch
    refuses(tokens)
    loss = 0.0
    for i in range(2):
        one = losses(model, tokens.chunk(2)[i], targets.chunk(2)[i]).mean()
        (one if mesh else one / 2).backward()
        for p in model.parameters() if mesh else ():
            p.grad /= 2
        loss += one.detach() / 2
    return loss


def checked(world, step, rows: int = ROWS, **how):
    """(the report of `verify` on a step, what is wrong -> its cause)."""

    def run():
        return verify(lambda mesh: Tiny(), lambda *of: step(*of, **how), batch(rows), ["dp 2"])

    report = world.run(run)[0]
    return report, {found.what: found.cause for found in report.found}


def test_a_mean_of_means_explains_the_gradients_and_the_loss(world):
    """The two ranks have 24 and 18 of the 42 tokens that count."""
    report, causes = checked(world, right, of_means=True)
    said = "rows 1–4 0.875 times, rows 5–8 1.167 times what they should count: a mean of means"
    assert causes["loss"] == causes["gradients"] and said in causes["loss"].text, report


def test_padding_that_one_rank_counts_is_found(world):
    report, causes = checked(world, right, pads=True)
    assert causes["loss"].kind == "padding counted" and causes["loss"] == causes["gradients"], report
    assert causes["loss"].text == "in rows 7–8 what the batch's mask leaves out is counted as well"


def test_rows_have_their_own_numbers_where_several_are_tried_together(world):
    _, causes = checked(world, right, rows=24, of_means=True)
    assert "rows 1–12 0.875 times, rows 13–24 1.167 times" in causes["gradients"].text


def test_a_step_that_cuts_its_batch_is_given_the_rows_again_and_again(world):
    report, causes = checked(world, accumulated)
    said = "rows 1–4 0.5 times, rows 5–8 once what they should count: a factor that some of them"
    assert causes["gradients"].text.startswith(f"{said} get once more") and "loss" not in causes, report


def test_a_trial_that_fails_says_so(world):
    def refuses(tokens):
        if len(tokens.unique(dim=0)) < ROWS:
            raise ValueError("not my batch")

    report, causes = checked(world, accumulated, refuses=refuses)
    line = refuses.__code__.co_firstlineno + 2
    said = f"rows could not be tried: ValueError, test_rows.py, line {line}"
    assert causes["gradients"].text.endswith(said) and causes["gradients"].kind == "unexplained", report


SQUARES = {
    **{"layers.0.q": 4.13, "layers.1.q": 1.07, "norm": 2.71, "head": 9.89},
    **{"layers.0.up": 3.31, "layers.1.up": 5.77},
}
PARTS = {"layers.0.up", "layers.1.up"}


@pytest.mark.parametrize(
    "again, said",
    [
        (["norm"], "the squares of norm were counted 2 times, over tp"),
        (["layers.1.q"], "the squares of layers.1.q were"),
        (["layers.0.q", "layers.1.q"], "the squares of layers.0.q, layers.1.q were"),
        (["layers.0.q", "layers.1.q", "norm"], "the squares of layers.0.q, layers.1.q and 1 more were"),
        (SQUARES.keys() - PARTS, "the squares of all that tp has copies of were counted 2 times, over tp"),
        (PARTS, "the squares of layers.0.up, layers.1.up were"),
    ],
)
def test_squares_that_are_counted_once_for_each_rank(again, said):
    squares = sum(SQUARES.values())
    norm = math.sqrt(squares + sum(SQUARES[name] for name in again))
    mesh = Mesh({"tp": 2})
    cause = of_norms({0: norm, 1: norm}, math.sqrt(squares), mesh, 1e-9, SQUARES, {("tp",): PARTS})
    assert cause.text.startswith(said) and cause.axes == ("tp",)


def test_in_coarse_numbers_no_squares_are_guessed():
    """Among some dozens of sums of squares, one always equals the norm within the rounding of bfloat16."""
    squares, mesh = sum(SQUARES.values()), Mesh({"tp": 2})
    norm = math.sqrt(squares + SQUARES["norm"])
    norms, parts = {0: norm, 1: norm}, {("tp",): PARTS}
    of = lambda tolerance: of_norms(norms, math.sqrt(squares), mesh, tolerance, SQUARES, parts)
    assert of(1e-9).kind == "squares counted often" and of(1e-2).kind == "scaled"


def test_a_row_of_nothing_but_padding_is_not_called_left_out(world):
    def run():
        tokens, targets, counts = batch()
        counts[5] = 0
        return verify(
            lambda mesh: Tiny(), lambda *of: right(*of, of_means=True), [tokens, targets, counts], ["dp 2"]
        )

    report = world.run(run)[0]
    said = " ".join(repr(report).split())
    assert "rows 1–4 0.75 times, row 5 1.5 times, rows 7–8 1.5 times what they should count" in said
