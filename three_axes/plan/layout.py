"""Describes how a job is distributed over ranks: sizes of parallelism, pipeline schedule, ZeRO, recompute."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..paper.axes import ALWAYS, AXES, FOLDED, REPLICATING
from ..paper.pipelines import SCHEDULES, Pipeline
from ..paper.placement import Placement

RECOMPUTE = ("none", "selective", "modules", "per-op", "full")  # policies, explained in `Layout`
# The order of axes, the outermost first, in Megatron-LM, torchtitan and DeepSpeed. In Llama 3's paper dp is
# outermost, before pp. In all of them cp is next to tp, on its outer side.
ORDER = ("pp", "dp", "tp")
# The fields that decide a layer's operations and, if tp is innermost, over how many nodes these send.
SEEN = (*(axis.name for axis in AXES if axis.talks == "layer"), "microbatch", "zero", "sequence_parallel")
# Groups that exist if ZeRO shards over fewer than all replicas: group -> (group of all replicas, group that
# has one set of shards). dp and edp are the groups of all replicas of the weights, and of an expert.
PARTS = {
    "shard": ("dp", "shard"),
    "replicate": ("dp", "shard"),
    "eshard": ("edp", "eshard"),
    "ereplicate": ("edp", "eshard"),
}
Count = int | Any  # a number of one layout, or a NumPy array of many layouts' numbers


class Axes(NamedTuple):
    """The size of each axis of parallelism: data, tensor, pipeline, context, expert, and tensor parallelism
    inside an expert. `paper.axes.AXES` describes them.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def ranks(self):
        """The number of devices: d · t · p · cp."""
        return math.prod(size for axis, size in self._asdict().items() if axis not in FOLDED)

    def __str__(self) -> str:
        sizes = self._asdict().items()
        return " · ".join(f"{axis.upper()} {size}" for axis, size in sizes if axis in ALWAYS or size != 1)


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The sizes of `Axes` as fields of a layout. Each may be an array, for many layouts."""

    dp: Count = 1
    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    ep: Count = 1
    etp: Count = 1


def spread(x, which: np.ndarray | None):
    """The values for all layouts, from x, which has one for each different layout: see `Layout.alike`."""
    return x if which is None or np.ndim(x) == 0 else x[which]


@dataclass(frozen=True, kw_only=True)
class Layout(_Sizes):
    """A layout on dp · tp · pp · cp ranks. Numbers may be NumPy arrays of one shape, for many layouts.

    It has one number for each axis, like `Axes`. cp: ranks that share each sequence. ep, etp: over how many
    ranks the experts of a layer are distributed, and each expert is split; they use the same ranks as dp · cp
    · tp, and the rest of these ranks holds replicas of the experts (edp). microbatch: sequences that go
    through the model together (b). interleave: chunks on each pipeline rank (v). zero: 0 to 3, what is
    sharded over replicas: nothing, optimizer state, gradients too, weights too (3 is what FSDP does). shard:
    over how many replicas, 0 for all; if fewer, the replicas form groups of this size, and each group has all
    shards and all experts (HSDP). recompute: none; selective, the attention scores only; modules, the norms,
    the experts' activation function, and latent attention's queries, keys and values; per-op, all but the
    attention and every second matrix product (torchtitan's default); full, all of a layer. recomputed: with
    full, the number of layers of each stage that are recomputed; 0 for all. sequence_parallel: split the
    activations between the matrices over tp as well. order: dp, tp and pp, the outermost first.
    """

    microbatch: Count = 1
    interleave: Count = 1
    schedule: str = "1F1B"
    zero: Count = 0
    shard: Count = 0
    recompute: str = "none"
    recomputed: Count = 0
    sequence_parallel: bool | Any = True
    order: tuple[str, ...] = ORDER

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis -> number of ranks, the outermost axis first: the sizes of a `Placement`."""
        order = list(self.order)
        for axis in AXES:
            if axis.beside and np.any(np.asarray(getattr(self, axis.name)) != 1):
                order.insert(order.index(axis.beside), axis.name)
        return {axis: getattr(self, axis) for axis in order}

    @property
    def edp(self):
        """Replicas of each expert: dp · cp · tp / (ep · etp)."""
        return self.ranks // self.pp // self._product(FOLDED)

    @property
    def expert_sizes(self) -> dict[str, int]:
        """The sizes of the axes along which experts are split."""
        inner = {"dp": ("edp",), "tp": FOLDED, "pp": ("pp",)}
        return {name: getattr(self, name) for axis in self.order for name in inner[axis]}

    @property
    def replicas(self):
        """Ranks that hold the same weights, except experts': dp · cp."""
        return self._product(REPLICATING)

    def _product(self, axes: tuple[str, ...]):
        return math.prod(getattr(self, axis) for axis in axes)

    @cached_property
    def shards(self):
        """Number of ranks over which ZeRO shards its state."""
        some = np.asarray(self.shard) > 0
        return np.where(some, self.shard, self.replicas) if self.hybrid else self.replicas

    @property
    def expert_shards(self):
        """Number of ranks over which ZeRO shards the state of an expert."""
        return self.edp // (self.replicas // self.shards) if self.hybrid else self.edp

    @cached_property
    def hybrid(self) -> bool:
        """Whether `shard` is set (HSDP), in any of the layouts."""
        return bool(np.any(self.shard))

    def members(self, axis: str):
        """Number of ranks in a group along an axis. The group of dp has all ranks that share gradients,
        dp · cp; the groups shard and replicate are parts of it, eshard and ereplicate are parts of edp.
        """
        named = {"dp": "replicas", "shard": "shards", "eshard": "expert_shards"}
        if axis in ("replicate", "ereplicate"):
            return self.replicas // self.shards
        return getattr(self, named.get(axis, axis))

    def reach(self, axis: str, gpus_per_node: int) -> tuple:
        """(members of a group along an axis that share a node, nodes of the group). Takes arrays."""
        if (axis, gpus_per_node) not in self._reached:
            self._reached[axis, gpus_per_node] = self._reach(axis, gpus_per_node)
        return self._reached[axis, gpus_per_node]

    @cached_property
    def _reached(self) -> dict[tuple[str, int], tuple]:
        """The results of `reach`, kept because every collective needs them."""
        return {}

    def _reach(self, axis: str, gpus_per_node: int) -> tuple:
        if axis in ("edp", *FOLDED):
            return Placement(self.expert_sizes).reach(axis, gpus_per_node)
        if axis in PARTS:
            whole, part = PARTS[axis]
            near, parts = self.reach(whole, gpus_per_node)[0], self.members(part)
            inside = np.minimum(parts, near) if axis == part else np.maximum(1, near // parts)
            inside = np.minimum(inside, self.members(axis))
            return inside, -(-self.members(axis) // inside)
        sizes, placed = self.sizes, Placement(self.sizes)
        if axis not in sizes:
            return 1, 1
        if axis == "dp":
            inside = math.prod(placed.reach(one, gpus_per_node)[0] for one in REPLICATING if one in sizes)
            return inside, -(-self.replicas // inside)
        return placed.reach(axis, gpus_per_node)

    def alike(self) -> tuple[Layout, np.ndarray | None]:
        """(layouts, which): one layout for each different list of a layer's operations, and for each layout
        here the index of the one with the same list. Many have the same, because a layer's operations do not
        depend on dp and pp. which is None if equal ones were not searched for.
        """
        seen = np.broadcast_arrays(*(np.asarray(getattr(self, name)) for name in SEEN))
        if seen[0].ndim == 0 or not seen[0].size or self.order[-1] != "tp":
            return self, None
        if math.prod(int(sizes.max()) + 1 for sizes in seen) >= 2**63:
            return self, None
        key: int | np.ndarray = 0
        for sizes in seen:
            key = key * (int(sizes.max()) + 1) + sizes
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen: dict[str, Any] = {name: x[first] for name, x in given.items() if isinstance(x, np.ndarray)}
        return replace(self, **chosen), which

    @property
    def pipeline(self) -> Pipeline:
        """The record of the layout's schedule."""
        return SCHEDULES[self.schedule]

    @property
    def chunks(self):
        """Stages on each pipeline rank: v, or the number that the schedule fixes."""
        return self.pipeline.chunks or self.interleave

    @property
    def ranks(self):
        """The number of devices: d · t · p · cp."""
        return self.axes.ranks

    def positions(self, seq_len):
        """Tokens that a rank has of each sequence."""
        return seq_len / self.cp

    def tokens(self, seq_len):
        """Tokens of a microbatch that go through a rank's matrices together."""
        return self.microbatch * self.positions(seq_len)

    def share_recomputed(self, layers):
        """The share of a stage's `layers` that is computed twice. Takes arrays."""
        some = np.asarray(self.recomputed)
        return np.where(some > 0, np.minimum(some, layers) / np.maximum(layers, 1), 1.0)

    @property
    def axes(self) -> Axes:
        """The layout's sizes alone."""
        return Axes(*(getattr(self, axis) for axis in Axes._fields))

    def __str__(self) -> str:
        some = f" of {self.recomputed} layers" * bool(self.recomputed)
        piped, shards = np.any(np.asarray(self.pp) > 1), f" over {self.shard}" * bool(self.shard)
        optional = {
            f"v {self.interleave}": np.any(np.asarray(self.interleave) > 1),
            self.schedule: piped,
            f"ZeRO-{self.zero}{shards}": self.zero,
            "SP": self.sequence_parallel and np.any(np.asarray(self.tp) > 1),
            f"{self.recompute} recompute{some}": self.recompute != "none",
            f"{' '.join(self.order)} from the outermost": self.order != ORDER,
        }
        named = (name for name, true in optional.items() if true)
        return " · ".join([str(self.axes), f"b {self.microbatch}", *named])
