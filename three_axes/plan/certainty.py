"""How sure a prediction is: an interval around it that holds 8 of 10 runs, for 8 of 10 sources of runs.

A *source* published one or more sets of runs. A *kind* of run is a dense model, or one with experts, on one
generation of GPUs. An *error* is the natural logarithm of measured over predicted. data/planner_errors.json,
which `make planner-tables` writes, has the errors of each published run: of its seconds, of its memory, and
of the ratio of two layouts of one job. The error of a ratio is smaller, because the errors of two layouts are
alike. Nothing was fitted to these runs, except what `cost` names.

Each source has a bias: its runs are all slower than predicted, or all faster. The runs of that file were at
hand while the planner was written, so they show too little bias. `ELSEWHERE` has percentiles of runs that
were not at hand. If the user gives measured runs, `sure` takes the bias of their source out.
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import NamedTuple

import numpy as np

from ..files import find
from ..table import Table
from .job import Job

INSIDE = 0.8  # the share of the runs that an interval should hold
ENOUGH = 10  # with fewer runs of a kind at hand, only the percentiles of `ELSEWHERE` are used
# With fewer sources a kind has no interval: an interval is tested on a source that is left out, and one
# remaining source does not show how far sources differ.
SOURCES = 3
# Kind, as (generation, experts) -> 10th and 90th percentile of measured over predicted, for the kinds with
# at least `SOURCES` sources. From 3,568 published runs of 38 sets that were not at hand, compared with the
# planner in November 2026. Blackwell's 10th percentile is 0.67, or 0.84 if each set has the same weight; 0.75
# is their geometric mean.
ELSEWHERE = {
    ("A100", False): (0.97, 1.47),
    ("Hopper", False): (0.92, 1.26),
    ("Blackwell", False): (0.75, 1.17),
}
# Standard deviations of the errors of the same runs: within a source, and of the sources' biases.
WITHIN, BETWEEN = 0.125, 0.13
# Of the mean error of the user's n runs, n / (n + AGAINST) is taken out, and less if they scatter by more
# than `WITHIN`. So one odd run does not spoil a prediction that was right.
AGAINST = 1.5
# The share `INSIDE` of a normal distribution lies within NORMAL standard deviations to either side of its
# mean, and the same share lies below its mean plus BELOW standard deviations.
NORMAL, BELOW = 1.2816, 0.8416
# The least width of an interval to either side of its middle, in logarithms. Percentiles of all runs are too
# narrow, because the runs of a source err together. `INSIDE` of the sources have a bias of at most NORMAL ·
# BETWEEN, and `INSIDE` of a source's runs lie at most BELOW · WITHIN beyond its bias.
HALF = NORMAL * BETWEEN + BELOW * WITHIN
# Bytes: of 196 runs of the Ultra-Scale Playbook (2025), which were not at hand, 8 of 10 held between 1/1.13
# and 1.13 times what was predicted. The planner then had a record for their framework, nanotron.
HELD = 1.13


class Sure(NamedTuple):
    """How far measured and predicted figures of a kind of run lie apart."""

    low: float | None  # the interval of the seconds begins at this times the prediction; None: no interval
    high: float | None  # and ends at this times the prediction
    held: float  # the interval of the bytes: the prediction divided by this, and times this
    apart: float  # two layouts of a job whose predicted seconds differ by a smaller share than this are a tie
    runs: int  # published runs of the kind
    of: str  # the kind, in words
    measured: int = 0  # runs that the user has measured
    factor: float = 1.0  # the predicted seconds are multiplied by this, because of these runs


@cache
def published() -> list[dict]:
    """A record of errors for each set and kind of run. `kinds` in tests/plan/published.py makes them."""
    return json.loads(find("data/planner_errors.json").read_text(encoding="utf-8"))


def source(name: str) -> str:
    """The source of a set: 'Narayanan 2021, T1 (fitted)' -> 'Narayanan 2021'. NVIDIA's are one source."""
    first = name.partition(",")[0]
    return "NVIDIA" if first in ("Megatron Bridge", "NeMo 24.07", "Automodel", "Megatron-Core") else first


def sure(job: Job) -> Sure:
    """How sure a prediction for this job is, with the runs that the user has measured (`Job.measured`)."""
    given = _of_kind(job.cluster.device.generation, bool(job.model.experts))
    return narrowed(given, job.measured)


@cache
def _of_kind(generation: str, experts: bool) -> Sure:
    return interval(generation, experts, published())


def narrowed(given: Sure, measured: tuple[float, ...]) -> Sure:
    """`given` after n runs of one source with these errors. Most of their mean error is taken out: see
    `AGAINST`. The interval of a further run of this source is then √(1 + 1/n) times as wide as the spread
    within a source, and never wider than without these runs.
    """
    if not (n := len(measured)):
        return given
    mean = sum(measured) / n
    scatter = sum((error - mean) ** 2 for error in measured) / max(1, n - 1)
    taken = n / (n + AGAINST * max(1.0, scatter / WITHIN**2))
    given = given._replace(measured=n, factor=math.exp(taken * mean))
    if given.low is None or given.high is None:
        return given
    low, high = math.log(given.low), math.log(given.high)
    middle, half = (low + high) / 2, (high - low) / 2
    within = max(WITHIN, half / NORMAL / math.sqrt(2))
    half = min(half, NORMAL * within * math.sqrt(1 + 1 / n))
    middle *= 1 - taken
    return given._replace(low=math.exp(middle - half), high=math.exp(middle + half))


def interval(generation: str, experts: bool, sets: list[dict]) -> Sure:
    """The interval of a kind of run. It holds the percentiles of `ELSEWHERE` and of these sets. A kind that
    `ELSEWHERE` omits has no interval.
    """
    alike = [one for one in sets if one["experts"] == experts]
    of_kind = [one for one in alike if one["generation"] == generation]
    runs, low, high = len(_all(of_kind)), None, None
    if (generation, experts) in ELSEWHERE:
        low, high = ELSEWHERE[generation, experts]
        if runs >= ENOUGH:
            at_hand = _percentiles(of_kind)
            low, high = min(low, at_hand[0]), max(high, at_hand[1])
        low, high = widened(low, high)
    of = f"{'models with experts' if experts else 'dense models'} on {generation or 'such'} GPUs"
    apart = float(np.expm1(_spread(_all(alike, "differences"))))
    return Sure(low, high, HELD, apart, runs, of)


def widened(low: float, high: float) -> tuple[float, float]:
    """The interval with the same middle, in logarithms, and at least `HALF` to either side."""
    middle, half = math.log(low * high) / 2, max(HALF, math.log(high / low) / 2)
    return math.exp(middle - half), math.exp(middle + half)


def inside(record: dict, given: Sure | None = None) -> int:
    """How many runs of a set lie in the given interval; by default in the interval from all other sets.
    Raises ValueError for a kind that has none.
    """
    given = given or _of_others(record)
    if given.low is None or given.high is None:
        raise ValueError(f"there is no interval for {given.of}")
    return sum(given.low <= math.exp(error) <= given.high for error in record["seconds"])


def _of_others(record: dict) -> Sure:
    rest = [other for other in published() if other["set"] != record["set"]]
    return interval(record["generation"], record["experts"], rest)


def with_measured(record: dict, n: int, tries: int = 100) -> tuple[float, float, float]:
    """(median error of a set's runs; after n of its runs were measured, the median error of its other runs,
    and the share of these inside the interval). The last two are means over `tries` random draws of the n
    runs. The share is NaN for a kind that has no interval.
    """
    random, errors, given = np.random.default_rng(0), np.array(record["seconds"]), _of_others(record)
    off, covered = [], []
    for _ in range(tries):
        chosen = random.choice(len(errors), n, replace=False)
        then = narrowed(given, tuple(errors[chosen]))
        rest = np.delete(errors, chosen) - math.log(then.factor)
        off.append(np.median(np.abs(np.expm1(-rest))))
        covered.append(math.nan if then.low is None else inside({"seconds": rest}, then) / len(rest))
    before = float(np.median(np.abs(np.expm1(-errors))))
    return before, float(np.mean(off)), float(np.mean(covered))


def table() -> Table:
    """For each set: the error of our seconds, of the best constant share of peak, and of the best other tool;
    the share of runs in the interval from the other sets; the error of our bytes.
    """
    rows, names = [], dict.fromkeys(one["set"] for one in published())
    for name in names:
        sets = [one for one in published() if one["set"] == name]
        off, held = (np.expm1(np.negative(_all(sets, what))) for what in ("seconds", "memory"))
        size = lambda errors: f"{100 * np.abs(errors).mean():.1f} %" if len(errors) else ""
        sized = [one for one in sets if (one["generation"], one["experts"]) in ELSEWHERE]
        covered = f"{sum(map(inside, sized)) / len(_all(sized)):.0%}" if sized else ""
        middle = f"{100 * np.median(np.abs(off)):.1f} %"
        bias, constant = f"{100 * off.mean():+.1f} %", f"{100 * sets[0]['constant']:.1f} %"
        errors = size(off), middle, bias, constant, sets[0]["peer"]
        rows.append([name, str(len(off)), *errors, covered, size(held)])
    errors = "error", "median", "bias", "a constant", "best other tool"
    columns = ["published set", "runs", *errors, "inside", "memory"]
    return Table(columns, rows)


def _all(sets: list[dict], what: str = "seconds") -> list[float]:
    return [error for one in sets for error in one[what]]


def _percentiles(sets: list[dict]) -> tuple[float, float]:
    """The 10th and 90th percentile of measured over predicted."""
    low, high = (_quantile(_all(sets), share) for share in ((1 - INSIDE) / 2, (1 + INSIDE) / 2))
    return math.exp(low), math.exp(high)


def _quantile(numbers: list[float], share: float) -> float:
    """The same as `numpy.quantile`, which loads NumPy's masked arrays."""
    ordered = sorted(numbers)
    below, part = divmod(share * (len(ordered) - 1), 1)
    after = ordered[min(int(below) + 1, len(ordered) - 1)]
    return ordered[int(below)] + part * (after - ordered[int(below)])


def _spread(errors: list[float]) -> float:
    """The absolute error that `INSIDE` of the errors do not exceed."""
    return _quantile([abs(error) for error in errors], INSIDE)
