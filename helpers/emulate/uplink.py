"""A node's uplink on an emulated network: all ports of the node send through it.

An oversubscribed switch carries less than a node's ports could send together. A *transfer* is what one
operation sends out of one node. Transfers that run at the same time share the uplink evenly. An operation
ends at its usual time or at the end of its transfers, whichever is later (`fabric`).
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from three_axes.checks import positive
from three_axes.paper import Network, algorithmic_bytes

SLOTS = 1 << 12  # transfers that fit into an uplink's file; a further one overwrites the oldest
RECENT = 64  # the number of transfers that may still run; all older ones are taken to have ended
# key: names the operation, the same on all its ranks. start: seconds by `time.monotonic()`. size: bytes that
# leave the node.
TRANSFER = np.dtype([("key", "u8"), ("start", "f8"), ("size", "f8")])


@dataclass(frozen=True, kw_only=True)
class Oversubscribed(Network):
    """A network for `World(n, fabric=…)` with a switch that passes less than the ports could send.

    uplink_bandwidth: bytes/s that the uplink carries for all ports of a node together, in one direction.
    Raises ValueError below 100 kB/s. The planner ignores it: give it a Network with a smaller
    `inter_node_bandwidth`.
    """

    uplink_bandwidth: float

    def __post_init__(self):
        super().__post_init__()
        positive("uplink_bandwidth", self.uplink_bandwidth, least=1e5, unit="bytes/s, one direction")


def leaving(op: str, payload: float, ranks: Sequence[int], network: Network) -> dict[int, float]:
    """Node -> bytes that an operation sends out of it. ranks: its ranks, on several nodes. In a ring with
    ranks in the order of nodes, one rank of each node sends to another node. So what the
    busiest rank sends is counted for each node. (For a broadcast or a reduce that is too much on some nodes.)
    An all-to-all sends from each rank to each rank outside the node.
    """
    nodes = [rank // network.gpus_per_node for rank in ranks]
    n, out = len(ranks), {}
    if op == "send":
        return {nodes[0]: payload}
    for node in dict.fromkeys(nodes):
        inside = nodes.count(node)
        if op == "all_to_all":
            out[node] = inside * (n - inside) * payload / n
        else:
            out[node] = max(algorithmic_bytes(op, payload, n, r) for r in range(n))
    return out


def ends_of(transfers: Sequence[tuple[float, float]], bandwidth: float) -> list[float]:
    """When each transfer ends, in seconds, if at every moment the running transfers share `bandwidth` evenly.
    transfers: (start, bytes) of each; the result has their order.
    """
    left, ends, now = {}, [0.0] * len(transfers), 0.0
    coming = sorted(range(len(transfers)), key=lambda i: transfers[i][0])
    while left or coming:
        if not left:
            now = transfers[coming[0]][0]
        while coming and transfers[coming[0]][0] <= now:
            first = coming.pop(0)
            left[first] = transfers[first][1]
        least = min(left.values())
        until = now + least * len(left) / bandwidth
        if coming and transfers[coming[0]][0] < until:  # another transfer starts before one of these ends
            until = transfers[coming[0]][0]
            least = (until - now) * bandwidth / len(left)
        left, now = {i: size - least for i, size in left.items()}, until
        for i in [i for i, size in left.items() if size <= 0]:
            del left[i]
            ends[i] = now
    return ends


def shared(path: str, kind: str | np.dtype, shape: int | tuple[int, ...]) -> np.ndarray:
    """An array in a memory-mapped file, at first of zeros. All ranks that use the same path share it."""
    with open(path, "ab") as file:
        file.truncate(np.dtype(kind).itemsize * int(np.prod(shape)))
    return np.asarray(np.memmap(path, kind, "r+", shape=shape))


class Uplink:
    """The uplink of one node. Its files have the recorded transfers, and their number."""

    def __init__(self, path: str, bandwidth: float):
        self.bandwidth, self.lock = bandwidth, threading.Lock()
        self.slots, self.count = shared(path, TRANSFER, SLOTS), shared(f"{path}-count", "u8", 1)
        self.file = open(path, "r+b")  # for the lock

    def enter(self, key: int, start: float, size: float) -> None:
        """Record a transfer. Every rank of the operation, on any node, calls this; the first call counts."""
        with self.lock:  # keeps out this rank's other threads; the lock on the file keeps out other ranks
            fcntl.lockf(self.file, fcntl.LOCK_EX)
            try:
                if key not in self._recent()["key"]:
                    self.slots[int(self.count[0]) % SLOTS] = key, start, size
                    self.count[0] += 1
            finally:
                fcntl.lockf(self.file, fcntl.LOCK_UN)

    def until(self, key: int) -> float:
        """When the transfer ends, given those recorded so far; 0 if it is not among the last `RECENT`."""
        recent = self._recent()
        ends = ends_of([(float(p["start"]), float(p["size"])) for p in recent], self.bandwidth)
        return max((end for p, end in zip(recent, ends) if p["key"] == key), default=0.0)

    def _recent(self) -> np.ndarray:
        count = int(self.count[0])
        return self.slots[np.arange(max(0, count - RECENT), count) % SLOTS]
