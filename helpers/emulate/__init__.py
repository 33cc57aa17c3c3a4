"""What a laptop does not have: a slow network, a full memory."""

from three_axes.doors import door

__getattr__, __dir__ = door(
    __name__,
    allocator=["CachingAllocator"],
    budget=["Budget"],
    fabric=["Fabric"],
    networks=["ETHERNET", "Network", "four_ranks", "nodes"],
    uplink=["Oversubscribed"],
)
