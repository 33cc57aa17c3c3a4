"""Is my speed normal? A measured step beside what is predicted and beside published runs, and what would
explain a gap.

data/published_runs.csv has the runs that may be carried, papers' figures and MLPerf Training's audited logs
(Apache-2.0, mlcommons/training_results_v3.1 to v5.1); `tools/bench/published.py` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ..files import rows_of
from ..paper.hardware import generation
from ..table import Table
from .estimate import Estimate, estimate
from .job import Job
from .layout import Layout

NEAREST = 4  # published runs that are shown
WORTH = 0.01  # of a step: what takes less explains nothing


class PublishedRun(NamedTuple):
    """params: billions. step_s: measured. error: the natural logarithm of measured over predicted."""

    source: str
    model: str
    params: float
    experts: int
    gpus: int
    device: str
    precision: str
    batch: int
    seq_len: int
    step_s: float
    error: float


@cache
def published_runs() -> list[PublishedRun]:
    """The rows of data/published_runs.csv, read once."""
    kinds = (str, str, float, int, int, str, str, int, int, float, float)
    read = lambda row: PublishedRun(*(kind(x) for kind, x in zip(kinds, row.values())))
    return [read(row) for row in rows_of("published_runs.csv")]


def nearest(job: Job, gpus: int) -> list[PublishedRun]:
    """Published runs that are most like it, in model, GPUs and precision: one of a source and model."""

    def far(run: PublishedRun) -> float:
        other = generation(run.device) != job.cluster.device.generation
        size = abs(math.log(run.params * 1e9 / job.model.params)) + abs(math.log(run.gpus / gpus)) / 2
        return size + 2 * other + (run.precision != job.precision)

    alike = [run for run in published_runs() if run.experts == bool(job.model.experts)]
    first: dict[tuple, PublishedRun] = {}
    for run in sorted(alike, key=far):
        first.setdefault((run.source, run.params), run)
    return list(first.values())[:NEAREST]


def causes(e: Estimate) -> Iterator[tuple[str, Job, Layout]]:
    """What makes such a step longer, and this one does not have yet: in words, the job and layout with it."""
    job, at, f, cluster = e.job, e.layout, e.job.framework, e.job.cluster
    without = lambda *words: replace(f, hides=tuple(one for one in f.hides if one not in words))
    many = at.ranks > cluster.gpus_per_node
    for words, framework, here in (
        ("TP's sums and gathers do not hide", without("tensor parallel", "input gradients"), at.tp > 1),
        ("gradients and weights do not hide", without("gradients", "updated weights"), at.replicas > 1),
        ("a ring's keys and values do not hide", without("keys and values"), at.cp > 1),
        ("gradients are float32", replace(f, gradient_bytes=4), f.gradient_bytes == 2),
        ("operations run one by one, not fused", replace(f, fused=False, fused_loss=False), f.fused),
        ("a launch takes the host 100 µs", replace(f, launch_seconds=1e-4), True),
        ("the fullest rank's experts get twice the mean", replace(f, imbalance=2.0), at.ep > 1),
    ):
        if here and framework != f:
            yield words, replace(job, framework=framework), at
    if at.recompute != "full" or at.recomputed:
        yield "all layers are computed twice", job, replace(at, recompute="full", recomputed=0)
    if many and cluster.rails > 1:
        yield "one port of each node is used", replace(job, cluster=replace(cluster, rails=1)), at
        slow = replace(cluster, inter_node_bandwidth=cluster.inter_node_bandwidth / 2)
        yield "the network between nodes has half its speed", replace(job, cluster=slow), at
    device, rates = cluster.device, ("achievable", "achievable_fp8", "achievable_fp4")
    cool = replace(device, **{rate: 0.8 * getattr(device, rate) for rate in rates})
    yield "the GPUs' clocks are a fifth lower", replace(job, cluster=replace(cluster, device=cool)), at


class Normal(NamedTuple):
    """A measured step beside the estimate of its layout."""

    estimate: Estimate
    seconds: float

    @property
    def _factor(self) -> float:
        return self.seconds / self.estimate.step_seconds

    @property
    def verdict(self) -> str:
        """normal, slow or fast."""
        sure = self.estimate.sure
        return "slow" if self._factor > sure.high else "fast" if self._factor < sure.low else "normal"

    def longer(self) -> list[tuple[str, float]]:
        """(cause, seconds it would add), the longest first."""
        whole, found = self.estimate.step_seconds, []
        for words, job, layout in causes(self.estimate):
            found.append((words, estimate(job, layout).step_seconds - whole))
        return sorted((one for one in found if one[1] > WORTH * whole), key=lambda one: -one[1])

    def text(self) -> str:
        """The verdict, the nearest published runs, and where the step is too long, what would explain it."""
        e, predicted = self.estimate, self.estimate.step_seconds
        tokens = e.job.global_batch * e.job.seq_len / e.layout.ranks
        speed = lambda seconds: f"{tokens / seconds:,.0f} tokens/s/GPU"
        times = f"{self._factor:.2f} times what is predicted."
        said = {
            "normal": "Your speed is normal: it lies inside.",
            "slow": f"Your step is slow: {times}",
            "fast": f"Your step is fast: {times} Are model, batch and sequence length the run's? Is the"
            " number that of one GPU?",
        }
        lines = [
            e.title,
            "",
            f"yours      {self.seconds:.2f} s a step, {speed(self.seconds)}",
            f"predicted  {predicted:.2f} s a step, {speed(predicted)}",
            e.interval(),
            said[self.verdict],
            "",
            repr(self.runs()),
        ]
        gap = self.seconds - predicted
        if self.verdict != "fast" and gap > WORTH * predicted:
            lines += ["", f"{gap:.2f} s are to be explained. Each of these alone would add:"]
            lines += [f"  {seconds:.2f} s  {words}" for words, seconds in self.longer()]
            lines += [
                "A rank that is slow or waits is none of these: three-axes explain finds it in a trace."
            ]
        return "\n".join(lines)

    def nearest(self) -> list[tuple[PublishedRun, float]]:
        """The nearest published runs, and seconds of each here: as far from our prediction as it was."""
        e = self.estimate
        return [(run, math.exp(run.error) * e.step_seconds) for run in nearest(e.job, e.layout.ranks)]

    def runs(self) -> Table:
        """These as a table."""
        rows = []
        for run, here in self.nearest():
            size = f"{run.model}, {run.params:.3g}B, {run.batch} × {run.seq_len:,}"
            where = f"{run.gpus} × {run.device}, {run.precision}"
            rows.append([run.source, size, where, f"{run.step_s:.2f} s", f"{here:.2f} s"])
        return Table(["the nearest published runs", "model and batch", "on", "took", "as here"], rows)

    def data(self) -> dict:
        """The same for other programs."""
        named = [dict(run._asdict(), here=here) for run, here in self.nearest()]
        causes = [{"cause": words, "seconds": seconds} for words, seconds in self.longer()]
        verdict = dict(verdict=self.verdict, step_seconds=self.seconds, factor=self._factor)
        return verdict | {"nearest": named, "longer": causes}
