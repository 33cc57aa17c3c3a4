"""Places ranks on the grid of axes: a rank's coordinates, the groups along each axis, and which groups leave
a node.

The innermost coordinate changes fastest with the rank, so its groups are neighbours. With pp outermost and tp
innermost, rank = (j·d + i)·t + k for the coordinates j along pp, i along dp and k along tp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Placement(NamedTuple):
    """sizes: axis -> number of ranks, from the outermost to the innermost, such as {"pp": 2, "dp": 2, "tp":
    2}. `stride` and `reach` also accept arrays of sizes.
    """

    sizes: dict[str, int]

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's coordinate along each axis. Raises ValueError for a rank that is not on the grid."""
        n = math.prod(self.sizes.values())
        if not 0 <= rank < n:
            raise ValueError(
                f"rank {rank} is not on a grid of {' × '.join(map(str, self.sizes.values()))} = {n}, whose"
                f" ranks are 0 to {n - 1}"
            )
        place = {}
        for axis, size in reversed(self.sizes.items()):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.sizes}

    def stride(self, axis: str):
        """The distance in ranks between neighbours on an axis: the product of the sizes further in."""
        return math.prod(list(self.sizes.values())[list(self.sizes).index(axis) + 1 :])

    def reach(self, axis: str, gpus_per_node: int) -> tuple:
        """(members of a group that share a node, nodes that the group is on)."""
        members = np.asarray(self.sizes[axis])
        inside = np.minimum(members, np.maximum(1, gpus_per_node // np.asarray(self.stride(axis))))
        return inside, -(-members // inside)

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks whose coordinates differ from those of `rank` along `axis` only, and `rank` itself."""
        step = self.stride(axis)
        first = rank - self.coordinates(rank)[axis] * step
        return [first + i * step for i in range(self.sizes[axis])]

    def groups(self, axis: str) -> list[list[int]]:
        """All groups along an axis. Together they hold every rank once."""
        ranks = range(math.prod(self.sizes.values()))
        return [list(group) for group in sorted({tuple(self.group(rank, axis)) for rank in ranks})]

    def axis_between(self, a: int, b: int) -> str | None:
        """The only axis along which two ranks differ; None if they differ along none, or along several."""
        of_b = self.coordinates(b)
        differ = [axis for axis, i in self.coordinates(a).items() if of_b[axis] != i]
        return differ[0] if len(differ) == 1 else None


def crosses(ranks: Sequence[int], gpus_per_node: int) -> bool:
    """Whether these ranks are on more than one node."""
    return len({rank // gpus_per_node for rank in ranks}) > 1
