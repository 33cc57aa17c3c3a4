"""Drop 06: what tensor and sequence parallelism send, by hand and by PyTorch, inside and between nodes."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F

from helpers import toy
from helpers.practice import OnRanks, needs_more
from three_axes.paper import algorithmic_bytes

# -- practice: an MLP under sequence parallelism --------------------------------------------------


def sequence_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down for this rank's tokens, with tensor and sequence parallelism.

    x: (b, s/t, h), this rank's tokens. up: (h, 4h/t) and down: (4h/t, h), this rank's parts. Return (b, s/t,
    h). toy.conjugate(forward, backward) makes an autograd function of two plain functions of (x, group).
    Two of these are toy.gather_tokens, (b, s/t, h) -> (b, s, h), and toy.sum_tokens, which adds the ranks'
    (b, s, h), and keeps this rank's tokens, (b, s/t, h).
    """
    # The backward of a gather is a sum of which each rank keeps its own tokens; and the other way round.
    gather = toy.conjugate(toy.gather_tokens, toy.sum_tokens)
    scatter = toy.conjugate(toy.sum_tokens, toy.gather_tokens)
    return scatter(F.gelu(gather(x) @ up) @ down)


B, S, H = 2, 16, 32  # sequences, tokens of each, hidden size


def _numbers() -> list[torch.Tensor]:
    """x, up, down and dy, whole, the same on all ranks."""
    chance = torch.Generator().manual_seed(3)
    shapes = (B, S, H), (H, 4 * H), (4 * H, H), (B, S, H)
    x, up, down, dy = (torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in shapes)
    return [x, up / 6, down, dy]


def _parts(rank: int, t: int) -> list[tuple]:
    warnings.filterwarnings("ignore", "c10d::.*autograd kernel")  # the verdict explains it better
    x, up, down, _ = _numbers()
    return [(toy.my_tokens(x).requires_grad_(), up.chunk(t, 1)[rank], down.chunk(t, 0)[rank], rank, t)]


sequence = OnRanks(
    "TP + SP",
    sequence_mlp,
    minutes=10,
    hints=[
        "Before `up` a rank needs all tokens: gather. After `down` it has a partial sum for all tokens, and"
        " must keep its own tokens of the sum: toy.sum_tokens.",
        "What is the backward of a gather? Every rank used every token, so each has a partial sum of every"
        " token's gradient. Add them, and let each rank keep its own tokens.",
        "gather = toy.conjugate(toy.gather_tokens, toy.sum_tokens). The other one is its mirror image.",
    ],
    tries=((2,), (4,)),
    inputs=_parts,
    gradient=lambda arguments: toy.my_tokens(_numbers()[3]),
    finds=needs_more(bytes="more bytes than tensor parallelism alone"),
    praise="The tokens' output and gradients are the twin's, for exactly the bytes of tensor parallelism"
    " alone.",
    figures=lambda run, truth: [
        (
            f"bytes sent by the book, per rank of {run.n}; the target is TP's alone",
            f"{run.most('bytes'):,.0f}",
            f"{2 * algorithmic_bytes('all_reduce', 8 * B * S * H, run.n):,.0f}",
        )
    ],
)
