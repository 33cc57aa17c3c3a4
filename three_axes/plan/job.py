"""What is to be trained, on which cluster and with which framework: all inputs of a formula besides
the layout.
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

# Which linear layers of a layer belong to which part, as `attention` and `feed_forward` call them. Routed
# experts, the router, embedding and head stay as they are.
_HEADS = ("queries", "keys", "values", "attention's output")
_LATENT = ("queries, down", "queries, up", "keys and values, down", "keys and values, up")
MATRICES = {"attention": (*_HEADS, *_LATENT), "feed-forward": ("gate", "up", "down")}


@dataclass(frozen=True)
class Lora:
    """rank: of the adapters. matrices: the parts whose linear layers have one, of `MATRICES`; the rest is
    frozen without. four_bit: the layers' frozen weights are kept in four bits (QLoRA). Raises ValueError for
    a rank below 1 and for parts that are not known.
    """

    rank: int
    matrices: tuple[str, ...] = tuple(MATRICES)
    four_bit: bool = False

    def __post_init__(self):
        whole("the rank of LoRA", self.rank, 1, 10**5)
        wrong = [part for part in self.matrices if part not in MATRICES]
        if wrong or not self.matrices:
            given = repr(wrong[0]) if wrong else "none"
            raise ValueError(f"LoRA adapts {' or '.join(MATRICES)}, or both; {given} is given")

    def adapts(self, name: str) -> bool:
        """Whether a linear layer, or a part, has adapters."""
        return any(name == part or name in MATRICES[part] for part in self.matrices)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a frozen weight of a layer: 2, or half a byte, one for 64, a float32 for 64·256."""
        return 0.5 + 1 / 64 + 4 / (64 * 256) if self.four_bit else 2.0

    def __str__(self) -> str:
        of = "" if len(self.matrices) == len(MATRICES) else f" of {self.matrices[0]}"
        return f"{'4-bit ' * self.four_bit}LoRA {self.rank}{of}"


FLOPS = ("whole", "causal", "hardware")  # what TFLOP/s count: see `measured.step_seconds`


class Precision(NamedTuple):
    """rate: the device's speed for products: bf16, fp8 or fp4. bytes: of a number in a product, and of one
    that is kept or gathered for it. cast: bytes moved to narrow a number: it is read, and written twice,
    because the product for the weights' gradient needs it transposed.
    """

    name: str
    rate: str = "bf16"
    bytes: float = 2.0
    cast: float = 0.0


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("bf16"),
        # With scales from earlier steps: read 2, written 1 and 1.
        Precision("fp8", "fp8", 1.0, 4.0),
        # With scales of the tensor itself: it is read once more for its largest number.
        Precision("fp8-current", "fp8", 1.0, 6.0),
        # Each copy has a float32 scale for 128 numbers.
        Precision("fp8-blockwise", "fp8", 1 + 4 / 128, 4 + 8 / 128),
        # A scale of one byte for 32 numbers.
        Precision("mxfp8", "fp8", 1 + 1 / 32, 4 + 2 / 32),
        # Half a byte and a byte for 16; read once more for the largest number, and the copy for the weights'
        # gradient is written and read again by its transform.
        Precision("nvfp4", "fp4", 0.5 + 1 / 16, 4 + 2 * (0.5 + 1 / 16) + 4),
    )
}


def find_precision(name: str) -> Precision:
    """A precision by name. Raises ValueError for an unknown one."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known are {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


# Uncertain quantity -> the job with this quantity times a factor.
CHANGES = {
    "speed between nodes": lambda j, f: replace(j, cluster=_times(j.cluster, "inter_node_bandwidth", f)),
    "speed inside a node": lambda j, f: replace(j, cluster=_times(j.cluster, "intra_node_bandwidth", f)),
    "memory of a GPU": lambda j, f: replace(
        j, cluster=replace(j.cluster, device=_times(j.cluster.device, "memory", f))
    ),
    "global batch": lambda j, f: replace(j, global_batch=_whole_if_it_is(j.global_batch * f)),
    "sequence length": lambda j, f: replace(j, seq_len=max(1, int(j.seq_len * f))),
}


def _whole_if_it_is(x: float) -> float:
    return int(x) if x == int(x) else x


def _times(record, field: str, factor: float):
    return replace(record, **{field: getattr(record, field) * factor})


@dataclass(frozen=True)
class Job:
    """global_batch: sequences of seq_len tokens in one step, over all ranks. precision: of matrix products,
    one of `PRECISIONS`. lora: all weights are frozen, and adapters are trained beside them. measured: natural
    logarithms of measured over predicted seconds, of runs of the same source: see `certainty.sure`. Raises
    ValueError for numbers that make no sense, and for a precision that the device does not have.
    """

    model: ModelShape
    cluster: Cluster = CLUSTERS["dgx-h100"]
    global_batch: int = 1
    seq_len: int = 4096
    framework: Framework = TEXTBOOK
    precision: str = "bf16"
    lora: Lora | None = None
    measured: tuple[float, ...] = ()

    def __post_init__(self):
        whole("global_batch", self.global_batch)
        whole("seq_len", self.seq_len)
        if not self.cluster.device.rate(find_precision(self.precision).rate):
            raise ValueError(f"{self.cluster.device.name} has no rate for {self.precision} here; take bf16")

    def changed(self, what: str, factor: float) -> Job:
        """This job with one quantity (of CHANGES) times `factor`. Raises ValueError for an
        impossible value.
        """
        return CHANGES[what](self, factor)

    def microbatches(self, layout: Layout):
        """m: how many microbatches go through each replica in a step. Takes arrays."""
        return self.global_batch // (layout.dp * layout.microbatch)

    def flops_per_token(self, causal: bool = False) -> float:
        """Model FLOPs of a token; causal: with half of the attention. A frozen matrix has no gradient: 4
        instead of 6 for each element.
        """
        return self.model.flops_per_token(self.seq_len, causal=causal, per_element=4 if self.lora else 6)

    @property
    def switches(self) -> list[str]:
        """In words, what is not as usual."""
        narrow = [self.precision] if self.precision != "bf16" else []
        return narrow + [str(self.lora)] * bool(self.lora) + self.framework.switches

    def check(self, layout: Layout, gpus: int | None = None) -> None:
        """Refuse what cannot be, as `possible.check` does, and axes that the framework does not offer. 4-bit
        weights are shared out (FSDP), and not cut: bitsandbytes and PEFT have no tensor parallelism, pipeline
        or context parallelism for them.
        """
        self.check_kind(layout, gpus)
        check_size(layout, self.global_batch, self.seq_len)

    def check_kind(self, layout: Layout, gpus: int | None = None) -> None:
        """The part of `check` that holds for every batch and every length of a sequence."""
        check(self.model, layout, gpus)
        name, axes = self.framework.name, self.framework.offers.axes
        for axis, size in layout.axes._asdict().items():
            if size > 1 and axis not in axes:
                raise ValueError(f"{name} is priced along {', '.join(axes)} alone, not with {axis} {size}")
        if self.lora and self.lora.four_bit and layout.ranks != layout.dp:
            raise ValueError("weights in 4 bits train with data parallelism alone: take dp for all ranks")
