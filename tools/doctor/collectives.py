"""A check of `three-axes doctor`: every collective gives exact results, and its bytes are counted exactly."""

from __future__ import annotations

import torch
import torch.distributed as dist

from helpers.ranks import World
from helpers.toy import all_gather, reduce_scatter

from .check import both, check, expect, own_device, worlds

K = 16  # float32 numbers that each rank contributes


def _collectives() -> list[str]:
    """Run every collective on a rank, synchronous and asynchronous. Returns those that are not exact."""
    rank, n, device = dist.get_rank(), dist.get_world_size(), own_device()
    # mine: this rank's input; by: the input of rank r, on the CPU. size: their length, in units of K.
    mine = lambda size=1: torch.arange(K * size, device=device, dtype=torch.float32) + 1000 * rank
    by = lambda r, size=1: torch.arange(K * size, dtype=torch.float32) + 1000 * r
    empty = lambda size=1: torch.empty(K * size, device=device)
    parts = lambda x: list(x.chunk(n))
    total = lambda size=1: sum(by(r, size) for r in range(n))
    part = slice(rank * K, (rank + 1) * K)
    root = lambda x: x if rank == 0 else None
    every = torch.cat([by(r) for r in range(n)])
    exchanged = torch.cat([by(r, n)[part] for r in range(n)])
    cases = {  # size of the result (None: in place); the call; the expected result
        "all_reduce": (None, lambda x, a: dist.all_reduce(x, async_op=a), total()),
        "broadcast": (None, lambda x, a: dist.broadcast(x, 0, async_op=a), by(0)),
        "reduce": (None, lambda x, a: dist.reduce(x, 0, async_op=a), root(total())),
        "all_gather": (n, lambda x, a: dist.all_gather(parts(x), mine(), async_op=a), every),
        "all_gather into one": (n, lambda x, a: all_gather(x, mine(), async_op=a), every),
        "reduce_scatter": (1, lambda x, a: reduce_scatter(x, mine(n), async_op=a), total(n)[part]),
        "all_to_all": (n, lambda x, a: dist.all_to_all_single(x, mine(n), async_op=a), exchanged),
        "gather": (n, lambda x, a: dist.gather(mine(), root(parts(x)), async_op=a), root(every)),
        "scatter": (1, lambda x, a: dist.scatter(x, root(parts(mine(n))), async_op=a), by(0, n)[part]),
    }
    wrong = []
    for name, (size, call, expected) in cases.items():
        for how in ("synchronous", "asynchronous"):
            got = mine() if size is None else empty(size)
            work = call(got, how == "asynchronous")
            if work is not None:
                work.wait()
            if expected is not None and not torch.equal(got.cpu(), expected):
                wrong.append(f"{name}, {how}")
    dist.barrier()
    if n > 1:
        wrong += _sends(rank, n, mine, by, empty)
    return wrong


def _sends(rank, n, mine, by, empty) -> list[str]:
    """Send around the ring in three ways: blocking, started and waited for, and as a batch. Returns those
    that are not exact.
    """
    wrong, before, after = [], (rank - 1) % n, (rank + 1) % n
    for how in ("send and recv", "isend and recv", "a batch of isend and irecv"):
        x = empty()
        if how == "send and recv":
            for turn in (0, 1):  # one side of a pair sends while the other receives
                dist.send(mine(), after) if turn == (rank == 0) else dist.recv(x, before)
        elif how == "isend and recv":
            sent = dist.isend(mine(), after)
            dist.recv(x, before)
            sent.wait()
        else:
            pair = [dist.P2POp(dist.isend, mine(), after), dist.P2POp(dist.irecv, x, before)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
        if not torch.equal(x.cpu(), by(before)):
            wrong.append(how)
    return wrong


def _counts(n: int) -> dict[str, tuple[int, int]]:
    """Collective -> (calls, bytes of whole tensors) that the meter must count for `_collectives`."""
    sizes = dict.fromkeys(("all_reduce", "broadcast", "reduce"), 1)
    sizes |= dict.fromkeys(("reduce_scatter", "all_to_all", "gather", "scatter"), n)
    counts = {op: (2, 2 * 4 * K * size) for op, size in sizes.items()}
    counts |= {"all_gather": (4, 4 * 4 * K * n), "barrier": (1, 0)}
    return counts | ({"send": (3, 3 * 4 * K), "recv": (3, 3 * 4 * K)} if n > 1 else {})


@check(
    "every collective",
    "each exact, synchronous, asynchronous and as a batch, and each counted to the byte",
    "report it with your PyTorch's version: a backend answers in a way that the meter does not know",
)
def exact(meet: str) -> str:
    for name, n, gpus in worlds():
        with World(n, gpus=gpus, timeout=60) as world:
            for r, wrong in enumerate(world.run(_collectives)):
                expect(not wrong, f"on {name} rank {r} has other numbers after: {', '.join(wrong)}")
            expected = _counts(n)
            for r, rows in enumerate(world.traffic.ranks):
                counted = {row.op: (row.calls, row.payload) for row in rows}
                difference = f"on {name} rank {r} counted (calls, bytes) {counted}, not {expected}"
                expect(counted == expected, difference)
    calls, kinds = sum(calls for calls, _ in _counts(4).values()), len(_counts(4))
    return f"{calls} calls of {kinds} kinds exact and counted on {both(name for name, *_ in worlds())}"
