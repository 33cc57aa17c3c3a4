"""What stands for a tensor, so that ranks need not send it: a mark."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .record import digest

WIDE = 1024
TRIED = 8  # random sums of a tensor, from which its distance to another is judged
OF = " of "  # in the name of what an optimizer keeps: "exp_avg of norm.weight"
FLAT = "the optimizer's parameter "  # in the name of one that no module has
PARAMETER, BUFFER, STATE = "parameter", "buffer", "optimizer state"
AVERAGE, RANDOM = "average of the weights", "random state"
# Reasons for which a tensor is not watched.
OTHER = "other values on each rank"
ALONE = "on one rank only"
EITHER = "equal numbers, a copy's or a shard's"
SHARDED = "sharded"
SEEDED = "equal on stages that pass activations on: seeded alike, no copies"


class Mark(NamedTuple):
    """What stands for a tensor: a digest, some random sums, its length, and whether all its numbers are one.
    copies: what tells ranks with a shard of the same place, for DTensors. shape: of what this rank holds.
    part: `PARAMETER` and so on.
    """

    digest: str
    sums: list[float]
    length: float
    constant: bool
    copies: str
    shape: Sequence[int] = ()
    part: str = PARAMETER


Marks = Mapping[str, Mark]


def mark(name: str, tensor: torch.Tensor, copies: str = "", part: str = PARAMETER) -> Mark:
    """The mark of a tensor of this name. Its sums are taken with random signs, the same for a name on all
    ranks: a row's sign times a column's, which is enough for the mean square of a sum to be the square of a
    length.
    """
    flat = tensor.detach().flatten().cpu()
    numbers = flat.double()
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    signs = torch.Generator().manual_seed(seed)
    box = torch.nn.functional.pad(numbers, (0, -len(numbers) % WIDE)).view(-1, WIDE)
    draw = lambda n: (torch.randint(0, 2, (n, TRIED), generator=signs) * 2 - 1).to(numbers.dtype)
    across = draw(WIDE)
    sums = (draw(len(box)) * (box @ across)).sum(0).tolist()
    constant = len(flat) < 2 or bool((flat == flat[0]).all())
    return Mark(digest(flat).hex(), sums, float(numbers.norm()), constant, copies, list(tensor.shape), part)


def distance(a: Mark, b: Mark) -> float:
    """About |a − b| / |b|: the mean square of random sums is the square of a length."""
    square = sum((x - y) ** 2 for x, y in zip(a.sums, b.sums)) / TRIED
    return math.sqrt(square) / max(b.length, 1e-30)
