"""How many bytes each rank must send for a collective, and how long it takes on a cluster.

One convention throughout: `payload` is the size in bytes of the *whole* tensor
that the collective is about, the same number on every rank.

    all_reduce      the tensor that every rank holds before and after
    all_gather      the gathered output (each rank gives payload/n)
    reduce_scatter  the input that is to be summed (each rank keeps payload/n)
    all_to_all      one rank's whole input
    broadcast       the tensor
    reduce          the tensor that every rank holds before
    gather, scatter the list at the root (each other rank holds payload/n)
    send            the tensor

`algorithmic_bytes` returns the bytes that one rank sends by the bandwidth-optimal ring (Patarasu & Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations"; the same counts are in the NCCL
performance notes). `gloo` returns those that the gloo library really sends; three operations differ.
`seconds` computes the time of an operation by a formula, `hop_by_hop` from the events of a ring.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from . import by_hand
from .hardware import Network

ALGORITHMS = ("ring", "tree", "hierarchical")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *ROOTED, "send", "recv", "barrier")


def algorithmic_bytes(op: str, payload: float, n: int, rank: int = 0, root: int = 0) -> float:
    """Bytes that `rank` sends for `op` on `n` ranks by a bandwidth-optimal ring.

    op: one of the names in the table above, or recv and barrier (which send nothing).
    payload: bytes of the whole tensor. rank, root: only rooted operations use them.
    Raises ValueError for an operation it does not know, or a group without ranks.
    """
    _check(op, n)
    far = (rank - root) % n  # steps along the ring from the root
    if op == "all_reduce":
        return by_hand.all_reduce_bytes(payload, n)
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return by_hand.reduce_scatter_bytes(payload, n)
    if op == "broadcast":  # every rank sends it on, except the last
        return payload if far < n - 1 else 0
    if op == "reduce":  # a broadcast in reverse: the root only receives
        return payload if far else 0
    if op == "gather":
        return payload / n if far else 0
    if op == "scatter":
        return 0 if far else (n - 1) / n * payload
    return payload if op == "send" else 0


def gloo(op: str, payload: float, n: int, rank: int = 0, root: int = 0) -> float:
    """Bytes that `rank` really sends for `op` on `n` gloo ranks (measured, torch 2.13, Linux).

    They differ from `algorithmic_bytes` for reduce_scatter (gloo all-reduces the whole input and discards
    most of it), broadcast (a binomial tree: the root sends log2 n copies, half of the ranks none) and reduce
    (a reduce-scatter whose pieces are then sent to the root).
    """
    _check(op, n)
    far = (rank - root) % n
    if op == "reduce_scatter":
        return algorithmic_bytes("all_reduce", payload, n)
    if op == "broadcast":
        return len(_below(far, n)) * payload
    if op == "reduce":
        return (n - 1) / n * payload + (payload / n if far else 0)
    return algorithmic_bytes(op, payload, n, rank, root)


def _below(far: int, n: int) -> list[int]:
    """The ranks to which a rank sends in gloo's broadcast, counted from the root: in round k each rank below
    2^k sends to the rank 2^k further.
    """
    return [far + (1 << k) for k in range(far.bit_length(), n.bit_length()) if far + (1 << k) < n]


def needs(op: str, n: int, rank: int, root: int | None, numbers: int | None, held: bool) -> list[int]:
    """Ranks that must have called `op` before `rank` can leave it, of n ranks.

    root: the root, or the other rank of a send or recv; None if that may be any rank. numbers: how many the
    whole tensor has; None for a barrier. held: whether a sender waits for its receiver, as with gloo; NCCL
    buffers a small message. A rank needs the ranks from which it receives: every rank, or the root. In gloo's
    broadcast (a binomial tree) it receives from the ranks above it, and sends to those below. A rank that is
    needed only in some cases is left out: in a reduce of so few numbers that not every rank has a piece to
    send, or of an empty tensor. (Read in gloo's broadcast.cc, reduce.cc, gather.cc, scatter.cc and
    alltoallv.cc, at 081799c of 2025; a test compares the result with real ranks.)
    """
    others = [r for r in range(n) if r != rank]
    if numbers == 0 or root is None and op in ("send", "recv"):
        return []
    if root is None or op not in ("send", "recv", *ROOTED):
        return others
    if op == "recv" or op == "scatter" and rank != root:
        return [root]
    if op in ("gather", "reduce") and rank == root:
        return others
    if not held:
        return [root] if op == "broadcast" and rank != root else []
    if op in ("send", "gather"):
        return [root]
    if op == "scatter":
        return others
    if op == "reduce":
        return others if (numbers or 0) > 2 * n * (n - 1) else []
    far = (rank - root) % n
    above = [far % (1 << k) for k in range(far.bit_length()) if far >> k & 1]
    return sorted((from_root + root) % n for from_root in above + _below(far, n))


# -- seconds -----------------------------------------------------------------------------------


def ring_seconds(op: str, payload, inside, nodes, network: Network, intra=1.0, inter=1.0):
    """Seconds of a ring over `nodes` nodes with `inside` members in each. Takes arrays.

    A ring leaves each node once; all its other hops are inside a node, and fast. Where it leaves, it can use
    the ports of all its members: members per node · port, but never more than the link, nor than was measured
    for so many nodes (`Network.busbw`). The result is the longer of two times: of the slowest hop, if it is
    always busy; and of one piece, which takes all hops and waits for the latency of each. intra, inter: the
    reached shares of the printed speeds.
    """
    n = inside * nodes
    rounds = 2 if op == "all_reduce" else 1
    hops, piece, far = rounds * (n - 1), payload / n, nodes > 1
    fast = network.intra_node_bandwidth * intra
    slow = np.where(far, _across(op, network, nodes, inside, intra, inter), fast)
    last = np.where(far, network.inter_node_latency, network.intra_node_latency)
    # The slow hops of a piece: `nodes` in each round, less those among the `rounds` hops that it does not
    # take.
    leaves = far * (rounds * nodes - rounds // inside)
    way = leaves * (piece / slow + last) + (hops - leaves) * (piece / fast + network.intra_node_latency)
    return (n > 1) * np.maximum(hops * piece / slow + last, way)


def hierarchical_seconds(op: str, payload, inside, nodes, network: Network, intra=1.0, inter=1.0):
    """Seconds of a collective in two levels: in each node, then between the nodes, where each GPU sends its
    share. For all_reduce (a reduce-scatter, then an all-gather), all_gather and reduce_scatter. Takes arrays.
    """
    ways, part = 2 if op == "all_reduce" else 1, payload / inside
    port = network.inter_node_bandwidth * inter * np.minimum(inside, network.rails) / inside
    near = (inside - 1) * (part / (network.intra_node_bandwidth * intra) + network.intra_node_latency)
    far = (nodes - 1) * (part / nodes / port + network.inter_node_latency)
    return ways * (near + far)


def all_to_all_seconds(payload, inside, nodes, network: Network, intra=1.0, inter=1.0, copies=(1.0, 1.0)):
    """Seconds in which each rank sends each other rank its part: through the link to those of its node and,
    at the same time, through its port to all others. copies: (through the link, through the port) the share
    of these bytes that is sent, if a token for several experts is sent only once to a rank, and to a node.
    Takes arrays.
    """
    part, others = payload / (inside * nodes), inside * (nodes - 1)
    link, port = network.all_to_all
    near = (inside - 1) * copies[0] * part / (link or network.intra_node_bandwidth * intra)
    far = others * copies[1] * part / (port or network.inter_node_bandwidth * inter)
    # All messages are sent at the same time, so the latency counts once.
    near = near + (inside > 1) * network.intra_node_latency
    return np.maximum(near, far + (nodes > 1) * network.inter_node_latency)


def group_seconds(op: str, payload, inside, nodes, network: Network, intra=1.0, inter=1.0):
    """Seconds by a ring or in two levels, whichever is faster, as libraries choose. If the network has
    measured speeds (`Network.busbw`), by a ring, which uses them. Takes arrays.
    """
    given = (op, payload, inside, nodes, network, intra, inter)
    ring = ring_seconds(*given)
    return ring if network.busbw or network.busbw_gather else np.minimum(ring, hierarchical_seconds(*given))


def send_seconds(payload, far, network: Network, intra=1.0, inter=1.0):
    """Seconds of one message inside a node, or to another (far). Takes arrays."""
    near_one = payload / (network.intra_node_bandwidth * intra) + network.intra_node_latency
    far_one = payload / (network.inter_node_bandwidth * inter) + network.inter_node_latency
    return np.where(far, far_one, near_one)


def _across(op: str, network: Network, nodes, inside, intra: float = 1.0, inter: float = 1.0):
    """Bytes/s for each rank of a ring across `nodes` nodes, with `inside` members in each."""
    measured = network.busbw if op == "all_reduce" else network.busbw_gather or network.busbw
    by_ports = np.minimum(
        network.intra_node_bandwidth * intra,
        np.minimum(inside, network.rails) * network.inter_node_bandwidth * inter,
    )
    if not measured:
        return by_ports
    sizes, speeds = np.log(np.array(measured)).T  # between two, on the straight line of the logarithms
    return np.minimum(by_ports, np.exp(np.interp(np.log(nodes), sizes, speeds)))


def seconds(
    op: str, payload: float, ranks: Sequence[int], network: Network, algorithm: str = "ring"
) -> float:
    """Seconds of `op` among `ranks` of a network, by formula, at its printed speeds (or measured: `busbw`).

    op, payload: as for `algorithmic_bytes`. ranks: numbers in the network, node by node. algorithm:
    'ring', and for all_reduce also 'tree' (two binary trees at once, each for half of the bytes: Sanders et
    al. 2009) and 'hierarchical'. Raises ValueError for an unknown op or algorithm.
    """
    n = len(ranks)
    _check(op, n)
    if algorithm not in ALGORITHMS or algorithm != "ring" and op != "all_reduce":
        raise ValueError(
            f"{op} by {algorithm!r}: the algorithms are ring, and for all_reduce also tree and hierarchical"
        )
    if n == 1 or op == "recv":
        return 0.0
    inside, nodes = _shape(ranks, network)
    far = nodes > 1
    latency = network.inter_node_latency if far else network.intra_node_latency
    bandwidth = float(_across(op, network, nodes, inside)) if far else network.intra_node_bandwidth
    if algorithm == "tree":
        return 2 * math.ceil(math.log2(n)) * latency + 2 * payload / bandwidth
    if algorithm == "hierarchical":
        return float(hierarchical_seconds(op, payload, inside, nodes, network))
    if op in ("all_reduce", "all_gather", "reduce_scatter", "barrier"):
        reduced = "all_reduce" if op == "barrier" else op
        return float(ring_seconds(reduced, 0.0 if op == "barrier" else payload, inside, nodes, network))
    if op == "send":
        return float(send_seconds(payload, far, network))
    if op == "all_to_all":
        return float(all_to_all_seconds(payload, inside, nodes, network))
    slow = nodes - 1  # in a rooted operation a piece passes each rank once
    path = slow * network.inter_node_latency + (n - 1 - slow) * network.intra_node_latency
    return path + max(algorithmic_bytes(op, payload, n, r) for r in range(n)) / bandwidth


@lru_cache(maxsize=4096)
def hop_by_hop(op: str, payload: float, ranks: tuple[int, ...], network: Network) -> float:
    """Seconds of a ring, from its events: each rank passes a piece on when it has arrived and the hop to the
    next rank is free. An emulated network takes its delays from here, so that they can show a formula to be
    wrong. For an operation that is no ring, the result of `seconds`.
    """
    n, reduced = len(ranks), "all_reduce" if op == "barrier" else op
    if n == 1 or reduced not in ("all_reduce", "all_gather", "reduce_scatter"):
        return seconds(op, payload, ranks, network)
    piece = 0.0 if op == "barrier" else payload / n
    inside, nodes = _shape(ranks, network)
    slow = float(_across(reduced, network, nodes, inside))
    node = [r // network.gpus_per_node for r in ranks]
    leaves = [node[i] != node[(i + 1) % n] for i in range(n)]
    busy = [piece / (slow if far else network.intra_node_bandwidth) for far in leaves]
    after = [network.inter_node_latency if far else network.intra_node_latency for far in leaves]
    arrived, free = [0.0] * n, [0.0] * n  # when the next piece to pass on arrives; when the hop is free
    for _ in range((2 if reduced == "all_reduce" else 1) * (n - 1)):
        free = [max(at, idle) + b for at, idle, b in zip(arrived, free, busy)]
        arrived = [free[i - 1] + after[i - 1] for i in range(n)]
    return max(arrived)


def _shape(ranks: Sequence[int], network: Network) -> tuple[int, int]:
    """(the fewest members in a node, nodes) of a group."""
    in_node = Counter(r // network.gpus_per_node for r in ranks)
    return min(in_node.values()), len(in_node)


def _check(op: str, n: int) -> None:
    if op not in COLLECTIVES:
        raise ValueError(f"unknown collective {op!r}; known are {', '.join(COLLECTIVES)}")
    if n < 1:
        raise ValueError(f"a group has at least 1 rank, not {n}")
