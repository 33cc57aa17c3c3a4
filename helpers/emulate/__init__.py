"""Emulations of what a laptop lacks: a slow network, and a GPU's limited memory."""

from three_axes.doors import door

__getattr__, __dir__ = door(
    __name__,
    allocator=["CachingAllocator"],
    budget=["Budget"],
    fabric=["Fabric"],
    networks=["ETHERNET", "Network", "four_ranks", "nodes"],
    uplink=["Oversubscribed"],
)
