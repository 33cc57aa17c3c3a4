"""Drop 09: every byte a GPU holds, on paper and on real ranks; what ZeRO divides, and what it sends."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from helpers import toy
from helpers.practice import Asked, OnRanks, Run, alike, facts_so_far, first, needs_more, number
from helpers.ranks import World, memory

# -- practice: bytes of states on the fullest GPU -------------------------------------------------


def bytes_per_gpu(stages, d, t, zero):
    """(weights, gradients, optimizer's states): bytes of each on the fullest GPU, in mixed precision.

    stages: the number of parameters of each pipeline stage. d, t: sizes of data and tensor parallelism; t
    cuts every parameter. zero: 0 to 3. Half-precision weights and gradients; float32 master copy, m and v.
    """
    # The fullest pipeline stage decides. Each stage of ZeRO divides one more of the three by d.
    n = max(stages) / t
    return (
        2 * n / (d if zero >= 3 else 1),
        2 * n / (d if zero >= 2 else 1),
        12 * n / (d if zero >= 1 else 1),
    )


WIDTH, DEEP = 64, (3, 2)  # the measured model: square matrices, three on the first stage, two on the second
CASES = [
    *(([n * WIDTH * WIDTH for n in DEEP], 2, 2, zero) for zero in range(4)),
    *(([7 * 10**9], 64, 1, zero) for zero in range(4)),
    ([175 * 10**8] * 2 + [2 * 10**10], 8, 8, 1),
    ([10**9, 2 * 10**9, 10**9], 4, 1, 2),
]


def _held(zero: int) -> tuple[int, ...]:
    """On a rank of 2 × 2 × 2: hold the states of its matrices in mixed precision, run a step, and return the
    bytes that it holds of (weights, gradients, optimizer).
    """
    grid = toy.grid_groups(2, 2, 2)
    dp, layers = grid["dp"].get_group(), DEEP[grid["pp"].get_local_rank()]
    mine = nn.Sequential(*(nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(layers))).bfloat16()
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    sum(layer(x).square().mean() for layer in mine).backward()
    weights = parameters_to_vector(mine.parameters()).detach()
    gradient = parameters_to_vector(p.grad for p in mine.parameters())
    dist.all_reduce(gradient, group=dp)
    kept = lambda v, cut_from: v.chunk(2)[dist.get_rank(dp)].clone() if zero >= cut_from else v
    master = nn.Parameter(kept(weights, 1).float())
    master.grad = kept(gradient, 1).float() / 2
    optimizer = torch.optim.AdamW([master])
    optimizer.step()
    adam = [v for v in optimizer.state[master].values() if v.dim()]
    kinds = [kept(weights, 3)], [kept(gradient, 2)], [master, *adam]
    return tuple(sum(memory.storages(kind).values()) for kind in kinds)


@cache
def _fullest() -> list[tuple[float, ...]]:
    """(weights, gradients, optimizer): bytes on the fullest of eight real ranks, for each ZeRO stage."""
    with World(8, timeout=20) as world:
        return [tuple(map(float, max(world.run(_held, zero), key=sum))) for zero in range(4)]


def _three(answer) -> tuple[float, ...]:
    weights, gradients, optimizer = map(number, answer)
    return weights, gradients, optimizer


def _beside_ranks(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    """The answers for 2 × 2 × 2 beside real ranks, then those for other cases that differ from the
    solution's; at most five in all.
    """
    if not alike(_fullest(), truth.values[:4]):
        raise AssertionError(f"the formula says {truth.values[:4]}, the ranks hold {_fullest()}")
    figures = []
    for i, ((stages, d, t, zero), *answers) in enumerate(zip(CASES, run.values, truth.values)):
        called = f"ZeRO-{zero}" if zero else "no ZeRO"
        if i < len(_fullest()):
            case = f"{called}, you, and the fullest of 2 × 2 × 2 real ranks"
        elif not alike(*answers):
            of_stages = ", ".join(f"{n:,.0f}" for n in stages)
            case = f"{called}, stages of {of_stages} parameters, d = {d}, t = {t}"
        else:
            continue
        shown = (" + ".join(f"{x:,.0f}" if x >= 1 else f"{x:.3g}" for x in one) + " B" for one in answers)
        figures.append((case, *shown))
    return figures[:5]


KEEPS = "ZeRO-1 divides the optimizer's 12, ZeRO-2 the gradients' 2 as well, ZeRO-3 the weights' 2 as well."

states = Asked(
    "bytes per GPU",
    bytes_per_gpu,
    minutes=6,
    hints=[
        "Begin without ZeRO: N parameters of the largest stage, cut by t, 16 bytes each: 2 weights, 2"
        " gradients, 12 optimizer.",
        "ZeRO-1 divides the 12 by d, ZeRO-2 the gradients' 2 as well, ZeRO-3 the weights' 2 as well.",
        "Which stage? A run fails when one GPU is full: max(stages).",
    ],
    cases=CASES,
    reads=_three,
    tolerance=1e-9,
    praise="Equal to the byte to what the fullest of eight real ranks holds, for every ZeRO stage.",
    figures=_beside_ranks,
)


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
