"""Drop 02's first practice: the mean of unequal shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ....runtime.failure import RankError
from ....runtime.world import World
from ...practice import Answer, Exercise, Mistake, proven, right, wrong

SHARES = ([2, 2, 2, 2], [5, 1, 1, 1], [3, 1, 1, 2])  # examples on each rank


def weighted_average(gradient, examples):
    """Return the gradient of the mean loss over all examples of all ranks.

    gradient: this rank's, of the mean loss over its own examples; a 1-D tensor.
    examples: how many examples this rank had. Ranks may have different numbers.
    """
    total = torch.tensor([float(examples)])
    dist.all_reduce(total)
    gradient = gradient * examples / total
    dist.all_reduce(gradient)
    return gradient


def _gradients(shares: list[int]) -> list[torch.Tensor]:
    """A gradient for each example, (examples of a rank, 1000) for each rank; the same on all ranks."""
    return list(torch.randn(sum(shares), 1000, generator=torch.Generator().manual_seed(3)).split(shares))


def _average_on_rank(attempt) -> list:
    """What the attempt makes of this rank's gradient, for each of the shares."""
    rank = dist.get_rank()
    return [attempt(_gradients(shares)[rank].mean(0), shares[rank]) for shares in SHARES]


def _mistake(name: str, text: str, of_rank: Callable) -> Mistake:
    """of_rank(the means of all ranks, their numbers of examples, rank) -> what that rank ends with."""

    def answers(shares, rank):
        return of_rank([part.mean(0) for part in _gradients(shares)], shares, rank)

    return Mistake(name, text, answers)


_weighted = lambda own, n: sum(k * g for g, k in zip(own, n))  # the sum over all examples
MEAN = "A rank's gradient is a mean over its own examples: one with 5 of 8 examples must count 5/8."
ALL = "What is to be divided by is the number of examples on all ranks: all_reduce that number too."
MISTAKES = (
    _mistake(
        "never summed over the ranks",
        "Each rank still has only its own gradient, so each rank would train a model of its own.",
        lambda own, n, r: own[r],
    ),
    _mistake(
        "a sum where the mean was meant",
        "Every rank holds the sum of four gradients, four times the twin's when shares are equal. The twin's"
        " loss is a mean over examples, so its gradient is one too.",
        lambda own, n, r: sum(own),
    ),
    _mistake(
        "equal weights for unequal shares", f"You weigh each rank 1/4. {MEAN}", lambda own, n, r: sum(own) / 4
    ),
    _mistake(
        "summed, not divided by the number of examples",
        "Every rank holds the sum over all examples. Divide by how many there are on all ranks.",
        lambda own, n, r: _weighted(own, n),
    ),
    _mistake(
        "divided by the number of ranks",
        "You sum gradient · examples over the ranks. That is a sum over all examples, so divide by their"
        " number, not by 4.",
        lambda own, n, r: _weighted(own, n) / 4,
    ),
    _mistake(
        "divided by this rank's own examples",
        f"You sum the ranks' gradients, and each rank divides by its own number of examples. {MEAN} {ALL}",
        lambda own, n, r: sum(own) / n[r],
    ),
    _mistake(
        "divided by this rank's own examples",
        f"You sum gradient · examples, and each rank divides by its own number of examples. {ALL}",
        lambda own, n, r: _weighted(own, n) / n[r],
    ),
    _mistake(
        "divided by this rank's own examples",
        "Each rank divides its gradient by its own number of examples, and you sum that. It is a mean"
        f" already. {MEAN}",
        lambda own, n, r: sum(g / k for g, k in zip(own, n)),
    ),
    _mistake(
        "weights upside down",
        f"You multiply by all examples and divide by the rank's own. {MEAN}",
        lambda own, n, r: sum(g * sum(n) / k for g, k in zip(own, n)),
    ),
    _mistake(
        "weights forgotten",
        "You divide by the number of all examples, but sum the ranks' means. Multiply each by its number of"
        " examples first.",
        lambda own, n, r: sum(own) / sum(n),
    ),
    _mistake(
        "weighed after the sum",
        "You sum the ranks' gradients first. Then each rank multiplies the sum by its own share of the"
        " examples. Multiply before you sum: each gradient by its own rank's number.",
        lambda own, n, r: sum(own) * n[r] / sum(n),
    ),
    _mistake(
        "one rank's term only",
        "Each rank has gradient · examples / all examples. That is what it must add to the sum: all_reduce"
        " it, and return the tensor that all_reduce has written to.",
        lambda own, n, r: n[r] / sum(n) * own[r],
    ),
    _mistake(
        "one rank's term only",
        "Each rank has its own gradient · examples. That is what it must add to the sum: all_reduce it, and"
        " divide.",
        lambda own, n, r: n[r] * own[r],
    ),
    _mistake(
        "divided twice",
        "You have the twin's gradient, divided by the number of ranks once more.",
        lambda own, n, r: _weighted(own, n) / sum(n) / 4,
    ),
    _mistake(
        "divided twice",
        "You have the twin's gradient, divided by the number of all examples once more.",
        lambda own, n, r: _weighted(own, n) / sum(n) ** 2,
    ),
)


IN_PLACE = "dist.all_reduce returns None: it writes the sum into the tensor that you give it."


def judge_average(attempt) -> Answer:
    with World(4, timeout=5) as world:
        try:
            of_ranks = world.run(_average_on_rank, attempt)
        except RankError as e:
            if not any(seen.error and "'NoneType'" in seen.error.message for seen in e.seen):
                raise
            return Answer("crashed", f"{IN_PLACE} Use that tensor.\n\n{e.report}", "a sum taken from None")
    cases = [(shares, rank) for shares in SHARES for rank in range(4)]
    answers = [of_ranks[rank][i] for i in range(len(SHARES)) for rank in range(4)]
    for (_, rank), got in zip(cases, answers):
        if got is None:
            return wrong("nothing returned", f"Your function returned None. {IN_PLACE} Return that tensor.")
        if not isinstance(got, torch.Tensor):
            return wrong(
                "no tensor returned",
                f"Return a tensor of PyTorch; rank {rank} returned a"
                f" {type(got).__module__}.{type(got).__name__}.",
            )
        if got.shape != (1000,):
            return wrong(
                "another shape than the gradient's",
                f"Rank {rank} returned a tensor of shape {tuple(got.shape)}; the gradient's is (1000,).",
            )
    alike = lambda got, other: torch.allclose(got.float(), other, atol=1e-5, rtol=1e-4)
    twin = [torch.cat(_gradients(shares)).mean(0) for shares, _ in cases]
    off = next((i for i, (got, whole) in enumerate(zip(answers, twin)) if not alike(got, whole)), None)
    if off is None:
        return right("Equal to the twin on every rank, with equal and with unequal shares.")
    if mistake := proven(answers, cases, MISTAKES, alike):
        return wrong(mistake.name, mistake.text)
    shares, rank = cases[off]
    times = (answers[off].float() @ twin[off] / (twin[off] @ twin[off])).item()
    scaled = alike(answers[off], times * twin[off])
    return wrong(
        "another value than the twin's",
        f"With {shares} examples rank {rank} "
        + (
            f"has {times:.3g} times the twin's gradient."
            if scaled
            else f"is off by up to {(answers[off] - twin[off]).abs().max():.2g}."
        )
        + (f" With {cases[0][0]} it is right." if off >= 4 else ""),
    )


average = Exercise(
    "the mean of unequal shares",
    weighted_average,
    judge_average,
    minutes=6,
    hints=[
        (
            "A mean over all examples = the sum over examples, divided by their number. What must each rank"
            " add to the sum?"
        ),
        (
            "gradient * examples is the sum over this rank's examples. Both that and the number of examples"
            " need an all_reduce."
        ),
        (
            "all_reduce works in place on a tensor: total = torch.tensor([float(examples)]);"
            " dist.all_reduce(total)."
        ),
    ],
)
