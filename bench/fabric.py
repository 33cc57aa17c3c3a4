"""The emulated network against the theory's seconds, on eight real ranks: `python bench/fabric.py`

Every operation costs some 4 ms more than it should, so the network is a slow one.
Each row is the median of seven runs' longest rank, as a ratio to `theory.collectives.seconds`.
"""

import statistics
import time

import torch
import torch.distributed as dist
from report import save

from helpers import World
from helpers.theory import DEVICES, Cluster
from helpers.theory.collectives import seconds

CLUSTER = Cluster(
    "two slow nodes", DEVICES["a100-80gb"], node=4, link=2.5e6, nic=0.5e6, link_latency=1e-3, nic_latency=5e-3
)
ELEMENTS = 50_000


def timed(op: str, members: list[int]) -> float:
    group = dist.new_group(members) if len(members) < 8 else None
    if dist.get_rank() not in members:
        return 0.0
    x, parts = torch.ones(ELEMENTS), [torch.ones(ELEMENTS // len(members)) for _ in members]
    dist.barrier(group)
    start = time.monotonic()
    if op == "all_reduce":
        dist.all_reduce(x, group=group)
    elif op == "all_gather":
        dist.all_gather(parts, parts[0].clone(), group=group)
    elif op == "broadcast":
        dist.broadcast(x, members[0], group=group)
    else:
        dist.send(x, members[1]) if dist.get_rank() == members[0] else dist.recv(x, members[0])
    return time.monotonic() - start


def main() -> None:
    rows, worst = [], 0.0
    with World(8, fabric=CLUSTER) as world:
        for op in ("all_reduce", "all_gather", "broadcast", "send"):
            for members in ([0, 1, 2, 3], list(range(8)), [0, 4]):
                if op == "send" and len(members) > 2:
                    continue
                theory = seconds(op, 4 * ELEMENTS, members, CLUSTER)
                measured = statistics.median(max(world.run(timed, op, members)) for _ in range(7))
                worst = max(worst, abs(measured / theory - 1))
                rows.append(
                    [
                        f"{op} on {members}",
                        f"{1e3 * theory:.1f} ms",
                        f"{1e3 * measured:.1f} ms",
                        f"{measured / theory:.3f}",
                    ]
                )
    save(
        "fabric",
        "The emulated network: eight ranks on two nodes",
        ["operation", "theory", "measured", "ratio"],
        rows,
        f"Largest difference {worst:.1%}.",
    )


if __name__ == "__main__":
    main()
