"""What the planner looks at: which layouts there are, as rows of numbers, and each as a `Candidate` when it
is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .checks import divisors
from .frameworks import Framework
from .job import Job
from .layout import Axes, Layout, check
from .models import ModelShape

_ROW = np.dtype(
    [(k, int) for k in ("dp", "tp", "pp", "microbatch", "interleave", "zero", "names")]
    + [("sp", bool), ("seconds", float), ("memory", float)]
)


@dataclass(frozen=True)
class Candidate:
    """One layout that can be, with its step time (s) and the fullest GPU's memory (bytes)."""

    layout: Layout
    seconds: float
    memory: float

    @property
    def axes(self) -> Axes:
        return self.layout.axes


class Candidates(Sequence):
    """Many of them, in the order of `by`: each is made when it is asked for."""

    def __init__(self, numbers: np.ndarray, names: list[tuple], framework: Framework, by: str, keep):
        chosen = numbers[keep]
        self.numbers = chosen[np.argsort(chosen[by], kind="stable")]
        self.names, self.framework = names, framework

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        row = self.numbers[i]
        schedule, recompute = self.names[row["names"]]
        sizes = {k: int(row[k]) for k in ("dp", "tp", "pp", "microbatch", "interleave", "zero")}
        layout = self.framework.layout(
            **sizes, schedule=schedule, recompute=recompute, sequence_parallel=bool(row["sp"])
        )
        return Candidate(layout, float(row["seconds"]), float(row["memory"]))

    def first_of_each(self) -> list[Candidate]:
        """The first with each (dp, tp, pp), in order."""
        axes = np.stack([self.numbers[axis] for axis in Axes._fields], axis=1)
        _, first = np.unique(axes, axis=0, return_index=True)
        return [self[int(k)] for k in sorted(first)]


def all_rows(job: Job, gpus: int, only: dict[str, int]) -> tuple[np.ndarray, dict[Axes, str]]:
    """(all rows of numbers, whatever the schedule; which sizes cannot be, and why)."""
    model, framework = job.model, job.framework
    rows, impossible = [], {}
    for t in divisors(gpus):
        for p in divisors(gpus // t):
            axes = Axes(gpus // t // p, t, p)
            if any(getattr(axes, axis) != size for axis, size in only.items()):
                continue
            try:
                check(model, framework.layout(**axes._asdict()), job.global_batch, gpus)
            except ValueError as e:
                impossible[axes] = str(e)
                continue
            zeros = framework.zeros if p == 1 else framework.zeros_in_pipeline
            if not zeros:
                only_zero = " or ".join(map(str, framework.zeros))
                impossible[axes] = (
                    f"with a pipeline {framework.name} has no ZeRO {only_zero}, which is asked for"
                )
            share = job.global_batch // axes.dp
            for b in (b for b in range(1, 65) if share % b == 0):
                for v in _chunks(model, framework, p, share // b):
                    # What would make no difference is looked at once.
                    for zero in zeros if axes.dp > 1 else zeros[:1]:
                        for sp in (True, False) if t > 1 else (True,):
                            rows.append((*axes, b, v, zero, 0, sp, 0.0, 0.0))
    if not rows and not impossible:
        given = ", ".join(f"{axis} {size}" for axis, size in only.items())
        raise ValueError(f"{given} cannot be on {gpus} GPUs: dp·tp·pp must be {gpus}")
    return np.array(rows, _ROW), impossible


def _chunks(model: ModelShape, framework: Framework, p: int, m: int) -> list[int]:
    if p == 1 or framework.balanced:
        return [1]
    divide = lambda v: model.layers % (p * v) == 0 or (model.layers + 2) % (p * v) == 0
    most = min(framework.most_chunks, model.layers // p + 1)
    return [v for v in range(1, most + 1) if divide(v) and (v == 1 or m % p == 0)]


def runs(job: Job, schedule: str, recompute: str, rows: np.ndarray) -> np.ndarray:
    """Which rows `schedule` can run, as `check` has it. Without a pipeline all schedules are one, 1F1B."""
    kind = Layout(schedule=schedule).pipeline
    p, v = rows["pp"], rows["interleave"]
    if kind.chunks == 0:
        return v > 1
    if schedule == "1F1B":
        return v == 1
    enough = job.global_batch // (rows["dp"] * rows["microbatch"]) >= kind.fills * p
    divide = (job.model.layers % (kind.chunks * p) == 0) & (not (job.framework.balanced and kind.chunks > 1))
    return (v == 1) & (p > 1) & enough & divide & (not kind.splits or recompute in ("none", "selective"))
