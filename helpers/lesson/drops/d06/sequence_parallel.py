"""Drop 06's second practice: an MLP under sequence parallelism."""

from __future__ import annotations

import re
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .... import toy
from ....runtime import current
from ....runtime.failure import RankError
from ....runtime.world import World
from ....theory.collectives import book
from ...practice import Answer, Exercise, right, wrong


def sequence_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down for this rank's tokens, with tensor and sequence parallelism.

    x: (b, s/t, h), this rank's tokens. up: (h, 4h/t) and down: (4h/t, h), this rank's parts. Return (b, s/t,
    h). toy.conjugate(forward, backward) makes an autograd function of two plain ones, each called with (x,
    group), such as toy.gather_tokens (b, s/t, h) -> (b, s, h), and toy.sum_tokens, which adds the ranks' (b,
    s, h) and keeps (b, s/t, h).
    """
    gather = toy.conjugate(toy.gather_tokens, toy.sum_tokens)
    scatter = toy.conjugate(toy.sum_tokens, toy.gather_tokens)
    return scatter(F.gelu(gather(x) @ up) @ down)


B, S, H = 2, 16, 32


def _sequence_on_rank(attempt):
    warnings.filterwarnings("ignore", "c10d::.*autograd kernel")  # what the judge says in plainer words
    rank, t = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(3)
    x, up, down, dy = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((B, S, H), (H, 4 * H), (4 * H, H), (B, S, H))
    )
    whole = x.clone().requires_grad_()
    y = F.gelu(whole @ up / 6) @ down
    y.backward(dy)
    mine = toy.my_tokens(x).requires_grad_()
    current.count_from_here()
    got = attempt(mine, up.chunk(t, 1)[rank] / 6, down.chunk(t, 0)[rank], rank, t)
    shape = tuple(got.shape) if isinstance(got, torch.Tensor) else None
    if shape != (B, S // t, H):
        return {"shape": shape}
    near = lambda a, b: torch.allclose(a, b, rtol=1e-7, atol=1e-9)
    gathered = any(row.op == "all_gather" for row in current.counted_so_far())
    sums = lambda: sum(
        row.calls for row in current.counted_so_far() if row.op in ("reduce_scatter", "all_reduce")
    )
    forward = sums()
    found = {
        "shape": shape,
        "gathered": gathered,
        "y": near(got, toy.my_tokens(y)),
        "cut": not got.requires_grad,
        "dx": False,
    }
    if got.requires_grad:
        got.backward(toy.my_tokens(dy))
        found["summed"] = sums() > forward
        if mine.grad is not None:
            found |= {"dx": near(mine.grad, toy.my_tokens(whole.grad))}
    return found


def _judge_sequence(attempt) -> Answer:
    for t in (2, 4):
        with World(t, timeout=5) as world:
            try:
                results = world.run(_sequence_on_rank, attempt)
            except RankError as e:
                shapes = [
                    re.findall(r"\[([\d, ]+)\]", s.error.message)
                    for s in e.seen
                    if s.error and "invalid gradient" in s.error.message
                ]
                if not shapes:
                    raise
                has, wanted = ([int(n) for n in shape.split(",")][1] for shape in shapes[0][-2:])  # tokens
                if has > wanted:
                    return wrong(
                        "the sum in backward is missing",
                        f"Before the pair, backward hands on a gradient of {has} tokens, where forward took"
                        f" this rank's {wanted}. Every rank used every token, so each has a share of every"
                        " token's gradient: add the shares, and keep your own tokens.",
                    )
                return wrong(
                    "the gather in backward is missing",
                    f"Behind the pair, backward hands on a gradient of {has} tokens, where forward took"
                    f" {wanted}. A rank gets the gradient of its own tokens there, and must gather all of"
                    " them.",
                )
            sent = max(world.traffic.counted)
        found = results[0]
        allowed = 2 * book("all_reduce", 8 * B * S * H, t)
        figures = [
            (f"bytes sent by the book, per rank of {t}", f"{sent:,.0f}", f"{allowed:,.0f}, as TP alone")
        ]
        if any(r["shape"] != (B, S // t, H) for r in results):
            return wrong(
                "another shape than the tokens'",
                f"On {t} ranks you return {found['shape']}; a rank keeps its own tokens, {(B, S // t, H)}.",
            )
        if not all(r["y"] for r in results):
            if not found["gathered"]:
                return wrong(
                    "no gather before the pair",
                    "The matrices are split by columns, so a rank computes some columns of every token: it"
                    " needs all tokens first.",
                )
            return wrong(
                "another output",
                f"On {t} ranks the output is not the twin's. Behind the pair each rank holds a share of a"
                " sum, for all tokens: add, and keep your own.",
            )
        if any(r["cut"] for r in results):
            return wrong(
                "an output cut off from x",
                "The output is right, but autograd cannot get back to x: toy.gather_tokens alone has no"
                " backward. toy.conjugate gives it one.",
                *figures,
            )
        if not all(r["dx"] for r in results) and not found["summed"]:
            return wrong(
                "the sum in backward is missing",
                "The output is right, the gradient of x is not. Every rank used every token, so each has a"
                " share of every token's gradient: before the pair, backward must add the shares.",
                *figures,
            )
        if not all(r["dx"] for r in results):
            return wrong(
                "the gather in backward is missing",
                "The output is right, the gradient of x is not. Backward mirrors forward: behind the pair a"
                " rank has the gradient of its own tokens only, and must gather all; before the pair each"
                " rank has a share of every token's gradient, to be added. (A bare toy.sum_tokens has no"
                " backward of its own; toy.conjugate gives it one.)",
                *figures,
            )
        if sent > 1.01 * allowed:
            return wrong(
                "more bytes than tensor parallelism alone",
                "Right, but it sends more than TP's two all-reduces. An all-reduce is a reduce-scatter and an"
                " all-gather: use just the half that is needed in each place.",
                *figures,
            )
    return right(
        "The tokens' output and gradients are the twin's, for exactly the bytes of tensor parallelism alone.",
        *figures,
    )


sequence = Exercise(
    "TP + SP",
    sequence_mlp,
    _judge_sequence,
    hints=[
        (
            "Before `up` a rank needs all tokens: gather. Behind `down` it has a share of a sum for all"
            " tokens, and wants its own tokens of the sum: toy.sum_tokens."
        ),
        (
            "What is the backward of a gather? Every rank used every token, so each has a share of every"
            " token's gradient: the shares must be added, and each rank keeps its own."
        ),
        "gather = toy.conjugate(toy.gather_tokens, toy.sum_tokens). The other one is its mirror image.",
    ],
)
