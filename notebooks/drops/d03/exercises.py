"""Drop 03: the split of the MLP, forward and backward, and what it saves."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from helpers import toy
from helpers.practice import OnRanks, needs_more

# -- practice: split the MLP ----------------------------------------------------------------------


def split_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down, with each rank doing its share of the work.

    x: (tokens, h), the same on every rank. up: (h, 4h), down: (4h, h), whole: take your part of them.
    Return the whole output on every rank. Its backward must give every rank the whole gradient of x.
    """
    # Each rank has all of x, and computes one term of x's gradient: backward sums the terms of all ranks.
    x = toy.copy_to_tp(x)
    inside = F.gelu(x @ up.chunk(world_size, dim=1)[rank])
    # My columns of up are what my rows of down need. The sum over the ranks is the output.
    return toy.reduce_from_tp(inside @ down.chunk(world_size, dim=0)[rank])


TOKENS, HIDDEN = 30, 64  # 30 tokens do not divide by 4, so four ranks cannot cut the tokens instead


def _random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in shapes]


def _to_split(rank: int, n: int) -> list[tuple]:
    x, up, down = _random((TOKENS, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN))
    return [(x.requires_grad_(), up / 8, down / 16, rank, n)]


mlp = OnRanks(
    "split the MLP",
    split_mlp,
    minutes=8,
    hints=[
        "Which cut of `up` lets each rank apply gelu without asking anybody? up.chunk(world_size,"
        " dim=1)[rank] is a rank's columns.",
        "A rank then has some columns of the inside. Which rows of `down` do they meet?"
        " down.chunk(world_size, dim=0)[rank].",
        "What comes out is a partial sum: y = toy.reduce_from_tp(y) adds the ranks' partial sums.",
        "Backward, each rank has only a partial sum of the gradient of x: x = toy.copy_to_tp(x),"
        " before anything else.",
    ],
    tries=((2,), (4,)),
    inputs=_to_split,
    gradient=lambda arguments: _random((TOKENS, HIDDEN), (TOKENS, HIDDEN))[1],
    flops=True,
    finds=needs_more(
        flops="every rank did more than its share",
        calls="more messages than needed",
        bytes="more bytes than needed",
    ),
    praise="The output and the gradient of x are the twin's, with one all-reduce forward and one backward.",
    figures=lambda run, truth: [
        (
            f"share of the work on the busiest of {run.n} ranks",
            *(f"{one.most('flops') / truth.most('flops') / run.n:.2f}" for one in (run, truth)),
        )
    ],
)


# -- practice: a loss over split words ------------------------------------------------------------


def split_loss(logits, targets, first):
    """The mean cross-entropy of tokens whose scores lie on several ranks.

    logits: (T, V/t), the scores of this rank's words. targets: (T,), the right words, the same on all ranks.
    first: the number of this rank's first word.
    """
    words = logits.shape[1]
    largest = logits.max(1).values
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    total = (logits - largest[:, None]).exp().sum(1)
    dist.all_reduce(total)
    mine = (first <= targets) & (targets < first + words)
    place = (targets - first).clamp(0, words - 1)
    score = torch.where(mine, logits.gather(1, place[:, None])[:, 0], 0)  # 0 where another rank has the word
    dist.all_reduce(score)
    return (total.log() + largest - score).mean()


WORDS = 48


def _scored(rank: int, n: int) -> list[tuple]:
    """The arguments of two cases: scores of usual size, and scores that are too large for exp."""
    cases = []
    for scale in (1.0, 300.0):
        chance = torch.Generator().manual_seed(11)
        logits = scale * torch.randn(WORDS, WORDS, generator=chance)
        targets = torch.randperm(WORDS, generator=chance)  # every word, also the first and last of a rank
        cases.append((logits.chunk(n, 1)[rank].clone(), targets, rank * WORDS // n))
    return cases


cross_entropy = OnRanks(
    "a loss over split words",
    split_loss,
    minutes=10,
    hints=[
        "The loss of a token is log(sum of exp(scores)) − the right word's score. Both need all ranks: three"
        " numbers for each token travel, not its scores.",
        "Subtract the largest score before exp: the largest of all ranks, by dist.all_reduce(largest,"
        " op=dist.ReduceOp.MAX). Add it again after log.",
        "The right word is on one rank. There take its score, at place targets − first; on the others 0. The"
        " sum over the ranks is the score.",
    ],
    tries=((4,), (2,)),
    inputs=_scored,
    praise="The loss of the whole vocabulary, from three numbers a token and not all scores.",
    figures=lambda run, truth: [
        (
            "numbers in a rank's collectives, a token",
            *(f"{one.most('numbers') / (2 * WORDS):.0f}" for one in (run, truth)),
        )
    ],
    finds=needs_more(numbers="more than three numbers a token"),
)
