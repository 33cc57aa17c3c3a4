"""A small model of PyTorch's caching allocator: why a GPU can be full while its tensors would fit.

The allocator takes memory from the device in segments and cuts them into blocks. When a tensor is freed, the
allocator keeps its memory, because taking memory from the device again is slow. `allocated` counts the bytes
of living tensors, `reserved` the bytes of all segments. A tensor gets the smallest free block that is large
enough. If there is none, the allocator takes a new segment. If the device has no room for a new segment, the
allocator first returns all segments without a living tensor.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.x, without `expandable_segments`, one
stream): the sizes in `RULES`, best fit, when a block is split, and which segments are returned before the
allocator gives up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from three_axes.table import human

MIB = 1 << 20
RULES = {  # in bytes
    "rounding": 512,  # every block is a multiple of this
    "small": MIB,  # tensors up to this size have small segments
    "small segment": 2 * MIB,
    "middle segment": 20 * MIB,  # for tensors below `large`, so that several share it
    "large": 10 * MIB,  # from this size on a segment is as large as its tensor
    "large rounding": 2 * MIB,
}


@dataclass(eq=False)
class Block:
    """A piece of a segment. at: its first byte in the segment. size: bytes. key: the tensor in it, None if it
    is free. requested: the tensor's bytes.
    """

    at: int
    size: int
    key: int | None = None
    requested: int = 0


@dataclass(eq=False)
class Segment:
    """A piece of memory that was taken from the device at once, and its blocks in order."""

    size: int
    small: bool
    blocks: list[Block] = field(default_factory=list)


class CachingAllocator:
    """The allocator of one device. limit: bytes of the device. unit: all sizes in `RULES` are divided by it,
    so that a small model's tensors follow the same rules as a large model's: with 1000, a tensor of 1 kB is
    treated like a tensor of 1 MB.
    """

    def __init__(self, limit: float, unit: int = 1):
        self.limit, self.rules = limit, {name: max(1, size // unit) for name, size in RULES.items()}
        self.segments: list[Segment] = []
        self.allocated = self.reserved = 0
        self.most_allocated = self.most_reserved = 0
        self.retries = 0  # how often free segments were returned to make room
        self.at_failure: list[dict] = []  # the snapshot when a tensor did not fit
        self._home: dict[int, tuple[Segment, Block]] = {}

    def take(self, key: int, requested: int) -> None:
        """Find a block for a tensor of `requested` bytes. Raises torch.OutOfMemoryError."""
        rules = self.rules
        size = max(1, -(-requested // rules["rounding"])) * rules["rounding"]
        small = size <= rules["small"]
        place = self._best_fit(size, small) or self._new_segment(size, small)
        if place is None:
            self.at_failure = self.snapshot()
            raise torch.OutOfMemoryError(
                f"out of memory. Tried to allocate {human(requested)}. The device has a total capacity of"
                f" {human(self.limit)}. {human(self.allocated)} is allocated by PyTorch, and"
                f" {human(self.reserved - self.allocated)} is reserved by PyTorch but unallocated"
            )
        segment, block = place
        rest = block.size - size
        if rest >= rules["rounding"] if small else rest > rules["small"]:
            segment.blocks.insert(segment.blocks.index(block) + 1, Block(block.at + size, rest))
            block.size = size
        block.key, block.requested = key, requested
        self._home[key] = segment, block
        self.allocated += requested
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def give(self, key: int) -> None:
        """Free a tensor's block, and join it with free neighbours. A key without a block is ignored."""
        if key not in self._home:
            return  # this tensor did not fit
        segment, block = self._home.pop(key)
        self.allocated -= block.requested
        block.key, block.requested = None, 0
        at = segment.blocks.index(block)
        for left, right in ((at, at + 1), (at - 1, at)):
            if 0 <= left and right < len(segment.blocks):
                a, b = segment.blocks[left], segment.blocks[right]
                if a.key is None and b.key is None:
                    a.size += b.size
                    segment.blocks.remove(b)

    def _best_fit(self, size: int, small: bool) -> tuple[Segment, Block] | None:
        places = (
            (segment, block)
            for segment in self.segments
            if segment.small == small
            for block in segment.blocks
            if block.key is None and block.size >= size
        )
        return min(places, key=lambda place: place[1].size, default=None)

    def _new_segment(self, size: int, small: bool) -> tuple[Segment, Block] | None:
        rules = self.rules
        if small:
            wanted = rules["small segment"]
        elif size < rules["large"]:
            wanted = rules["middle segment"]
        else:
            wanted = -(-size // rules["large rounding"]) * rules["large rounding"]
        if self.reserved + wanted > self.limit:
            self.retries += 1  # return every segment without a living tensor to the device
            self.segments = [s for s in self.segments if any(b.key is not None for b in s.blocks)]
            self.reserved = sum(s.size for s in self.segments)
        if self.reserved + wanted > self.limit:
            return None
        segment = Segment(wanted, small, [Block(0, wanted)])
        self.segments.append(segment)
        self.reserved += wanted
        return segment, segment.blocks[0]

    def snapshot(self) -> list[dict]:
        """The segments as `torch.cuda.memory._snapshot()["segments"]` lists them; addresses start at 0."""
        address, listed = 0, []
        for segment in self.segments:
            blocks = [
                {
                    "address": address + block.at,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": "inactive" if block.key is None else "active_allocated",
                }
                for block in segment.blocks
            ]
            active = sum(b["size"] for b in blocks if b["state"] != "inactive")
            sizes = {"total_size": segment.size, "allocated_size": active, "active_size": active}
            kind = "small" if segment.small else "large"
            listed.append({"address": address, **sizes, "segment_type": kind, "blocks": blocks})
            address += segment.size
        return listed
