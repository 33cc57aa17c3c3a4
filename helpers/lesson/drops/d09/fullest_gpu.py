"""Drop 09's first practice: bytes of states on the fullest GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .... import toy
from ....runtime import memory
from ....runtime.world import World
from ....toy.names import reduce_scatter
from ...practice import Answer, Exercise, right, wrong

# -- states ------------------------------------------------------------------------------------


def bytes_per_gpu(stages, d, t, zero):
    """Bytes of states on the fullest GPU: half-precision weights and gradients; float32 master copy, m and v.

    stages: the number of parameters of each pipeline stage. d, t: sizes of data and tensor parallelism; t
    cuts every parameter. zero: 0 to 3.
    """
    n = max(stages) / t
    return (
        2 * n / (d if zero >= 3 else 1) + 2 * n / (d if zero >= 2 else 1) + 12 * n / (d if zero >= 1 else 1)
    )


WIDTH, DEEP = 64, (3, 2)  # a stack of square matrices, unevenly over two stages


def _measured(zero: int) -> int:
    """One rank of 2 × 2 × 2: hold the states of its matrices in mixed precision, run a step, and count the
    bytes it holds.
    """
    grid = toy.grid_groups(2, 2, 2)
    dp, t, stage = grid["dp"].get_group(), 2, grid["pp"].get_local_rank()
    mine = nn.Sequential(*(nn.Linear(WIDTH, WIDTH // t, bias=False) for _ in range(DEEP[stage]))).bfloat16()
    weights = [p for p in mine.parameters()]
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    sum(layer(x).square().mean() for layer in mine).backward()
    rank, d = dist.get_rank(dp), dist.get_world_size(dp)
    flat = lambda tensors: torch.cat([v.reshape(-1) for v in tensors])
    part = lambda v: v.chunk(d)[rank].clone()
    gradient = flat([p.grad for p in weights])
    if zero >= 2:
        shard = torch.empty(gradient.numel() // d, dtype=gradient.dtype)
        reduce_scatter(shard, gradient, group=dp)
        gradient = shard
    else:
        dist.all_reduce(gradient, group=dp)
    gradient /= d
    for p in weights:
        p.grad = None
    whole = flat([p.detach() for p in weights])
    master = (part(whole) if zero else whole).float()
    m, v = torch.zeros_like(master), torch.zeros_like(master)
    g = (gradient if zero in (0, 2, 3) else part(gradient)).float()
    m.lerp_(g, 0.1), v.lerp_(g.square(), 0.001)
    master -= 1e-3 * (m / 0.1) / ((v / 0.001).sqrt() + 1e-8)
    del g, whole
    kept = [master.to(torch.bfloat16)] if zero == 3 else weights
    held = sum(memory.storages([*kept, gradient, master, m, v]).values())
    dist.barrier(dp)
    return held


def _judge_bytes(attempt) -> Answer:
    stages = [n * WIDTH * WIDTH for n in DEEP]
    with World(8, timeout=10) as world:
        measured = [max(world.run(_measured, zero)) for zero in range(4)]
        cases = (
            [(stages, 2, 2, zero) for zero in range(4)]
            + [([7e9], 64, 1, zero) for zero in range(4)]
            + [([1.75e10] * 2 + [2e10], 8, 8, 1)]
        )
        said = world.run(lambda: [attempt(list(s), d, t, z) for s, d, t, z in cases])[0]
    for i, (case, value) in enumerate(zip(cases, said)):
        try:
            said[i] = float(value) if not isinstance(value, (str, bool)) else None
        except (TypeError, ValueError):
            said[i] = None
        if said[i] is None:
            return wrong("no number", f"bytes_per_gpu{case} returned {value!r}.")
    every = lambda s, d, t, z, weights=2, gradients=2, optimizer=12: (
        weights / (d if z >= 3 else 1) + gradients / (d if z >= 2 else 1) + optimizer / (d if z >= 1 else 1)
    )
    others = {
        "gradients not divided by t": (
            lambda s, d, t, z: bytes_per_gpu(s, d, t, z) + (2 - 2 / t) * max(s) / (d if z >= 2 else 1)
        ),
        "ZeRO-1 divides everything": lambda s, d, t, z: 16 * max(s) / t / (d if z >= 1 else 1),
        "the master copy is forgotten": (
            lambda s, d, t, z: bytes_per_gpu(s, d, t, z) - 4 * max(s) / t / (d if z >= 1 else 1)
        ),
        "the average stage, not the largest": lambda s, d, t, z: bytes_per_gpu([sum(s) / len(s)], d, t, z),
        "all stages on one GPU": lambda s, d, t, z: bytes_per_gpu([sum(s)], d, t, z),
        "gradients divided by neither t nor p": (
            lambda s, d, t, z: bytes_per_gpu(s, d, t, z) + 2 * (sum(s) - max(s) / t) / (d if z >= 2 else 1)
        ),
        "ZeRO left out": lambda s, d, t, z: 16 * max(s) / t,
        "all float32, not mixed precision": lambda s, d, t, z: max(s) / t * every(s, d, t, z, 4, 4, 8),
        "the first stage, not the largest": lambda s, d, t, z: bytes_per_gpu(s[:1], d, t, z),
        "the last stage, not the largest": lambda s, d, t, z: bytes_per_gpu(s[-1:], d, t, z),
        "nothing divided by t": lambda s, d, t, z: bytes_per_gpu(s, d, 1, z),
        "ZeRO-2 leaves gradients whole": lambda s, d, t, z: bytes_per_gpu(s, d, t, 1 if z == 2 else z),
        "ZeRO-3 leaves weights whole": lambda s, d, t, z: bytes_per_gpu(s, d, t, min(z, 2)),
        "stages that do not add up": (
            lambda s, d, t, z: (
                max(s) / t * sum(part / (d if z == k else 1) for part, k in ((12, 1), (2, 2), (2, 3)))
            )
        ),
        "float32 gradients": lambda s, d, t, z: max(s) / t * every(s, d, t, z, 2, 4, 12),
    }
    why = {
        "gradients not divided by t": (
            "A rank has gradients only for the parameters it holds: the split over t divides them too."
        ),
        "gradients divided by neither t nor p": (
            "A rank has gradients only for the parameters it holds: its stage's, cut by t. Calculators that"
            " forget this answer ten times too much for a 70B."
        ),
        "ZeRO left out": (
            "16 bytes a parameter whatever `zero` says: stages 1, 2 and 3 divide more and more of it by d."
        ),
        "all float32, not mixed precision": (
            "4 + 4 + 8 is the other way to 16. ZeRO divides them differently: mixed precision has 2 + 2 + 12."
        ),
        "the first stage, not the largest": (
            "Here the first stage is often the largest, but not always. Take the maximum."
        ),
        "the last stage, not the largest": "The model fits when its fullest GPU does. Take the maximum.",
        "ZeRO-1 divides everything": (
            "ZeRO-1 divides the optimizer's state only: 4·N stays, 12·N/d is divided."
        ),
        "the master copy is forgotten": (
            "Mixed precision keeps a float32 copy of the weights beside m and v: 12 bytes, not 8."
        ),
        "the average stage, not the largest": (
            "The model fits when its fullest GPU does. Stages are not equal: take the largest."
        ),
        "all stages on one GPU": "A pipeline rank holds its own stage only.",
        "nothing divided by t": (
            "Tensor parallelism cuts every parameter: each of t ranks holds 1/t of the stage."
        ),
        "ZeRO-2 leaves gradients whole": (
            "ZeRO-2 divides the gradients as well: 2·N stays, 14·N/d is divided."
        ),
        "ZeRO-3 leaves weights whole": "ZeRO-3 divides the weights as well: 16·N/d.",
        "stages that do not add up": (
            "Each stage keeps what the one before divided: ZeRO-2 divides optimizer and gradients, ZeRO-3 all"
            " three."
        ),
        "float32 gradients": (
            "2 + 4 + 12 is mixed precision with float32 gradients. Here they are half precision: 2 + 2 + 12."
        ),
    }
    near = lambda a, b: abs(a - b) <= 1e-9 * max(abs(a), abs(b))
    truth = [bytes_per_gpu(*case) for case in cases]
    figures = [
        (f"ZeRO-{z}, you, and the fullest of 2 × 2 × 2 real ranks", f"{value:,.0f} B", f"{real:,} B")
        for z, (value, real) in enumerate(zip(said, measured))
    ]
    if (off := next((i for i, (a, b) in enumerate(zip(said, truth)) if not near(a, b)), 0)) > 3:
        s, d, t, z = cases[off]
        figures.append(
            (
                f"ZeRO-{z}, stages of {', '.join(f'{n:.3g}' for n in s)}, d = {d}, t = {t}",
                f"{said[off]:,.0f} B",
                f"{truth[off]:,.0f} B",
            )
        )
    if all(map(near, said, truth)):
        if any(round(value) != real for value, real in zip(said, measured)):
            raise AssertionError(f"the formula says {said[:4]}, the ranks hold {measured}")
        return right(
            "Equal to the byte to what the fullest of eight real ranks holds, for every ZeRO stage.", *figures
        )
    for name, other in others.items():
        if all(near(a, other(*case)) for a, case in zip(said, cases)):
            return wrong(name, why[name], *figures)
    case, value, target = next((c, a, b) for c, a, b in zip(cases, said, truth) if not near(a, b))
    return wrong(
        "another number",
        f"For stages of {', '.join(f'{n:,.0f}' for n in case[0])} parameters, d = {case[1]}, t = {case[2]},"
        f" ZeRO-{case[3]} you return {value:,.0f}; the fullest GPU holds {target:,.0f} bytes.",
        *figures,
    )


states = Exercise(
    "bytes per GPU",
    bytes_per_gpu,
    _judge_bytes,
    hints=[
        (
            "Begin without ZeRO: N parameters of the largest stage, cut by t, 16 bytes each: 2 weights, 2"
            " gradients, 12 optimizer."
        ),
        "ZeRO-1 divides the 12 by d, ZeRO-2 the gradients' 2 as well, ZeRO-3 the weights' 2 as well.",
        "Which stage? A run fails when one GPU is full: max(stages).",
    ],
)
