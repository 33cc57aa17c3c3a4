"""What is to be trained, on what, and with which framework: what every formula asks for beside the layout."""

from __future__ import annotations

from dataclasses import dataclass

from ..paper.checks import whole
from ..paper.hardware import CLUSTERS, Cluster
from .adapters import Lora
from .frameworks import TEXTBOOK, Framework
from .layout import Layout
from .possible import check
from .precision import find_precision
from .shape import ModelShape


@dataclass(frozen=True)
class Job:
    """global_batch: sequences of seq_len tokens in one step, over all ranks. precision: of matrix products,
    one of `precision.PRECISIONS`. lora: all weights are frozen, and adapters are trained beside them. Raises
    ValueError for numbers that make no sense, and for a precision that the device does not have.
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

    def microbatches(self, layout: Layout):
        """m: how many microbatches go through each replica in a step. Takes arrays."""
        return self.global_batch // (layout.dp * layout.microbatch)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token, attention whole; a frozen matrix needs no gradient, and takes 4 for 6."""
        return self.model.flops_per_token(self.seq_len, per_element=4 if self.lora else 6)

    @property
    def switches(self) -> list[str]:
        """In words, what is not as usual."""
        narrow = [self.precision] if self.precision != "bf16" else []
        return narrow + [str(self.lora)] * bool(self.lora) + self.framework.switches

    def check(self, layout: Layout, gpus: int | None = None) -> None:
        """Refuse what cannot be: see `possible.check`."""
        check(self.model, layout, self.global_batch, gpus, self.seq_len)
