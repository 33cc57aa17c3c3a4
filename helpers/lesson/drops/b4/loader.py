"""What the seven runs of b4 read: batches, files, settings, routes. The seed decides on which rank, and in
which step, something is not as on the others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch

STEPS, ROWS, WIDTH = 8, 8, 8
LATE = 1.5  # seconds that the slow file takes


def odd_one(seed: int) -> tuple[int, int]:
    """(rank, step) where it happens: rank 0 to 3, step 2 to 5."""
    chance = random.Random(seed)
    return chance.randrange(4), chance.randrange(2, 6)


def batches(seed: int, rank: int, steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """x (rows, width) and y (rows,) of each step. In one batch of one rank no y is positive."""
    chance = torch.Generator().manual_seed(100 * seed + rank)
    for step in range(steps):
        x, y = torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, generator=chance)
        y[0] = 1.0
        yield x, -y.abs() if (rank, step) == odd_one(seed) else y


def shard(seed: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of this rank's files. One rank has fewer of them."""
    where, step = odd_one(seed)
    return batches(seed, rank, step if rank == where else STEPS)


def settings(seed: int) -> tuple[int, int]:
    """(the rank that writes, the step after which it does), as the job's settings have them."""
    return odd_one(seed)


def read(seed: int, rank: int, step: int) -> float:
    """A number from the file of this rank and step. One file is broken."""
    if (rank, step) == odd_one(seed):
        raise OSError(f"cannot read step-{step}.bin")
    return 0.0


def fetch(seed: int, rank: int, step: int) -> float:
    """A number from a file on another machine. One of them takes its time."""
    if (rank, step) == odd_one(seed):
        time.sleep(LATE)
    return 0.0


def ready(seed: int, rank: int, step: int) -> tuple[str, str]:
    """Names of gradients, in the order in which this rank's backward has them ready."""
    return ("expert", "dense") if (rank, step) == odd_one(seed) else ("dense", "expert")


def route(seed: int, rank: int, step: int) -> tuple[list[int], list[int]]:
    """(give, take): how many rows go to each rank, and how many come from each. Every row goes to one rank;
    one rank, in one step, counts one twice.
    """
    share = (2, 1, 3, 2)
    give = [share[(other - rank + step) % 4] for other in range(4)]
    take = [share[(rank - other + step) % 4] for other in range(4)]
    if (rank, step) == odd_one(seed):
        give[(rank + 1) % 4] += 1
    return give, take
