"""How many bytes each rank must send for a collective, and how long it takes on a cluster.

One convention throughout: `payload` is the size in bytes of the *whole* tensor
that the collective is about, the same number on every rank.

    all_reduce      the tensor that every rank holds before and after
    all_gather      the gathered output (each rank brings payload/n)
    reduce_scatter  the input that is to be summed (each rank keeps payload/n)
    all_to_all      one rank's whole input
    broadcast       the tensor
    gather, scatter the list at the root (each other rank holds payload/n)
    send            the tensor

`book` is the textbook's answer, the bandwidth-optimal ring (Patarasu & Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations"; the same
counts are in the NCCL performance notes). `gloo` is what the gloo library really
sends, which differs in three places. Both answer in bytes sent by one rank. `seconds` puts
time to them: messages · latency + bytes / bandwidth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from .hardware import Cluster

ALGORITHMS = ("ring", "tree", "hierarchical")


def book(op: str, payload: float, n: int, rank: int = 0, root: int = 0) -> float:
    """Bytes that `rank` sends for `op` on `n` ranks by a bandwidth-optimal ring.

    op: one of the names in the table above, or recv and barrier (which send nothing).
    payload: bytes of the whole tensor. rank, root: only rooted operations look at them.
    Raises ValueError for an operation it does not know, or a group without ranks.
    """
    _check(op, n)
    far = (rank - root) % n  # steps along the ring from the root
    if op == "all_reduce":  # a reduce-scatter, then an all-gather
        return 2 * (n - 1) / n * payload
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (n - 1) / n * payload
    if op == "broadcast":  # every rank passes it on, but the last
        return payload if far < n - 1 else 0
    if op == "reduce":  # the broadcast read backwards: the root only receives
        return payload if far else 0
    if op == "gather":
        return payload / n if far else 0
    if op == "scatter":
        return 0 if far else (n - 1) / n * payload
    return payload if op == "send" else 0


def gloo(op: str, payload: float, n: int, rank: int = 0, root: int = 0) -> float:
    """Bytes that `rank` really sends for `op` on `n` gloo ranks (measured, torch 2.13, Linux).

    Differs from `book` for reduce_scatter (gloo all-reduces the whole input and throws
    most of it away), broadcast (a binomial tree: the root sends log2 n copies, half of
    the ranks none) and reduce (a reduce-scatter whose pieces are then sent to the root).
    """
    _check(op, n)
    far = (rank - root) % n
    if op == "reduce_scatter":
        return book("all_reduce", payload, n)
    if op == "broadcast":  # in round k the ranks below 2^k each send to the one 2^k further
        reach, children = 1, 0
        while reach < n:
            children += far < reach and far + reach < n
            reach *= 2
        return children * payload
    if op == "reduce":
        return (n - 1) / n * payload + (payload / n if far else 0)
    return book(op, payload, n, rank, root)


# -- seconds -----------------------------------------------------------------------------------


def group_bandwidth(cluster: Cluster, members, stride, link: float = 1.0, nic: float = 1.0):
    """Bytes/s that each rank can send in a ring of `members` ranks that are `stride` apart. Takes arrays.

    Inside a node, the link's. A ring across nodes leaves each node once, so it can use the ports of all
    its members there: members per node · port, but never more than the link, nor than was measured for so
    many nodes (`Cluster.rings`). link, nic: what share of the printed speeds is reached.
    """
    inside = np.minimum(members, np.maximum(1, cluster.node // stride))
    nodes = np.maximum(1, members * stride / cluster.node)
    return np.where(nodes > 1, _across(cluster, nodes, inside, link, nic), cluster.link * link)


def _across(cluster: Cluster, nodes, inside, link: float = 1.0, nic: float = 1.0):
    """Bytes/s for each rank of a ring across `nodes` nodes, with `inside` members in each."""
    by_ports = np.minimum(cluster.link * link, np.minimum(inside, cluster.rails) * cluster.nic * nic)
    if not cluster.rings:
        return by_ports
    sizes, speeds = np.log(
        np.array(cluster.rings)
    ).T  # between two measured sizes, on the straight line of the logarithms
    return np.minimum(by_ports, np.exp(np.interp(np.log(nodes), sizes, speeds)))


def seconds(
    op: str, payload: float, ranks: Sequence[int], cluster: Cluster, algorithm: str = "ring"
) -> float:
    """How long `op` takes among `ranks` of a cluster, at its printed speeds: messages · latency + bytes /
    bandwidth.

    op, payload: as for `book`. ranks: numbers in the cluster, node by node. algorithm: 'ring', and for
    all_reduce also 'tree' (two binary trees at once, each for half of the bytes: Sanders et al. 2009) and
    'hierarchical' (reduce-scatter in each node, all-reduce between nodes by each GPU for its share,
    all-gather in each node). Raises ValueError for an unknown op or algorithm.
    """
    n = len(ranks)
    _check(op, n)
    if algorithm not in ALGORITHMS or algorithm != "ring" and op != "all_reduce":
        raise ValueError(
            f"{op} by {algorithm!r}: the algorithms are ring, and for all_reduce also tree and hierarchical"
        )
    in_node = Counter(r // cluster.node for r in ranks)
    nodes, inside = len(in_node), min(in_node.values())
    latency = cluster.link_latency if nodes == 1 else cluster.nic_latency
    bandwidth = cluster.link if nodes == 1 else float(_across(cluster, nodes, inside))
    if n == 1 or op == "recv":
        return 0.0
    if algorithm == "tree":
        return 2 * math.ceil(math.log2(n)) * latency + 2 * payload / bandwidth
    if algorithm == "hierarchical":
        near = 2 * (inside - 1) * cluster.link_latency + book("all_reduce", payload, inside) / cluster.link
        far = (
            2 * (nodes - 1) * cluster.nic_latency + book("all_reduce", payload / inside, nodes) / cluster.nic
        )
        return near + (far if nodes > 1 else 0.0)
    messages = {"all_reduce": 2 * (n - 1), "barrier": 2 * (n - 1), "send": 1}.get(op, n - 1)
    return messages * latency + max(book(op, payload, n, r) for r in range(n)) / bandwidth


def _check(op: str, n: int) -> None:
    known = (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
    )
    if op not in known:
        raise ValueError(f"unknown collective {op!r}; known are {', '.join(known)}")
    if n < 1:
        raise ValueError(f"a group has at least 1 rank, not {n}")
