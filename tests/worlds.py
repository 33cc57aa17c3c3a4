"""Worlds (groups of processes, one for each rank) that tests share."""

import os
import random
from contextlib import contextmanager

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"  # environment variable: where ranks write their flight records


class Shared:
    """A world of n ranks that tests use one after the other. It is closed when a rank has more than `many`
    groups: each group has a thread that wakes a hundred times a second. Groups are not ended alone, because
    an existing mesh or cache may still use them.
    """

    def __init__(self, n: int, many: int = 12, **how):
        self.n, self.many, self.how, self.world = n, many, how, None

    @contextmanager
    def lent(self):
        from helpers import World

        if self.world is None or not self.world.is_open:
            self.world = World(self.n, **self.how)
        yield self.world
        if not self.world.is_open or max(self.world.run(groups)) > self.many:
            self.close()

    def close(self):
        if self.world is not None:
            self.world.close()
            self.world = None


def shared(n: int, **how):
    """A fixture of the module that calls this: one `Shared`, which lends its world to the module's tests."""
    import pytest  # imported here because ranks import this file, and do not need pytest

    @pytest.fixture(scope="module")
    def made():
        shared = Shared(n, **how)
        yield shared
        shared.close()

    return made


class Lent:
    """Replaces `World` where exercises are checked. A world is used again if the check made no groups in it
    and caused no failure. With a new world for each check, the checks would take half as long again.
    """

    def __init__(self, new):
        self.new, self.idle = new, {}

    @contextmanager
    def __call__(self, n=4, *, timeout=30.0, memory=None, fabric=None):
        kind = n, fabric, os.environ.get(PREFIX)  # ranks keep the environment from their start
        world = self.idle.pop(kind, None) if memory is None else None
        world = world or self.new(n, memory=memory, fabric=fabric)
        world.timeout, world.quiet = timeout, 0.4  # hangs end sooner: no attempt of the tests has a thread
        as_new = False
        try:
            yield world
            mended = world._generation > 1  # after a failure
            as_new = memory is None and world.is_open and not mended and world.run(as_at_first) == [1] * n
        finally:
            if not as_new:
                world.close()
        if as_new:
            self.idle[kind] = world
        while len(self.idle) > 3:
            self.idle.pop(next(iter(self.idle))).close()

    def close(self):
        for world in self.idle.values():
            world.close()


def groups() -> int:
    """The number of groups of this rank, with the world's."""
    import torch.distributed as dist

    return len(dist.distributed_c10d._world.pg_map)


def as_at_first() -> int:
    """On a rank: remove a check's variables and set the seeds as on a new rank. Returns `groups()`."""
    import numpy
    import torch
    import torch.distributed as dist

    from helpers import rank_state

    for name in set(rank_state()) - {"__name__", "torch", "dist", "rank", "world_size", "device"}:
        del rank_state()[name]
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(dist.get_rank())
    return groups()
