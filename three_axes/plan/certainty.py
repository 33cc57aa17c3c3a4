"""How sure the planner is, read from published runs: 8 of 10 of a kind lie inside the interval it gives.

data/planner_errors.json has the natural logarithm of measured over predicted for each run: of its seconds, of
its memory, and of the ratio of two layouts of one job, whose errors are alike and partly go out. Nothing was
fitted to these runs, but what `cost` names; `tools/bench/published.py` writes the file. A kind is dense or
experts on a generation of GPUs; nanotron, whose runs were slowed by more than we count, is one by itself.
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import NamedTuple

import numpy as np

from ..files import find
from ..paper.hardware import GENERATIONS
from ..table import Table
from .job import Job

INSIDE = 0.8  # of the runs
ENOUGH = 10  # runs of a kind, and as many pairs


class Sure(NamedTuple):
    """low, high: times what is predicted, of seconds; held: times or divided by, of bytes. apart: how much
    longer one layout must be predicted to take than another of the same job, as a share, to be slower; below
    it is a tie. runs: how many the interval was read from. of: which, in words.
    """

    low: float
    high: float
    held: float
    apart: float
    runs: int
    of: str


@cache
def published() -> list[dict]:
    """The sets: of each its name, the GPUs' generation, whether the models have experts, and the errors."""
    return json.loads(find("data/planner_errors.json").read_text(encoding="utf-8"))


def program(job: Job) -> str:
    """The framework, where its runs are a kind by themselves; else ""."""
    return job.framework.name if job.framework.name == "nanotron" else ""


def sure(job: Job) -> Sure:
    """How sure a prediction for this job is."""
    return interval(job.cluster.device.generation, bool(job.model.experts), program(job), published())


def interval(generation: str, experts: bool, program: str, sets: list[dict]) -> Sure:
    """Of a kind of run, from these sets."""
    kind = lambda **is_: [one for one in sets if all(one[name] == value for name, value in is_.items())]
    called = "models with experts" if experts else "dense models"
    if own := kind(program=program, experts=experts) if program else []:
        alike, memory, of = own, own, program
        errors = _all(own, "seconds")
        low, high = np.quantile(errors, ((1 - INSIDE) / 2, (1 + INSIDE) / 2))
    else:
        alike, memory = kind(program="", experts=experts), kind(program="")
        known = {name: _all(kind(program="", experts=experts, generation=name)) for name in GENERATIONS}
        known = {name: errors for name, errors in known.items() if len(errors) >= ENOUGH}
        widest = max(known, key=lambda name: _spread(known[name]))  # for a kind with few runs
        of = generation if generation in known else widest
        errors, of = known[of], f"{called} on {of} GPUs"
        low, high = -_spread(errors), _spread(errors)
    held, apart = _spread(_all(memory, "memory")), _spread(_all(alike, "differences"))
    low, high, held = map(float, np.exp([low, high, held]))
    return Sure(low, high, held, float(np.expm1(apart)), len(errors), of)


def inside(one: dict) -> int:
    """How many runs of a set lie in the interval that all other sets give."""
    rest = [other for other in published() if other["set"] != one["set"]]
    given = interval(one["generation"], one["experts"], "", rest)
    return sum(given.low <= math.exp(error) <= given.high for error in one["seconds"])


def table() -> Table:
    """Each set: the error of our seconds, of the best constant share of peak and of the best other tool, how
    many runs lie in the interval that the other sets give, and the error of our bytes.
    """
    rows, names = [], dict.fromkeys(one["set"] for one in published())
    for name in names:
        sets = [one for one in published() if one["set"] == name]
        off, held = (np.expm1(np.negative(_all(sets, what))) for what in ("seconds", "memory"))
        size = lambda errors: f"{100 * np.abs(errors).mean():.1f} %" if len(errors) else ""
        covered = "" if sets[0]["program"] else f"{sum(map(inside, sets)) / len(off):.0%}"
        middle = f"{100 * np.median(np.abs(off)):.1f} %"
        bias, constant = f"{100 * off.mean():+.1f} %", f"{100 * sets[0]['constant']:.1f} %"
        errors = size(off), middle, bias, constant, sets[0]["peer"]
        rows.append([name, str(len(off)), *errors, covered, size(held)])
    errors = "error", "median", "bias", "a constant", "best other tool"
    columns = ["published set", "runs", *errors, "inside", "memory"]
    return Table(columns, rows)


def _all(sets: list[dict], what: str = "seconds") -> list[float]:
    return [error for one in sets for error in one[what]]


def _spread(errors: list[float]) -> float:
    """What so many of them do not exceed, to either side."""
    return float(np.quantile(np.abs(errors), INSIDE))
