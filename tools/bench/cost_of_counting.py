"""What counting costs: `python tools/bench/cost_of_counting.py`.

A step of DDP on the toy at hidden 256, on four gloo ranks. Some steps with and some without `counting` take
turns in the same processes, so that whatever else the machine does meets both alike. Wall time holds the
waiting for other ranks; the processor's time of a rank is steadier where the machine is busy. After a block
nothing is left in front of PyTorch's collectives, so that steps alone are of a process that never counted.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from report import save

from helpers import World, toy
from three_axes import counting

PAIRS, STEPS, RANKS, CALLS = 40, 4, 4, 200


def paired(pairs: int) -> list[tuple[float, float, float, float]]:
    """On a rank: of each pair of turns, wall and processor seconds of a step, alone and then counted."""
    model = torch.nn.parallel.DistributedDataParallel(toy.ToyTransformer(hidden=256))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = toy.make_batch(b=8, s=32)

    def step() -> None:
        toy.loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    def turn() -> tuple[float, float]:
        step()  # the first after a change finds cold caches
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            step()
        return (time.perf_counter() - wall) / STEPS, (time.process_time() - processor) / STEPS

    def counted() -> tuple[float, float]:
        with counting():
            return turn()

    step(), step()
    turns = []
    for i in range(pairs):
        before = counted() if i % 2 == 0 else ()
        turns.append(turn() + (before or counted()))
    return turns


def a_collective() -> tuple[float, float]:
    """Alone on a rank: seconds that an all-reduce of nothing takes the caller, alone and counted."""
    x, seconds = torch.ones(8), ([], [])

    def many() -> float:
        start = time.thread_time()
        for _ in range(CALLS):
            dist.all_reduce(x)
        return (time.thread_time() - start) / CALLS

    for _ in range(20):
        seconds[0].append(many())
        with counting():
            seconds[1].append(many())
    return tuple(map(min, seconds))


def main() -> None:
    with World(RANKS, counted=False, timeout=900) as world:
        steps = world.run(paired, PAIRS)
    with World(1, counted=False, timeout=300) as world:
        ((alone, counted),) = world.run(a_collective)
    rows = []
    for rank, pairs in enumerate(steps):
        row = [str(rank)]
        for clock in (0, 1):  # on the wall, and the processor's
            row.append(f"{1e3 * statistics.median(pair[clock] for pair in pairs):.1f} ms")
            row.append(f"{statistics.median(pair[2 + clock] / pair[clock] for pair in pairs) - 1:+.1%}")
        rows.append(row)
    title = f"What counting costs: {PAIRS} pairs of {STEPS} steps of DDP, hidden 256, {RANKS} ranks"
    columns = ["rank", "step alone", "counted", "of the processor", "counted"]
    more = f"{1e6 * (counted - alone):.0f} µs more when it is counted; a step of DDP has two."
    save("cost_of_counting", title, columns, rows, f"An all-reduce takes its caller {more}")


if __name__ == "__main__":
    main()
