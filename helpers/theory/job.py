"""What is to be trained, on what, and with which framework: what every formula asks for beside the layout."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import whole
from .frameworks import TEXTBOOK, Framework
from .hardware import CLUSTERS, Cluster
from .layout import Layout, check
from .precision import find_precision
from .shape import ModelShape


@dataclass(frozen=True)
class Job:
    """global_batch: sequences of seq_len tokens in one step, over all ranks. precision: of matrix products,
    one of `precision.PRECISIONS`. Raises ValueError for numbers that make no sense, and for a precision that
    the device does not have.
    """

    model: ModelShape
    cluster: Cluster = CLUSTERS["dgx-h100"]
    global_batch: int = 1
    seq_len: int = 4096
    framework: Framework = TEXTBOOK
    precision: str = "bf16"

    def __post_init__(self):
        whole("global_batch", self.global_batch)
        whole("seq_len", self.seq_len)
        if not self.cluster.device.rate(find_precision(self.precision).rate):
            raise ValueError(f"{self.cluster.device.name} has no rate for {self.precision} here; take bf16")

    def microbatches(self, layout: Layout):
        """m: how many microbatches go through each replica in a step. Takes arrays."""
        return self.global_batch // (layout.dp * layout.microbatch)

    def check(self, layout: Layout, gpus: int | None = None) -> None:
        """Refuse what cannot be: see `layout.check`."""
        check(self.model, layout, self.global_batch, gpus, self.seq_len)
