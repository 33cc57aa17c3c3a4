"""How sure the planner is of a job of an unknown source: of 8 of 10 sources 8 of 10 runs lie in its interval.

data/planner_errors.json has the natural logarithm of measured over predicted for each published run: of its
seconds, of its memory, and of the ratio of two layouts of one job, whose errors are alike and partly go out.
Nothing was fitted to these runs, but what `cost` names; `make planner-tables` writes the file. A kind is
dense or experts on a generation of GPUs.

A source has a bias of its own: its runs are all slower than predicted, or all faster. The sets of that file
were at hand while the planner was written, so they show too little of it. `ELSEWHERE` has what was found on
runs that were not. With runs of the reader's own source its bias is taken out: see `sure`.
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

INSIDE = 0.8  # of the runs
ENOUGH = 10  # runs of a kind, and as many pairs
# A kind with fewer sources at hand gets no interval: without one of them a single source or none would be
# left, and from that nobody sees how far sources lie apart.
SOURCES = 3
# (generation, experts) of each kind with `SOURCES` sources at hand -> 10th and 90th percentile of measured
# over predicted in 3,568 published runs of 38 sets that were not at hand, scored in November 2026 against
# these very predictions. Blackwell's dense runs begin at 0.67, or at 0.84 where each set counts alike: their
# geometric mean is taken.
ELSEWHERE = {
    ("A100", False): (0.97, 1.47),
    ("Hopper", False): (0.92, 1.26),
    ("Blackwell", False): (0.75, 1.17),
}
# Standard deviations of the logarithm in the same runs: within a source, and of the sources' biases.
WITHIN, BETWEEN = 0.125, 0.13
# A source's own runs count as so many against the planner's word: that keeps a source that is as the planner
# says from being made worse by one odd run. Where they scatter by more than `WITHIN`, they count for less.
AGAINST = 1.5
NORMAL = 1.2816  # standard deviations to either side have `INSIDE` of a normal distribution
BELOW = 0.8416  # and so many have `INSIDE` of it below them
# Percentiles of all runs are too narrow for sources: the runs of a source are off together. An interval
# reaches from its middle at least so far, in logarithms, that `INSIDE` of all sources have `INSIDE` of their
# runs in it: as far as the bias that `INSIDE` of them do not exceed, and from there as far as their spread.
HALF = NORMAL * BETWEEN + BELOW * WITHIN
# Bytes of a source that was not at hand: 8 of 10 of 196 runs of the Ultra-Scale Playbook (2025) held no more
# than so many times what was predicted, nor less than that share, by a record of nanotron that the planner
# had until November 2026.
HELD = 1.13


class Sure(NamedTuple):
    """low, high: times what is predicted, of seconds; None where the kind has no interval. held: times or
    divided by, of bytes. apart: how much longer one layout must be predicted to take than another of the same
    job, as a share, to be slower; below it is a tie. runs: how many published runs of the kind are at hand.
    of: which, in words. measured: how many runs of the reader's own source there are; factor: what they make
    of the predicted seconds.
    """

    low: float | None
    high: float | None
    held: float
    apart: float
    runs: int
    of: str
    measured: int = 0
    factor: float = 1.0


@cache
def published() -> list[dict]:
    """The sets: of each its name, the GPUs' generation, whether the models have experts, and the errors."""
    return json.loads(find("data/planner_errors.json").read_text(encoding="utf-8"))


def source(name: str) -> str:
    """Who published a set: of 'Narayanan 2021, T1 (fitted)' 'Narayanan 2021'. NVIDIA's are one."""
    first = name.partition(",")[0]
    return "NVIDIA" if first in ("Megatron Bridge", "NeMo 24.07", "Automodel", "Megatron-Core") else first


def sure(job: Job) -> Sure:
    """How sure a prediction for this job is. Where the job has runs of its own source (`Job.measured`), their
    mean error is taken out, shrunk towards none: of n runs n/(n + 1), since a source's bias is as large as
    the spread within it. What is left is √(1 + 1/n) times that spread, and never more than without them.
    """
    given = _of_kind(job.cluster.device.generation, bool(job.model.experts))
    return narrowed(given, job.measured)


@cache
def _of_kind(generation: str, experts: bool) -> Sure:
    return interval(generation, experts, published())


def narrowed(given: Sure, measured: tuple[float, ...]) -> Sure:
    """With so many logarithms of measured over predicted of one source."""
    if not (n := len(measured)):
        return given
    mean = sum(measured) / n
    scatter = sum((one - mean) ** 2 for one in measured) / max(1, n - 1)
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
    """The interval of a kind of run: as wide as these sets need, and as `ELSEWHERE` says. A kind that is not
    there has none.
    """
    kind = lambda **is_: [one for one in sets if all(one[name] == value for name, value in is_.items())]
    called = "models with experts" if experts else "dense models"
    mine = kind(experts=experts, generation=generation)
    runs, low, high = len(_all(mine)), None, None
    if (generation, experts) in ELSEWHERE:
        low, high = ELSEWHERE[generation, experts]
        if runs >= ENOUGH:
            there = _percentiles(mine)
            low, high = min(low, there[0]), max(high, there[1])
        low, high = widened(low, high)
    of = f"{called} on {generation or 'such'} GPUs"
    apart = float(np.expm1(_spread(_all(kind(experts=experts), "differences"))))
    return Sure(low, high, HELD, apart, runs, of)


def widened(low: float, high: float) -> tuple[float, float]:
    """The interval with the same middle, in logarithms, and at least `HALF` to either side."""
    middle, half = math.log(low * high) / 2, max(HALF, math.log(high / low) / 2)
    return math.exp(middle - half), math.exp(middle + half)


def inside(one: dict, given: Sure | None = None) -> int:
    """How many runs of a set lie in an interval: without one, in that which all other sets give. Raises
    ValueError for a kind that has none.
    """
    given = given or _of_others(one)
    if given.low is None or given.high is None:
        raise ValueError(f"there is no interval for {given.of}")
    return sum(given.low <= math.exp(error) <= given.high for error in one["seconds"])


def _of_others(one: dict) -> Sure:
    rest = [other for other in published() if other["set"] != one["set"]]
    return interval(one["generation"], one["experts"], rest)


def with_measured(one: dict, n: int, tries: int = 100) -> tuple[float, float, float]:
    """(median error without, with n measured runs of the set; share of the others inside the interval then),
    in the mean over n runs of it drawn at random. The share is NaN for a kind that has no interval.
    """
    random, errors, given = np.random.default_rng(0), np.array(one["seconds"]), _of_others(one)
    off, covered = [], []
    for _ in range(tries):
        chosen = random.choice(len(errors), n, replace=False)
        then, rest = narrowed(given, tuple(errors[chosen])), np.delete(errors, chosen)
        rest = rest - math.log(then.factor)
        off.append(np.median(np.abs(np.expm1(-rest))))
        covered.append(math.nan if then.low is None else inside({"seconds": rest}, then) / len(rest))
    before = float(np.median(np.abs(np.expm1(-errors))))
    return before, float(np.mean(off)), float(np.mean(covered))


def table() -> Table:
    """Each set: the error of our seconds, of the best constant share of peak and of the best other tool, how
    many runs lie in the interval that the other sets give, and the error of our bytes.
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
    """As NumPy's, which loads its masked arrays for it."""
    ordered = sorted(numbers)
    below, part = divmod(share * (len(ordered) - 1), 1)
    after = ordered[min(int(below) + 1, len(ordered) - 1)]
    return ordered[int(below)] + part * (after - ordered[int(below)])


def _spread(errors: list[float]) -> float:
    """The size that `INSIDE` of the errors do not exceed, to either side."""
    return _quantile([abs(error) for error in errors], INSIDE)
