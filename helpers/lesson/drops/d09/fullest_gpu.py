"""Drop 09's first practice: bytes of states on the fullest GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from .... import toy
from ....runtime import memory
from ....runtime.world import World
from ....toy.names import reduce_scatter
from ...practice import Answer, Exercise, Mistake, proven, right, wrong


def bytes_per_gpu(stages, d, t, zero):
    """(weights, gradients, optimizer's states): bytes of each on the fullest GPU, in mixed precision.

    stages: the number of parameters of each pipeline stage. d, t: sizes of data and tensor parallelism; t
    cuts every parameter. zero: 0 to 3. Half-precision weights and gradients; float32 master copy, m and v.
    """
    n = max(stages) / t
    return (
        2 * n / (d if zero >= 3 else 1),
        2 * n / (d if zero >= 2 else 1),
        12 * n / (d if zero >= 1 else 1),
    )


WIDTH, DEEP = 64, (3, 2)  # a stack of square matrices, unevenly over two stages


def _measured(zero: int) -> tuple[int, ...]:
    """One rank of 2 × 2 × 2: hold the states of its matrices in mixed precision, run a step, and count the
    bytes it holds: of weights, gradients, optimizer.
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
    held = tuple(sum(memory.storages(kind).values()) for kind in (kept, [gradient], [master, m, v]))
    dist.barrier(dp)
    return held


KINDS = ("weights", "gradients", "optimizer")
STAGES = [n * WIDTH * WIDTH for n in DEEP]
CASES = [
    *((STAGES, 2, 2, zero) for zero in range(4)),
    *(([7e9], 64, 1, zero) for zero in range(4)),
    ([1.75e10] * 2 + [2e10], 8, 8, 1),
    ([1e9, 2e9, 1e9], 4, 1, 2),
]


def _counted(sizes=(2, 2, 12), cut_at=(3, 2, 1), take=max, cut_by_t=(True, True, True)) -> Callable:
    """The answer with other bytes a parameter, other ZeRO stages that cut a kind, another number of
    parameters than the largest stage's, or kinds that t does not cut.
    """
    return lambda stages, d, t, zero: tuple(
        size * take(stages) / (t if by_t else 1) / (d if zero >= first else 1)
        for size, first, by_t in zip(sizes, cut_at, cut_by_t)
    )


HELD = "A rank has gradients only for the parameters it holds: its own stage's, cut by t."
KEEPS = "ZeRO-1 divides the optimizer's 12, ZeRO-2 the gradients' 2 as well, ZeRO-3 the weights' 2 as well."
FULLEST = "The model fits when its fullest GPU does. Stages are not equal: take the largest."
MISTAKES = (
    Mistake("gradients not divided by t", HELD, _counted(cut_by_t=(True, False, True))),
    Mistake(
        "gradients divided by neither t nor p",
        f"{HELD} Calculators that forget this answer ten times too much for a 70B.",
        lambda s, d, t, z: (
            bytes_per_gpu(s, d, t, z)[0],
            2 * sum(s) / (d if z >= 2 else 1),
            bytes_per_gpu(s, d, t, z)[2],
        ),
    ),
    Mistake(
        "ZeRO-1 divides everything", f"4·N stays whole under ZeRO-1. {KEEPS}", _counted(cut_at=(1, 1, 1))
    ),
    Mistake(
        "the master copy is forgotten",
        "Mixed precision keeps a float32 copy of the weights beside m and v: 12 bytes, not 8.",
        _counted((2, 2, 8)),
    ),
    Mistake("the average stage, not the largest", FULLEST, _counted(take=lambda s: sum(s) / len(s))),
    Mistake("the smallest stage, not the largest", FULLEST, _counted(take=min)),
    Mistake("the first stage, not the largest", FULLEST, _counted(take=lambda s: s[0])),
    Mistake("the last stage, not the largest", FULLEST, _counted(take=lambda s: s[-1])),
    Mistake("all stages on one GPU", "A pipeline rank holds its own stage only.", _counted(take=sum)),
    Mistake(
        "ZeRO left out", f"You answer the same whatever `zero` says. {KEEPS}", _counted(cut_at=(4, 4, 4))
    ),
    Mistake(
        "all float32, not mixed precision",
        "4 + 4 + 8 is the other way to 16. ZeRO divides them differently: mixed precision has 2 + 2 + 12.",
        _counted((4, 4, 8)),
    ),
    Mistake(
        "nothing divided by t",
        "Tensor parallelism cuts every parameter: each of t ranks holds 1/t of the stage.",
        _counted(cut_by_t=(False, False, False)),
    ),
    Mistake("ZeRO-2 leaves gradients whole", KEEPS, _counted(cut_at=(3, 3, 1))),
    Mistake("ZeRO-3 leaves weights whole", KEEPS, _counted(cut_at=(4, 2, 1))),
    Mistake("ZeRO-1 leaves the optimizer whole", KEEPS, _counted(cut_at=(3, 2, 2))),
    Mistake("each stage of ZeRO one too late", KEEPS, _counted(cut_at=(4, 3, 2))),
    Mistake("divided by d without ZeRO", f"0 is no ZeRO. {KEEPS}", _counted(cut_at=(3, 2, 0))),
    Mistake("ZeRO-1 divides the weights", KEEPS, _counted(cut_at=(1, 2, 1))),
    Mistake("ZeRO-2 and ZeRO-3 changed places", KEEPS, _counted(cut_at=(2, 3, 1))),
    Mistake("ZeRO's stages in the wrong order", KEEPS, _counted(cut_at=(1, 2, 3))),
    Mistake("ZeRO's stages in the wrong order", KEEPS, _counted(cut_at=(2, 1, 3))),
    Mistake("ZeRO's stages counted from 0", f"0 is no ZeRO. {KEEPS}", _counted(cut_at=(2, 1, 0))),
    Mistake(
        "stages that do not add up",
        f"Each stage keeps what the one before divided. {KEEPS}",
        lambda s, d, t, z: tuple(
            size * max(s) / t / (d if z == stage else 1) for size, stage in zip((2, 2, 12), (3, 2, 1))
        ),
    ),
    Mistake(
        "float32 gradients",
        "2 + 4 + 12 is mixed precision with float32 gradients. Here they are half precision: 2 + 2 + 12.",
        _counted((2, 4, 12)),
    ),
    Mistake("numbers, not bytes", "A half-precision number is 2 bytes, a float32 4.", _counted((1, 1, 3))),
    Mistake(
        "gigabytes, not bytes",
        "Your numbers are 10⁹ times too small: the check asks for bytes.",
        _counted((2e-9, 2e-9, 12e-9)),
    ),
    Mistake(
        "bytes of one parameter",
        "You count one parameter. A rank holds those of its stage, cut by t: multiply by their number.",
        lambda s, d, t, z: bytes_per_gpu([t], d, t, z),
    ),
    Mistake(
        "divided by p once more",
        "`stages` has the parameters of each stage, so p has divided the model already.",
        _counted(take=lambda s: max(s) / len(s)),
    ),
    Mistake(
        "t only where ZeRO cuts",
        "t cuts every parameter, and with it weights, gradients and optimizer, with ZeRO or without.",
        lambda s, d, t, z: tuple(
            size * max(s) / (d * t if z >= first else 1) for size, first in zip((2, 2, 12), (3, 2, 1))
        ),
    ),
    Mistake(
        "the master copy among the weights",
        "The sum is right without ZeRO. But the master copy is the optimizer's: ZeRO-1 divides it with m and"
        " v, 12 bytes, and only the 2 of half precision wait for ZeRO-3.",
        _counted((6, 2, 8)),
    ),
    Mistake(
        "the three in another order",
        "Your numbers are right, the optimizer's first. Return weights, gradients, optimizer.",
        _counted((12, 2, 2), (1, 2, 3)),
    ),
)


def _judge_bytes(attempt) -> Answer:
    with World(8, timeout=20) as world:
        answers = world.run(lambda: [attempt(list(s), d, t, z) for s, d, t, z in CASES])[0]
        measured = [max(world.run(_measured, zero), key=sum) for zero in range(4)]
    for i, (case, answer) in enumerate(zip(CASES, answers)):
        try:
            answers[i] = tuple(float(value) for value in answer if not isinstance(value, (str, bool)))
        except (TypeError, ValueError):
            answers[i] = ()
        if len(answers[i]) != 3:
            return wrong(
                "not three numbers",
                f"bytes_per_gpu{case} returned {answer!r}; return bytes of weights, of gradients and of the"
                " optimizer's states.",
            )
    alike = lambda a, b: all(abs(x - y) <= 1e-9 * max(abs(x), abs(y)) for x, y in zip(a, b))
    truth = [bytes_per_gpu(*case) for case in CASES]
    off = next((i for i, (a, b) in enumerate(zip(answers, truth)) if not alike(a, b)), None)
    number = lambda x: f"{x:,.0f}" if x >= 1 else f"{x:.3g}"
    show = lambda parts: " + ".join(map(number, parts)) + " B"
    called = lambda zero: f"ZeRO-{zero}" if zero else "no ZeRO"
    figures = [
        (f"{called(z)}, you, and the fullest of 2 × 2 × 2 real ranks", show(answers[z]), show(measured[z]))
        for z in range(4)
    ]
    if off is None:
        if any(not alike(answer, real) for answer, real in zip(answers, measured)):
            raise AssertionError(f"the formula says {answers[:4]}, the ranks hold {measured}")
        return right(
            "Equal to the byte to what the fullest of eight real ranks holds, for every ZeRO stage.", *figures
        )
    s, d, t, z = CASES[off]
    case = f"{called(z)}, stages of {', '.join(f'{n:,.0f}' for n in s)} parameters, d = {d}, t = {t}"
    if off > 3:
        figures.append((case, show(answers[off]), show(truth[off])))
    if mistake := proven(answers, CASES, MISTAKES, alike):
        return wrong(mistake.name, mistake.text, *figures)
    kinds = [kind for kind, a, b in zip(KINDS, answers[off], truth[off]) if not alike([a], [b])]
    return wrong(
        "another number",
        f"{case}: you return other bytes of {' and of '.join(kinds)}. You return {show(answers[off])}; the"
        f" fullest GPU holds {show(truth[off])}.",
        *figures,
    )


states = Exercise(
    "bytes per GPU",
    bytes_per_gpu,
    _judge_bytes,
    minutes=6,
    hints=[
        (
            "Begin without ZeRO: N parameters of the largest stage, cut by t, 16 bytes each: 2 weights, 2"
            " gradients, 12 optimizer."
        ),
        "ZeRO-1 divides the 12 by d, ZeRO-2 the gradients' 2 as well, ZeRO-3 the weights' 2 as well.",
        "Which stage? A run fails when one GPU is full: max(stages).",
    ],
)
