"""The networks that the drops emulate, slow enough to notice on a laptop: `World(4, fabric=…)`."""

from __future__ import annotations

from three_axes.paper import Network

ETHERNET = Network(
    name="100 Mb/s Ethernet", gpus_per_node=1, inter_node_bandwidth=12.5e6, inter_node_latency=0.2e-3
)


def nodes(name: str, ranks: int, link: float, port: float, latency: float = 5e-4) -> Network:
    """A network of nodes with `ranks` ranks each. link, port: bytes/s that a rank sends inside its node, and
    out of it. latency: seconds of a message between nodes; inside a node it is 0.1 ms.
    """
    latencies = dict(intra_node_latency=1e-4, inter_node_latency=latency)
    speeds = dict(intra_node_bandwidth=link, inter_node_bandwidth=port)
    return Network(name=name, gpus_per_node=ranks, **speeds, **latencies)


def four_ranks(link: float) -> tuple[Network, Network]:
    """Four ranks in one node, and in two nodes whose ports are ten times slower than the links inside."""
    return nodes("one node of four", 4, link, link / 10), nodes("two nodes of two", 2, link, link / 10)
