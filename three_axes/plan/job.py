"""Describes a training job: the model, the cluster, the batch, the framework and the precision. A `Job` and a
`Layout` are all inputs of the planner's formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..checks import whole
from ..paper.hardware import CLUSTERS, Cluster
from .frameworks import TEXTBOOK, Framework
from .layout import Layout
from .possible import check, check_size
from .shape import ModelShape


@dataclass(frozen=True)
class Lora:
    """LoRA freezes all weights and trains adapters: beside each linear layer k × n of the attention and of
    the feed-forward part, matrices k × rank and rank × n. Routed experts, the router, embedding and head have
    none. four_bit: the layers' frozen weights have four bits (QLoRA). Raises ValueError for a rank below 1.
    """

    rank: int
    four_bit: bool = False

    def __post_init__(self):
        whole("the rank of LoRA", self.rank, 1, 10**5)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a layer's frozen weight: 2; or 4 bits, a byte for 64 and a float32 for 64·256 weights."""
        return 0.5 + 1 / 64 + 4 / (64 * 256) if self.four_bit else 2.0

    def __str__(self) -> str:
        return f"{'4-bit ' * self.four_bit}LoRA {self.rank}"


class Precision(NamedTuple):
    """The format of numbers in products. rate: the device's speed with it: bf16, fp8 or fp4. bytes: of a
    number that is multiplied, kept or gathered. cast: bytes read and written to convert a number from bf16;
    it is written twice, because the product for the weights' gradient needs it transposed.
    """

    name: str
    rate: str = "bf16"
    bytes: float = 2.0
    cast: float = 0.0


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("bf16"),
        # The scale is taken from earlier steps. The number is read, 2 bytes, and written, 1 and 1.
        Precision("fp8", "fp8", 1.0, 4.0),
        # The scale is the tensor's own: the tensor is read once more for its largest number.
        Precision("fp8-current", "fp8", 1.0, 6.0),
        # Each copy has a float32 scale for each 128 numbers.
        Precision("fp8-blockwise", "fp8", 1 + 4 / 128, 4 + 8 / 128),
        # Each copy has a scale of one byte for each 32 numbers.
        Precision("mxfp8", "fp8", 1 + 1 / 32, 4 + 2 / 32),
        # Half a byte, and a scale of one byte for each 16 numbers. The tensor is read once more for its
        # largest number, and the copy for the weights' gradient is written and read once more by a transform.
        Precision("nvfp4", "fp4", 0.5 + 1 / 16, 4 + 2 * (0.5 + 1 / 16) + 4),
    )
}


def find_precision(name: str) -> Precision:
    """A precision by name. Raises ValueError for an unknown one."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known are {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


# Uncertain quantity -> a function of a job and a factor: the job with this quantity times the factor.
CHANGES = {
    "speed between nodes": lambda j, f: replace(j, cluster=_scaled(j.cluster, "inter_node_bandwidth", f)),
    "speed inside a node": lambda j, f: replace(j, cluster=_scaled(j.cluster, "intra_node_bandwidth", f)),
    "memory of a GPU": lambda j, f: replace(
        j, cluster=replace(j.cluster, device=_scaled(j.cluster.device, "memory", f))
    ),
    "global batch": lambda j, f: replace(j, global_batch=_whole_if_it_is(j.global_batch * f)),
    "sequence length": lambda j, f: replace(j, seq_len=max(1, int(j.seq_len * f))),
}


def _whole_if_it_is(x: float) -> float:
    return int(x) if x == int(x) else x


def _scaled(record, field: str, factor: float):
    return replace(record, **{field: getattr(record, field) * factor})


@dataclass(frozen=True)
class Job:
    """A training job. global_batch: sequences of seq_len tokens in one step, over all ranks. precision: of
    matrix products, one of `PRECISIONS`. lora: None if all weights are trained. Raises ValueError for
    numbers that make no sense, and for a precision that the device does not have.
    """

    model: ModelShape
    cluster: Cluster = CLUSTERS["dgx-h100"]
    global_batch: int = 1
    seq_len: int = 4096
    framework: Framework = TEXTBOOK
    precision: str = "bf16"
    lora: Lora | None = None

    def __post_init__(self):
        whole("global_batch", self.global_batch)
        whole("seq_len", self.seq_len)
        if not self.cluster.device.rate(find_precision(self.precision).rate):
            raise ValueError(f"{self.cluster.device.name} has no rate for {self.precision} here; take bf16")

    def changed(self, what: str, factor: float) -> Job:
        """This job with the quantity `what` (of CHANGES) times `factor`. Raises ValueError if impossible."""
        return CHANGES[what](self, factor)

    def microbatches(self, layout: Layout):
        """m: the number of microbatches that each replica computes in a step. Takes arrays."""
        return self.global_batch // (layout.dp * layout.microbatch)

    def flops_per_token(self, causal: bool = False) -> float:
        """Model FLOPs of a token; causal: with half of the attention. With LoRA 4 instead of 6 for each
        element of a matrix, because a frozen matrix has no gradient.
        """
        return self.model.flops_per_token(self.seq_len, causal=causal, per_element=4 if self.lora else 6)

    @property
    def switches(self) -> list[str]:
        """The names of settings that are not the default: precision, LoRA, the framework's switches."""
        narrow = [self.precision] if self.precision != "bf16" else []
        return narrow + [str(self.lora)] * bool(self.lora) + self.framework.switches

    def check(self, layout: Layout, gpus: int | None = None) -> None:
        """Raises ValueError for a layout that this job cannot have: `check_kind`, `possible.check_size`."""
        self.check_kind(layout, gpus)
        check_size(layout, self.global_batch, self.seq_len)

    def check_kind(self, layout: Layout, gpus: int | None = None) -> None:
        """The part of `check` that holds for every batch and sequence length: `possible.check`, and axes that
        the framework offers. 4-bit weights need data parallelism alone (with FSDP or without): bitsandbytes
        and PEFT have no tensor parallelism, pipeline or context parallelism for them.
        """
        check(self.model, layout, gpus)
        name, axes = self.framework.name, self.framework.offers.axes
        for axis, size in layout.axes._asdict().items():
            if size > 1 and axis not in axes:
                raise ValueError(f"{name} is planned with {', '.join(axes)} alone, not with {axis} {size}")
        if self.lora and self.lora.four_bit and layout.ranks != layout.dp:
            raise ValueError("weights in 4 bits train with data parallelism alone: take dp for all ranks")
