"""The emulated network against the theory's seconds, on eight real ranks: `python tools/bench/fabric.py`

Every operation costs some 4 ms more than it should, so the network is a slow one. Each row is the median of
seven runs' longest rank, as a ratio to `three_axes.paper.collectives.hop_by_hop`, with the formula beside it.
"""

import statistics
import time

import torch
import torch.distributed as dist
from report import save

from helpers import World
from three_axes.paper import collectives
from three_axes.plan import Network

NETWORK = Network(
    name="two slow nodes",
    gpus_per_node=4,
    intra_node_bandwidth=2.5e6,
    inter_node_bandwidth=0.5e6,
    intra_node_latency=1e-3,
    inter_node_latency=5e-3,
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
    with World(8, fabric=NETWORK) as world:
        for op in ("all_reduce", "all_gather", "broadcast", "send"):
            for members in ([0, 1, 2, 3], list(range(8)), [0, 4]):
                if op == "send" and len(members) > 2:
                    continue
                formula = collectives.seconds(op, 4 * ELEMENTS, members, NETWORK)
                events = collectives.hop_by_hop(op, 4 * ELEMENTS, tuple(members), NETWORK)
                measured = statistics.median(max(world.run(timed, op, members)) for _ in range(7))
                worst = max(worst, abs(measured / events - 1))
                took = [f"{1e3 * seconds:.1f} ms" for seconds in (formula, events, measured)]
                rows.append([f"{op} on {members}", *took, f"{measured / events:.3f}"])
    save(
        "fabric",
        "The emulated network: eight ranks on two nodes",
        ["operation", "by formula", "hop by hop", "measured", "measured / hop by hop"],
        rows,
        f"Largest difference {worst:.1%}.",
    )


if __name__ == "__main__":
    main()
