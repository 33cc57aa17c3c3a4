"""What is to be trained, on what, and with which framework: what every formula asks for beside the layout."""

from __future__ import annotations

from dataclasses import dataclass

from .checks import whole
from .frameworks import TEXTBOOK, Framework
from .hardware import CLUSTERS, Cluster
from .layout import Layout, check
from .shape import ModelShape


@dataclass(frozen=True)
class Job:
    """global_batch: sequences of seq_len tokens in one step, over all ranks. Raises ValueError for numbers
    that make no sense.
    """

    model: ModelShape
    cluster: Cluster = CLUSTERS["dgx-h100"]
    global_batch: int = 1
    seq_len: int = 4096
    framework: Framework = TEXTBOOK

    def __post_init__(self):
        whole("global_batch", self.global_batch)
        whole("seq_len", self.seq_len)

    def microbatches(self, layout: Layout):
        """m: how many microbatches go through each replica in a step. Takes arrays."""
        return self.global_batch // (layout.dp * layout.microbatch)

    def check(self, layout: Layout, gpus: int | None = None) -> None:
        """Refuse what cannot be: see `layout.check`."""
        check(self.model, layout, self.global_batch, gpus, self.seq_len)
