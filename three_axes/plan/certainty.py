"""How sure a prediction is: an interval around it, by kind of GPU and model, that holds 8 of 10 runs.

The ends of `INTERVALS` hold the 10th and the 90th percentile of measured over predicted seconds: those of
3,568 published runs that were not at hand when the planner was written (November 2026), and those of the runs
at hand. All runs of a source are slower than predicted, or all faster, so percentiles of some sources are too
narrow for a new one: an end is at least 31 % from the middle of its interval. The sources' mean errors have a
standard deviation of 13 %, and the runs of one source of 12.5 %; 1.2816 · 13 % + 0.8416 · 12.5 %, in
logarithms, holds 8 of 10 runs of 8 of 10 sources. docs/planner.md has the shares of published runs inside.
"""

from __future__ import annotations

from typing import NamedTuple

from .job import Job

# (generation of the GPU, whether the model has experts) -> the interval's ends, as measured over predicted
# seconds, and the number of published runs at hand
INTERVALS = {
    ("A100", False): (0.890, 1.533, 75),
    ("Hopper", False): (0.820, 1.413, 101),
    ("Blackwell", False): (0.714, 1.229, 105),
    ("Hopper", True): (0.854, 1.470, 26),
    ("Blackwell", True): (0.910, 1.580, 65),
}
# Bytes: of 196 runs of the Ultra-Scale Playbook (2025), which were not at hand, 8 of 10 held between 1/1.13
# and 1.13 times what was predicted. The planner then had a record for their framework, nanotron.
HELD = 1.13
# Whether the model has experts -> the error of the ratio of two layouts' seconds that 8 of 10 published pairs
# do not exceed. It is small, because two layouts of one job share most of their error.
APART = {False: 0.10, True: 0.17}


class Sure(NamedTuple):
    """How far measured and predicted figures of a kind of run lie apart."""

    low: float | None  # the interval of the seconds begins at this times the prediction; None: no interval
    high: float | None  # and ends at this times the prediction
    held: float  # the interval of the bytes: the prediction divided by this, and times this
    apart: float  # two layouts of a job whose predicted seconds differ by a smaller share than this are a tie
    runs: int  # published runs of the kind
    of: str  # the kind, in words


def sure(job: Job) -> Sure:
    """How sure a prediction for this job is."""
    generation, experts = job.cluster.device.generation, bool(job.model.experts)
    of = f"{'models with experts' if experts else 'dense models'} on {generation or 'such'} GPUs"
    low, high, runs = INTERVALS.get((generation, experts), (None, None, 0))
    return Sure(low, high, HELD, APART[experts], runs, of)
