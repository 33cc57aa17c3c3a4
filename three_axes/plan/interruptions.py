"""What lost GPUs cost: how often a job stops, how often to write checkpoints, the share of useful time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..table import human
from .data_parallel import adapter_share
from .job import Job
from .layout import Layout
from .step import Estimate, estimate

# Seconds to find the fault and start again: less than 10 minutes in MegaScale (Jiang et al. 2024, 6.3).
RESTART = 600.0
UNITS = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0, "seconds": 1.0}


def checkpoint_bytes(job: Job) -> float:
    """Bytes of one checkpoint: of weights and their optimizer state. With LoRA those of the adapters alone,
    because frozen weights are on disk already.
    """
    holds = job.framework.holds
    params = adapter_share(job, Layout()) if job.lora else job.model.params
    return params * (holds.weight_bytes + holds.state_bytes)


@dataclass(frozen=True)
class Interruptions:
    """How often a job stops, and what its checkpoints take. between: mean seconds between two interruptions.
    size: bytes of a checkpoint. write: seconds to write it.
    """

    between: float
    size: float
    write: float

    @property
    def every(self) -> float:
        """The best seconds between two checkpoints: √(2 · write · between) (Young 1974)."""
        return math.sqrt(2 * self.write * self.between)

    @property
    def goodput(self) -> float:
        """The share of the time that is useful training, with interruptions at random times (Daly 2006). If
        they are rare, this is 1 − write/every − (every/2 + RESTART)/between.
        """
        often = (self.every + self.write) / self.between
        if often + RESTART / self.between > 700:  # e to this power is too large for a float
            return 0.0
        return self.every / self.between / math.exp(RESTART / self.between) / math.expm1(often)


def interruptions(e: Estimate) -> Interruptions:
    """The interruptions of this job on all of its GPUs."""
    cluster, ranks, size = e.job.cluster, e.layout.ranks, checkpoint_bytes(e.job)
    between = 3600 * cluster.gpu_hours_between_interruptions / ranks
    return Interruptions(between, size, size / (cluster.storage_bandwidth * ranks))


def going_on(e: Estimate) -> Estimate | None:
    """The step on as many whole replicas as remain without one node and divide the batch evenly; None if none
    do. Each rank then holds a larger shard of ZeRO's state, so it may not fit.
    """
    for dp in range(e.layout.dp - int(e.layout.reach("dp", e.job.cluster.gpus_per_node)[0]), 0, -1):
        try:
            return estimate(e.job, replace(e.layout, dp=dp))
        except ValueError:  # the batch, or a shard, does not divide
            continue
    return None


def in_words(seconds: float) -> str:
    """A time in the largest unit of which it has at least two, such as '33 days'."""
    unit = next((unit for unit, long in UNITS.items() if seconds >= 2 * long), "seconds")
    return f"{seconds / UNITS[unit]:.3g} {unit}"


def what_it_stops(e: Estimate) -> str:
    """Sentences: what a lost GPU stops, how often, when to write checkpoints, and what could go on."""
    stop, less, ranks = interruptions(e), going_on(e), e.layout.ranks
    hours = e.job.cluster.gpu_hours_between_interruptions
    who = f"All {ranks:,}: every step needs each of them" if ranks > 1 else "The only one there is"
    smaller = "nothing can go on"
    if less and less.free >= 0:
        smaller = f"DP {less.layout.dp} could go on, on {less.layout.ranks:,} GPUs"
    elif less:
        smaller += f": DP {less.layout.dp} would need {human(less.memory_bytes)} on a GPU"
    return (
        f"{who}. With an interruption in {hours:,.0f} GPU-hours the job stops every {in_words(stop.between)}."
        f" A checkpoint has {human(stop.size)} and takes {in_words(stop.write)} to write. Where training"
        f" stands still meanwhile, write one every √(2 · {in_words(stop.write)} · {in_words(stop.between)}) ="
        f" {in_words(stop.every)}: {stop.goodput:.1%} of the time then trains"
        f" (goodput). Until the node is replaced, {smaller}."
    )
