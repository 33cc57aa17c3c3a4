"""Copies that were equal must stay equal. Needs no ranks: only the marks of each rank's tensors."""

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


class Mark(NamedTuple):
    """What stands for a tensor: a digest, some random sums, its length, and whether all its numbers are one.
    copies: what tells ranks with a shard of the same place, for DTensors.
    """

    digest: str
    sums: list[float]
    length: float
    constant: bool
    copies: str


Marks = Mapping[str, Mark]


def mark(name: str, tensor: torch.Tensor, copies: str = "") -> Mark:
    """The same random signs are taken for a name on all ranks: a row's times a column's, which are enough for
    the mean square of a sum to be the square of a length.
    """
    flat = tensor.detach().flatten().cpu()
    numbers = flat.float() if flat.is_floating_point() else flat.double()
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    signs = torch.Generator().manual_seed(seed)
    box = torch.nn.functional.pad(numbers, (0, -len(numbers) % WIDE)).view(-1, WIDE)
    draw = lambda n: (torch.randint(0, 2, (n, TRIED), generator=signs) * 2 - 1).to(numbers.dtype)
    across = draw(WIDE)
    sums = (draw(len(box)) * (box @ across)).sum(0).tolist()
    constant = len(flat) < 2 or bool((flat == flat[0]).all())
    return Mark(digest(flat).hex(), sums, float(numbers.norm()), constant, copies)


def distance(a: Mark, b: Mark) -> float:
    """About |a − b| / |b|: the mean square of random sums is the square of a length."""
    square = sum((x - y) ** 2 for x, y in zip(a.sums, b.sums)) / TRIED
    return math.sqrt(square) / max(b.length, 1e-30)


class Drift(NamedTuple):
    """A tensor whose copies were equal and are not. groups: of ranks that had equal ones, each as rank -> its
    copy now. far: the largest distance, relative.
    """

    step: int
    name: str
    groups: list[dict[int, str]]
    far: float


class Copies:
    """Which ranks hold equal copies, from a first look at all ranks' marks on. What an optimizer keeps of a
    parameter is equal where the parameter is.
    """

    def __init__(self, first: Sequence[Marks]):
        self.groups: dict[str, list[list[int]]] = {}
        for name in dict.fromkeys(name for marks in first for name in marks if OF not in name):
            alike: dict[object, list[int]] = {}
            for rank, marks in enumerate(first):
                if name in marks:
                    alike.setdefault(_kind(name, marks), []).append(rank)
            if groups := [ranks for ranks in alike.values() if len(ranks) > 1]:
                self.groups[name] = groups

    def look(self, step: int, now: Sequence[Marks]) -> list[Drift]:
        """Those that have parted. They are not watched any more: of what belongs to a parameter, the
        parameter itself is told where it is among them.
        """
        drifts = []
        kept = dict.fromkeys(name for marks in now for name in marks if OF in name)
        for name in [*self.groups, *kept]:
            watched = name.rpartition(OF)[2]
            parted, far = [], 0.0
            for ranks in self.groups.get(watched, ()):
                marks = {rank: now[rank][name] for rank in ranks if name in now[rank]}
                if len({one.digest for one in marks.values()}) > 1:
                    parted.append({rank: one.digest for rank, one in marks.items()})
                    far = max(far, *(distance(one, marks[min(marks)]) for one in marks.values()))
            if parted:
                drifts.append(Drift(step, name, parted, far))
                del self.groups[watched]
        return drifts


def _kind(name: str, marks: Marks) -> tuple:
    """Equal on ranks that hold copies. Ones and zeros are equal everywhere, and may be shards of a tensor
    that is cut with the others of its module (a bias beside its matrix): these must be equal too.
    """
    module = name.rpartition(".")[0]
    beside = (
        one.digest for other, one in marks.items() if other.rpartition(".")[0] == module and not one.constant
    )
    return marks[name].digest, marks[name].copies, tuple(beside) if marks[name].constant else ()
