"""Drop 09: every byte a GPU holds, on paper and on real ranks; what ZeRO divides, and what it sends."""

from __future__ import annotations

import torch
import torch.distributed as dist

from helpers.practice import OnRanks, Run, facts_so_far, first, needs_more

# -- practice: ZeRO-1 written ---------------------------------------------------------------------


def zero_one(weights, gradient, update, rank, world_size):
    """One step of ZeRO-1. weights: (n,), whole on every rank, changed in place; d divides n.

    gradient: (n,), of the mean loss over this rank's examples. update(w, g): Adam's step on a part of the
    weights, in place; it keeps two numbers for each that it is given.
    """
    mine = weights.chunk(world_size)[rank]  # a view
    part = torch.empty_like(mine)
    dist.reduce_scatter_tensor(part, gradient)
    update(mine, part / world_size)
    dist.all_gather_into_tensor(weights, mine.clone())


STEPS = 2  # of each check: an attempt that keeps something from the first step must still do the second


def _to_step(rank: int, n: int) -> list[tuple]:
    """The arguments of each step: weights that all ranks hold, the rank's own gradient, and an update like
    Adam's that records the number of weights it was given.
    """
    draw = lambda seed: torch.randn(60 * n, generator=torch.Generator().manual_seed(seed))
    facts = facts_so_far()
    facts["updated"] = [0] * STEPS

    def step(number: int) -> tuple:
        known = {}  # parts by their address: the states of a part that is given again exist already

        def update(w, g):
            known[w.data_ptr()] = w
            facts["updated"][number] = sum(part.numel() for part in known.values())
            w -= 0.1 * g / (g.square().sqrt() + 0.5)  # Adam's first step; its epsilon reveals a factor

        return draw(number), draw(10 + rank + 100 * number), update, rank, n

    return [step(number) for number in range(STEPS)]


def _given(run: Run) -> int:
    """The most weights that a rank's update was given in a step, in all its calls together."""
    return max((max(facts.get("updated") or [0]) for facts in run.ranks if facts), default=0)


def _found(run: Run, truth: Run) -> tuple[str, str] | None:
    faults = {
        "an optimizer for all weights": _given(run) > _given(truth),
        "a step without update": not run.error and any(0 in facts["updated"] for facts in run.ranks),
    }
    return first(faults) or needs_more(bytes="more bytes than DP's")(run, truth)


written = OnRanks(
    "ZeRO-1, written",
    zero_one,
    minutes=10,
    hints=[
        "Three lines: a reduce-scatter gives you the sum of your part of the gradients; update your part of"
        " the weights with it; an all-gather gives everybody all parts.",
        "part = torch.empty(n/d); dist.reduce_scatter_tensor(part, gradient). A mean is the sum over d.",
        "mine = weights.chunk(world_size)[rank] is a view of your part; update(mine, part / world_size), and"
        " dist.all_gather_into_tensor(weights, mine.clone()).",
    ],
    tries=((4,), (2,)),
    inputs=_to_step,
    sees=lambda arguments, answer: arguments[0],
    praise="The twin's weights on every rank, DP's bytes, and an optimizer that holds 1/d.",
    figures=lambda run, truth: [
        ("numbers in a rank's optimizer", *(str(2 * _given(one)) for one in (run, truth)))
    ],
    finds=_found,
)
