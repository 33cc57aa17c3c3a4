"""A sketch is a short summary of a tensor: a digest and some random sums. `verify` compares the ranks'
sketches, so that it sends no tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from .record import digest

WIDE = 1024  # columns of the matrix into which a tensor is folded for its random sums
SUMS = 8  # random sums of a tensor, from which its distance to another is estimated
OF = " of "  # in the name of an optimizer's state: "exp_avg of norm.weight"
FLAT = "the optimizer's parameter "  # begins the name of a parameter that no module has
PARAMETER, BUFFER, STATE = "parameter", "buffer", "optimizer state"
# Reasons not to watch a tensor.
OTHER = "other values on each rank"
ALONE = "on one rank only"
EITHER = "equal numbers, a copy's or a shard's"
SHARDED = "sharded"
SEEDED = "equal on stages that pass activations on: seeded alike, no copies"


class Sketch(NamedTuple):
    """A summary of a tensor. digest: of its bytes, in hexadecimal. sums: random sums of its numbers. length:
    its norm. constant: whether all its numbers are equal. copies: for a DTensor, a key that is equal on ranks
    with the same shard; otherwise ''. shape: of this rank's part. part: `PARAMETER` and so on.
    """

    digest: str
    sums: list[float]
    length: float
    constant: bool
    copies: str
    shape: Sequence[int] = ()
    part: str = PARAMETER


Sketches = Mapping[str, Sketch]


def sketch(name: str, tensor: torch.Tensor, copies: str = "", part: str = PARAMETER) -> Sketch:
    """The sketch of a tensor of this name. Its sums have random signs, equal on all ranks for one name. The
    tensor is folded into a matrix; the sign of a number is its row's sign times its column's. This is enough
    for the mean square of a sum to equal the tensor's squared length.
    """
    flat = tensor.detach().flatten().cpu()
    numbers = flat.double()
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    signs = torch.Generator().manual_seed(seed)
    matrix = torch.nn.functional.pad(numbers, (0, -len(numbers) % WIDE)).view(-1, WIDE)
    draw = lambda n: (torch.randint(0, 2, (n, SUMS), generator=signs) * 2 - 1).to(numbers.dtype)
    of_columns = draw(WIDE)
    sums = (draw(len(matrix)) * (matrix @ of_columns)).sum(0).tolist()
    constant = len(flat) < 2 or bool((flat == flat[0]).all())
    return Sketch(digest(flat).hex(), sums, float(numbers.norm()), constant, copies, list(tensor.shape), part)


def distance(a: Sketch, b: Sketch) -> float:
    """About |a − b| / |b|, because the mean square of random sums estimates a squared length."""
    square = sum((x - y) ** 2 for x, y in zip(a.sums, b.sums)) / SUMS
    return math.sqrt(square) / max(b.length, 1e-30)
