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
from ...practice import Answer, Exercise, Mistake, proven, right, wrong


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


def _numbers() -> tuple[torch.Tensor, ...]:
    """x, up, down and dy, whole, the same on all ranks and here."""
    g = torch.Generator().manual_seed(3)
    x, up, down, dy = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((B, S, H), (H, 4 * H), (4 * H, H), (B, S, H))
    )
    return x, up / 6, down, dy


def _sequence_on_rank(attempt) -> dict:
    """One rank's part: the attempt's output and gradient of x, and its collectives forward and backward."""
    warnings.filterwarnings("ignore", "c10d::.*autograd kernel")  # what the judge says in plainer words
    rank, t = dist.get_rank(), dist.get_world_size()
    x, up, down, dy = _numbers()
    mine = toy.my_tokens(x).requires_grad_()
    current.count_from_here()
    calls = lambda *ops: sum(row.calls for row in current.counted_so_far() if row.op in ops)
    got = attempt(mine, up.chunk(t, 1)[rank], down.chunk(t, 0)[rank], rank, t)
    shape = tuple(got.shape) if isinstance(got, torch.Tensor) else f"a {type(got).__name__}"
    if shape != (B, S // t, H) or got.dtype != x.dtype:
        return {"shape": shape if shape != (B, S // t, H) else got.dtype}
    gathers, sums = calls("all_gather"), calls("reduce_scatter", "all_reduce")
    if got.requires_grad:
        got.backward(toy.my_tokens(dy))
    return {
        "shape": shape,
        "y": got.detach().clone(),
        "dx": mine.grad,
        "cut": not got.requires_grad,
        "gathered": gathers,
        "gathered back": calls("all_gather") - gathers,
        "summed back": calls("reduce_scatter", "all_reduce") - sums,
    }


class _Paper:
    """What t ranks hold, by hand: the right output and gradient, and what mistakes give."""

    def __init__(self, t: int):
        self.t, (self.x, self.up, self.down, self.dy) = t, _numbers()
        whole = self.x.clone().requires_grad_()
        y = F.gelu(whole @ self.up) @ self.down
        y.backward(self.dy)
        self.y, self.dx = y.detach(), whole.grad

    def mine(self, whole, r: int):
        """A rank's tokens."""
        return whole.chunk(self.t, 1)[r]

    def part(self, r: int, bend=F.gelu, cuts: int = 1):
        """A rank's share of the output, for all tokens. cuts: how often each matrix is cut."""
        up, down = self.up, self.down
        for _ in range(cuts):
            up, down = up.chunk(self.t, 1)[r], down.chunk(self.t, 0)[r]
        return bend(self.x @ up) @ down

    def sum(self, **how):
        return sum(self.part(r, **how) for r in range(self.t))

    def outputs(self) -> list[Mistake]:
        """Wrong outputs that have a name; `answers` takes a rank."""
        plain, tanh = lambda x: x, lambda x: F.gelu(x, approximate="tanh")
        pieces = [x.chunk(self.t, 1) for x in self.x.chunk(self.t, 1)]
        summed = [sum(piece[r] for piece in pieces) for r in range(self.t)]  # a rank's tokens, of all mixed
        cut = list(zip(self.up.chunk(self.t, 1), self.down.chunk(self.t, 0)))
        swapped = torch.cat([F.gelu(x @ up) @ down for x, (up, down) in zip(summed, cut)], 1)
        return (
            [
                Mistake(
                    "gather and sum changed places", WHY["gather and sum changed places"], lambda r: swapped
                )
            ]
            + [
                Mistake(name, WHY[name], lambda r, whole=whole: self.mine(whole(r), r))
                for name, whole in (
                    ("the mean where the sum was meant", lambda r: self.y / self.t),
                    ("summed where it is a sum already", lambda r: self.y * self.t),
                    ("matrices that are cut twice", lambda r: self.sum(cuts=2)),
                    ("the non-linearity is left out", lambda r: self.sum(bend=plain)),
                    ("another non-linearity", lambda r: self.sum(bend=F.relu)),
                    ("another non-linearity", lambda r: self.sum(bend=tanh)),
                    ("gelu in another place", lambda r: F.gelu(self.sum(bend=plain))),
                    ("gelu in another place", lambda r: F.gelu(self.x) @ self.up @ self.down),
                    (
                        "gelu in another place",
                        lambda r: sum(F.gelu(self.part(i, plain)) for i in range(self.t)),
                    ),
                    ("partial outputs never summed", self.part),
                    *(
                        ("another rank's tokens", lambda r, k=k: self.y.roll(-k * (S // self.t), 1))
                        for k in range(1, self.t)
                    ),
                )
            ]
            + [
                Mistake(
                    "partial outputs never summed",
                    WHY["partial outputs never summed"],
                    lambda r: self.mine(self.part(r), 0),
                ),
                Mistake(
                    "another rank's tokens", WHY["another rank's tokens"], lambda r: self.mine(self.y, 0)
                ),
            ]
        )

    def gradients(self) -> list[Mistake]:
        """Wrong gradients of x that have a name; `answers` takes a rank."""
        mixed = sum(self.dx.chunk(self.t, 1))
        return [
            Mistake(name, WHY[name], answers)
            for name, answers in (
                ("a gradient summed once too often", lambda r: self.t * self.mine(self.dx, r)),
                ("gradients of different tokens added", lambda r: mixed),
                ("a gradient that is divided", lambda r: self.mine(self.dx, r) / self.t),
            )
        ]


WHY = {
    "gather and sum changed places": "You add before the pair, and gather after it. Before `up` a rank needs"
    " all tokens; after `down` it has a partial sum.",
    "the mean where the sum was meant": "The output is the twin's, divided by the number of ranks. The ranks"
    " hold partial sums: nothing is to be divided.",
    "summed where it is a sum already": "The output is the twin's, times the number of ranks: it is summed"
    " once too often.",
    "matrices that are cut twice": "up and down are this rank's parts already. Use them as they are.",
    "the non-linearity is left out": "There is no gelu between the two products.",
    "another non-linearity": "The output is that of relu, or of gelu by tanh. Use F.gelu as it is.",
    "gelu in another place": "gelu belongs between the two products: behind `up`, before `down`.",
    "partial outputs never summed": "After the pair each rank holds a partial sum, for all tokens. You"
    " keep some tokens of your own partial sum: add the partial sums first, as toy.sum_tokens does.",
    "another rank's tokens": "The sum is right, but a rank keeps tokens that are not its own.",
    "a gradient summed once too often": "The output is right. The gradient of x is as many times too large as"
    " there are ranks: it is added where it is whole already. No toy.Enter is needed:"
    " the gather's backward adds.",
    "gradients of different tokens added": "The output is right. The gradient of x is the sum over ranks that"
    " hold different tokens: an all-reduce, as toy.Enter's, mixes them. Before the pair stands a gather.",
    "a gradient that is divided": "The output is right. The gradient of x is the twin's, divided by the"
    " number of ranks. Add the partial sums, and do not divide.",
}


def _crashed(error: RankError) -> Answer | None:
    """Shapes that autograd refuses tell which half of backward is missing."""
    shapes = [
        re.findall(r"\[([\d, ]+)\]", s.error.message)
        for s in error.seen
        if s.error and "invalid gradient" in s.error.message
    ]
    if any(s.error and "shapes cannot be multiplied" in s.error.message for s in error.seen):
        return Answer(
            "crashed",
            "Two matrices do not meet. up, (h, 4h/t), and down, (4h/t, h), are this rank's parts already, and"
            f" all h columns of x meet `up`.\n\n{error.report}",
            "matrices that do not meet",
        )
    if any(s.error and "for @: 'function' and 'Tensor'" in s.error.message for s in error.seen):
        return Answer(
            "crashed",
            "toy.conjugate(forward, backward) takes the two functions themselves and returns a function. Call"
            f" that with x: f(x).\n\n{error.report}",
            "a function where its result is meant",
        )
    if not shapes:
        return None
    has, wanted = ([int(n) for n in shape.split(",")][1] for shape in shapes[0][-2:])  # tokens
    if has > wanted:
        return wrong(
            "the sum in backward is missing",
            f"Before the pair, backward hands on a gradient of {has} tokens, where forward took this rank's"
            f" {wanted}. Every rank used every token, so each has a partial sum of every token's gradient:"
            " add them, and keep your own tokens.",
        )
    return wrong(
        "the gather in backward is missing",
        f"After the pair, backward hands on a gradient of {has} tokens, where forward took {wanted}. A rank"
        " gets the gradient of its own tokens there, and must gather all of them.",
    )


def _judge_sequence(attempt) -> Answer:
    for t in (2, 4):
        with World(t, timeout=5) as world:
            try:
                results = world.run(_sequence_on_rank, attempt)
            except RankError as e:
                if answer := _crashed(e):
                    return answer
                raise
            sent = max(world.traffic.counted)
        allowed = 2 * book("all_reduce", 8 * B * S * H, t)
        figures = [
            (f"bytes sent by the book, per rank of {t}", f"{sent:,.0f}", f"{allowed:,.0f}, as TP alone")
        ]
        returned = results[0]["shape"]
        if returned == "a NoneType":
            return wrong("nothing returned", "Your function returns nothing. Is there a return?")
        if any(r["shape"] != (B, S // t, H) for r in results):
            return wrong(
                "another shape than the tokens'",
                f"On {t} ranks you return {returned}; a rank keeps its own tokens, {(B, S // t, H)}, in x's"
                " float64.",
            )
        if answer := _wrong_values(results, t):
            answer.figures = figures
            return answer
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


def _wrong_values(results: list[dict], t: int) -> Answer | None:
    """What is wrong with outputs or gradients; None if nothing is."""
    near = lambda a, b: torch.allclose(a, b, rtol=1e-7, atol=1e-9)
    paper, ranks = _Paper(t), [(r,) for r in range(t)]
    if not all(near(r["y"], paper.mine(paper.y, i)) for i, r in enumerate(results)):
        if mistake := proven([r["y"] for r in results], ranks, paper.outputs(), near):
            return wrong(mistake.name, f"On {t} ranks: {mistake.text}")
        if not any(r["gathered"] for r in results):
            return wrong(
                "no gather before the pair",
                "No all-gather ran forward. The matrices are split by columns, so a rank computes some"
                " columns of every token: it needs all tokens first.",
            )
        ratio = (results[0]["y"].norm() / paper.mine(paper.y, 0).norm()).item()
        return wrong(
            "another output",
            f"On {t} ranks the output is not the twin's: on rank 0 its length is {ratio:.2f} times the"
            " twin's.",
        )
    if any(r["cut"] or r["dx"] is None for r in results):
        return wrong(
            "an output cut off from x",
            "The output is right, but autograd cannot get back to x: toy.gather_tokens alone has no backward."
            " toy.conjugate gives it one.",
        )
    if all(near(r["dx"], paper.mine(paper.dx, i)) for i, r in enumerate(results)):
        return None
    if mistake := proven([r["dx"] for r in results], ranks, paper.gradients(), near):
        return wrong(mistake.name, mistake.text)
    if not any(r["summed back"] for r in results):
        return wrong(
            "the sum in backward is missing",
            "The output is right, the gradient of x is not, and nothing was summed in backward. Every rank"
            " used every token, so each has a partial sum of every token's gradient: before the pair,"
            " backward must add them.",
        )
    if not any(r["gathered back"] for r in results):
        return wrong(
            "the gather in backward is missing",
            "The output is right, the gradient of x is not, and nothing was gathered in backward. Backward"
            " mirrors forward: after the pair a rank has the gradient of its own tokens only, and must"
            " gather all. (A bare toy.sum_tokens has no backward of its own; toy.conjugate gives it one.)",
        )
    ratio = (results[0]["dx"].norm() / paper.mine(paper.dx, 0).norm()).item()
    return wrong(
        "another gradient of x",
        "The output is right, the gradient of x is not: on rank 0 its length is"
        f" {ratio:.2f} times the twin's. Backward mirrors forward, in reverse order: gather, then add the"
        " partial sums and keep your own tokens.",
    )


sequence = Exercise(
    "TP + SP",
    sequence_mlp,
    _judge_sequence,
    minutes=12,
    hints=[
        (
            "Before `up` a rank needs all tokens: gather. After `down` it has a partial sum for all tokens,"
            " and must keep its own tokens of the sum: toy.sum_tokens."
        ),
        (
            "What is the backward of a gather? Every rank used every token, so each has a partial"
            " sum of every token's gradient. Add them, and let each rank keep its own tokens."
        ),
        "gather = toy.conjugate(toy.gather_tokens, toy.sum_tokens). The other one is its mirror image.",
    ],
)
