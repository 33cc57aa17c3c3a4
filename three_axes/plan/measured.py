"""Compares a measured step, whose seconds or speed the user types, with the planner's prediction."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..checks import positive
from .job import Job, find_precision
from .layout import Layout
from .step import Estimate


def step_seconds(job: Job, layout: Layout, text: str) -> float:
    """Seconds of a step, from seconds, '16.2' or '16.2s', or from the speed of one GPU, '1,100tokens/s'.
    Raises ValueError with a sentence for another text, and for a step that is faster than GPUs can be.
    """
    found = re.fullmatch(r"([\d.,]+) *(s|tokens/s(?:/GPU)?)?", text.strip())
    if not found:
        raise ValueError(
            f"{text.strip()[:60]!r} is no measured step: give its seconds, 16.2s, or the speed of one GPU,"
            " 1,100tokens/s"
        )
    number, unit = found[1].replace(",", ""), found[2] or "s"
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    positive(f"what was measured, {found[0][:60]!r},", value, most=1e9, unit=unit)
    tokens = job.global_batch * job.seq_len / layout.ranks
    seconds = value if unit == "s" else tokens / value
    device, rate = job.cluster.device, find_precision(job.precision).rate
    peak = device.flops if rate == "bf16" else getattr(device, rate)
    if (share := tokens * job.flops_per_token(causal=True) / seconds / peak) > 1:
        raise ValueError(
            f"{text[:60]!r} cannot be: it is {share:.3g} times what GPUs can do. Is the number that of one"
            " GPU, and are model, batch and sequence length the run's?"
        )
    return seconds


class Comparison(NamedTuple):
    """A measured step, compared with the estimate of its layout. ratio: measured seconds over predicted ones.
    mfu: as `Estimate.mfu`, but of the measured step. inside: whether the step lies in the estimate's
    interval, from low to high, in seconds; all three are None if the estimate has no interval.
    """

    step_seconds: float
    ratio: float
    mfu: float
    inside: bool | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        where = "inside" if self.inside else "longer than" if self.ratio > 1 else "shorter than"
        return (
            f"measured: {self.step_seconds:.2f} s, {self.ratio:.2f} times what is predicted, MFU"
            f" {self.mfu:.1%} (attention whole, dense FLOP/s)"
            + f"; {where} the 80% interval"
            * (self.inside is not None)
        )


def compared(made: Estimate, text: str) -> Comparison:
    """A measured step of the estimated layout, compared with the estimate. Raises as `step_seconds`."""
    seconds = step_seconds(made.job, made.layout, text)
    ratio, sure = seconds / made.step_seconds, made.sure
    beside = Comparison(seconds, ratio, made.mfu / ratio)
    if sure.low is None or sure.high is None:
        return beside
    low, high = (end * made.step_seconds for end in (sure.low, sure.high))
    return beside._replace(inside=low <= seconds <= high, low=low, high=high)
