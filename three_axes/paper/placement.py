"""Which rank goes where: coordinates on the grid of axes, groups along each, and which of them leave a node.

`sizes` names the axes from the outermost to the innermost, such as {"pp": 2, "dp": 2, "tp": 2}. The innermost
coordinate changes fastest with the rank, so its groups are neighbours: rank = (j·d + i)·t + k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Sizes = dict[str, int]


def coordinates(rank: int, sizes: Sizes) -> dict[str, int]:
    """Where a rank stands along each axis. Raises ValueError for a rank that is not on the grid."""
    n = math.prod(sizes.values())
    if not 0 <= rank < n:
        raise ValueError(
            f"rank {rank} is not on a grid of {' × '.join(map(str, sizes.values()))} = {n}, whose ranks are 0"
            f" to {n - 1}"
        )
    place = {}
    for axis, size in reversed(sizes.items()):
        rank, place[axis] = divmod(rank, size)
    return {axis: place[axis] for axis in sizes}


def stride(axis: str, sizes: Sizes):
    """How many ranks apart neighbours on an axis are: the product of the sizes further in. Takes arrays."""
    return math.prod(list(sizes.values())[list(sizes).index(axis) + 1 :])


def reach(axis: str, sizes: Sizes, gpus_per_node: int) -> tuple:
    """(members of a group that share a node, nodes that the group is on). Takes arrays."""
    members = np.asarray(sizes[axis])
    inside = np.minimum(members, np.maximum(1, gpus_per_node // np.asarray(stride(axis, sizes))))
    return inside, -(-members // inside)


def group(rank: int, axis: str, sizes: Sizes) -> list[int]:
    """The ranks that differ from `rank` along `axis` only, itself among them."""
    step = stride(axis, sizes)
    first = rank - coordinates(rank, sizes)[axis] * step
    return [first + i * step for i in range(sizes[axis])]


def groups(axis: str, sizes: Sizes) -> list[list[int]]:
    """All groups along an axis. Together they hold every rank once."""
    return [list(g) for g in sorted({tuple(group(r, axis, sizes)) for r in range(math.prod(sizes.values()))})]


def crosses(ranks: Sequence[int], gpus_per_node: int) -> bool:
    """Whether these ranks are on more than one node."""
    return len({r // gpus_per_node for r in ranks}) > 1


def axis_between(a: int, b: int, sizes: Sizes) -> str | None:
    """The one axis along which two ranks differ; None if there is none or more than one: they never talk."""
    there = coordinates(b, sizes)
    differ = [axis for axis, i in coordinates(a, sizes).items() if there[axis] != i]
    return differ[0] if len(differ) == 1 else None
