"""Drop 02's first practice: the mean of unequal shares."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ....runtime.world import World
from ...practice import Answer, Exercise, right, wrong

# -- what data parallelism does not save ----------------------------------------------------------


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


def _average_on_rank(attempt, shares):
    """One rank's part of the check: its gradient, what the attempt makes of it, and what the twin has."""
    torch.manual_seed(3)
    # A gradient for every example, the same on all ranks.
    rank, each = (dist.get_rank(), torch.randn(sum(shares), 1000))
    mine = torch.split(each, shares)[rank]
    return attempt(mine.mean(0), shares[rank]), each


def judge_average(attempt) -> Answer:
    with World(4, timeout=5) as world:
        for shares in SHARES:
            results = world.run(_average_on_rank, attempt, shares)
            each = results[0][1]
            own = [part.mean(0) for part in torch.split(each, shares)]
            for rank, (got, _) in enumerate(results):
                if got is None:
                    return wrong(
                        "nothing returned",
                        "Your function returned None. dist.all_reduce returns None too: it writes the sum"
                        " into the tensor that you give it. Return that tensor.",
                    )
                if not isinstance(got, torch.Tensor):
                    return wrong(
                        "no tensor returned",
                        f"Return a tensor of PyTorch; rank {rank} returned a"
                        f" {type(got).__module__}.{type(got).__name__}.",
                    )
                if got.shape != each[0].shape:
                    return wrong(
                        "another shape than the gradient's",
                        f"Rank {rank} returned a tensor of shape {tuple(got.shape)}; the gradient's is"
                        f" {tuple(each[0].shape)}.",
                    )
                near = lambda other: torch.allclose(got.float(), other, atol=1e-5)
                if near(each.mean(0)):
                    continue
                if near(own[rank]):
                    return wrong(
                        "never summed over the ranks",
                        f"Rank {rank} still has only its own gradient. Each rank would walk off by itself.",
                    )
                if near(sum(own)):
                    return wrong(
                        "a sum where the mean was meant",
                        "Every rank holds the sum of four gradients, four times the twin's when shares are"
                        " equal. The twin's loss is a mean over examples, so its gradient is one too.",
                        ("size against the twin's", "4.0", "1.0"),
                    )
                if near(sum(own) / 4):
                    return wrong(
                        "equal weights for unequal shares",
                        f"With {shares} examples you weigh each rank 1/4. A rank's gradient is a mean over"
                        f" its own examples: one with {shares[0]} of the {sum(shares)} examples must count"
                        f" {shares[0]}/{sum(shares)}.",
                    )
                if near(each.sum(0)):
                    return wrong(
                        "summed, not divided by the number of examples",
                        "Every rank holds the sum over all examples. Divide by how many there are on all"
                        " ranks.",
                    )
                if near(each.sum(0) / 4):
                    return wrong(
                        "divided by the number of ranks",
                        f"You sum gradient · examples over the ranks. That is a sum over {sum(shares)}"
                        f" examples, so divide by {sum(shares)}, not by 4.",
                    )
                if near(sum(own) / sum(shares)):
                    return wrong(
                        "weights forgotten",
                        "You divide by the number of all examples, but sum the ranks' means. Multiply each by"
                        " its number of examples first.",
                    )
                if near(shares[rank] / sum(shares) * own[rank]):
                    return wrong(
                        "one rank's term only",
                        f"Rank {rank} has gradient · examples / all examples. That is what it must add to the"
                        " sum: all_reduce it.",
                    )
                return wrong(
                    "another value than the twin's",
                    f"Rank {rank} is off by up to {(got - each.mean(0)).abs().max():.2g} with {shares}"
                    " examples.",
                )
    return right("Equal to the twin on every rank, with equal and with unequal shares.")


average = Exercise(
    "the mean of unequal shares",
    weighted_average,
    judge_average,
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
