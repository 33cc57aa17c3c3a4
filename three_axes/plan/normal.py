"""Is my speed normal? A measured step beside what is predicted and beside published runs, and what would
explain a gap.

data/published_runs.csv has the runs that may be carried, papers' figures and MLPerf Training's audited logs
(Apache-2.0, mlcommons/training_results_v3.1 to v5.1); `make planner-tables` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from ..files import rows_of
from ..paper.hardware import Cluster, generation
from ..table import Table, human
from .job import Job
from .layout import Layout
from .measured import mfu
from .stages import layers_on_rank
from .step import Estimate, estimate

NEAREST = 4  # published runs that are shown
MUCH = 1.5  # times the gap: what alone adds more is not its cause
WORTH = 0.01  # of a step: what takes less explains nothing
TCP = 3e9  # bytes/s of a node over sockets: assumed


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
    """Published runs of the same kind (generation of the GPUs, experts or none) that are most like it, in
    model, GPUs and precision: one of a source and model. None where no such run is at hand.
    """

    def far(run: PublishedRun) -> float:
        size = abs(math.log(run.params * 1e9 / job.model.params)) + abs(math.log(run.gpus / gpus)) / 2
        return size + (run.precision != job.precision)

    kind = job.cluster.device.generation, bool(job.model.experts)
    alike = [run for run in published_runs() if (generation(run.device), bool(run.experts)) == kind]
    first: dict[tuple, PublishedRun] = {}
    for run in sorted(alike, key=far):
        first.setdefault((run.source, run.params), run)
    return list(first.values())[:NEAREST]


def that_fits(job: Job, layout: Layout) -> Estimate:
    """The layout, or where it does not fit, with as few layers computed twice as do. Raises ValueError where
    none does: nobody has run that.
    """
    asked = estimate(job, layout)
    if asked.fits or layout.recompute != "none":
        made = asked
    else:
        layers = int(layers_on_rank(job.model, layout, min(1, layout.pp - 1)))
        least = lambda few: estimate(job, replace(layout, recompute="full", recomputed=few * (few < layers)))
        many = range(layout.chunks, layers + 1, layout.chunks)
        made = next((e for e in map(least, many) if e.fits), least(layers))
    if made.fits or made.tight:
        return made
    raise ValueError(
        f"{layout} of {job.model.name} does not fit {job.cluster.device.name}: it needs"
        f" {human(made.memory_bytes)} of {human(job.cluster.device.memory)}. Is this the layout of your run?"
    )


def _speed(bytes_per_second: float) -> str:
    return f"{human(bytes_per_second)}/s"


def _network(cluster: Cluster, share: float) -> Cluster:
    """With that share of the speed between nodes."""
    link, port = cluster.all_to_all
    speed, busbw = share * cluster.inter_node_bandwidth, lambda pairs: tuple((n, share * s) for n, s in pairs)
    measured: Any = dict(busbw=busbw(cluster.busbw), busbw_gather=busbw(cluster.busbw_gather))
    return replace(cluster, inter_node_bandwidth=speed, all_to_all=(link, share * port), **measured)


def _clock(cluster: Cluster, share: float) -> Cluster:
    """With that share of the GPUs' FLOP/s."""
    rates = ("achievable", "achievable_fp8", "achievable_fp4")
    cool = {rate: share * getattr(cluster.device, rate) for rate in rates}
    return replace(cluster, device=replace(cluster.device, **cool))


class Cause(NamedTuple):
    """What makes such a step longer: in words, what it changes of a framework's record, of the network's and
    the GPUs' speed (shares), and whether all layers are computed twice.
    """

    words: str
    framework: dict = {}
    network: float = 1.0
    clock: float = 1.0
    twice: bool = False


def causes(e: Estimate) -> list[Cause]:
    """The causes that this step does not have yet."""
    at, f, cluster = e.layout, e.job.framework, e.job.cluster
    found = []

    def may(words: str, here=True, **changed) -> None:
        if here and any(getattr(f, name) != value for name, value in changed.items()):
            found.append(Cause(words, changed))

    hidden = lambda *words: tuple(one for one in f.hides if one not in words)
    may("TP's sums and gathers do not hide", at.tp > 1, hides=hidden("tensor parallel", "input gradients"))
    may("gradients and weights do not hide", at.replicas > 1, hides=hidden("gradients", "updated weights"))
    may("a ring's keys and values do not hide", at.cp > 1, hides=hidden("keys and values"))
    may("gradients are float32", f.gradient_bytes == 2, gradient_bytes=4)
    may("operations run one by one, not fused", fused=False, fused_loss=False)
    may("the attention is not fused", fused_attention=False)
    may("a launch takes the host 100 µs", launch_seconds=max(1e-4, f.launch_seconds))
    may("the fullest rank's experts get twice the mean", at.ep > 1, imbalance=max(2.0, f.imbalance))
    if at.recompute != "full" or at.recomputed:
        found.append(Cause("all layers are computed twice", twice=True))
    if at.ranks > cluster.gpus_per_node:
        node = cluster.gpus_per_node
        found.append(Cause("one port of each node is used, by all of its GPUs", network=1 / node))
        tcp = min(1.0, TCP / node / cluster.inter_node_bandwidth)
        found.append(Cause(f"NCCL fell back to TCP, {human(TCP)}/s a node", network=tcp))
        found.append(Cause("the network between nodes has half its speed", network=0.5))
    found.append(Cause("the GPUs' clocks are a fifth lower", clock=0.8))
    return found


def with_causes(e: Estimate, those: Sequence[Cause]) -> float:
    """Seconds of the step with all of these; the slowest network and clock of them."""
    job, layout = e.job, e.layout
    changed: dict = {}
    for cause in those:
        for name, value in cause.framework.items():
            both = name == "hides" and "hides" in changed
            changed[name] = tuple(set(value) & set(changed[name])) if both else value
    cluster = _network(job.cluster, min(cause.network for cause in those))
    cluster = _clock(cluster, min(cause.clock for cause in those))
    if any(cause.twice for cause in those):
        layout = replace(layout, recompute="full", recomputed=0)
    there = replace(job, cluster=cluster, framework=replace(job.framework, **changed))
    return estimate(there, layout).step_seconds


@dataclass(frozen=True)
class Normal:
    """A measured step beside the estimate of its layout. least: its recompute is the least that fits."""

    estimate: Estimate
    seconds: float
    least: bool = False

    @property
    def _factor(self) -> float:
        return self.seconds / self.estimate.step_seconds

    @property
    def mfu(self) -> float:
        """See `measured.mfu`."""
        return mfu(self.estimate.job, self.estimate.layout, self.seconds)

    @property
    def verdict(self) -> str:
        """normal, slow, fast, or impossible: more than the GPUs can do."""
        sure = self.estimate.sure
        if self.mfu > 1:
            return "impossible"
        return "slow" if self._factor > sure.high else "fast" if self._factor < sure.low else "normal"

    @property
    def gap(self) -> float:
        """Seconds that the step takes longer than is predicted."""
        return self.seconds - self.estimate.step_seconds

    def longer(self) -> list[tuple[str, float]]:
        """(cause, seconds that it alone would add), what comes nearest to the gap first; where there is no
        gap, the longest.
        """
        return [(cause.words, seconds) for cause, seconds in self._added]

    @cached_property
    def _added(self) -> list[tuple[Cause, float]]:
        whole, gap = self.estimate.step_seconds, self.gap
        every = ((cause, with_causes(self.estimate, [cause]) - whole) for cause in causes(self.estimate))
        found = [(cause, seconds) for cause, seconds in every if seconds > WORTH * whole]
        far = lambda seconds: abs(math.log(seconds / gap)) if gap > 0 else -seconds
        return sorted(found, key=lambda one: far(one[1]))

    def unexplained(self) -> float:
        """Seconds of the gap that all causes leave which alone do not add far more than it; 0 where they
        leave less than a tenth.
        """
        may_be = [cause for cause, seconds in self._added if seconds <= MUCH * self.gap]
        left = self.seconds - with_causes(self.estimate, may_be) if may_be else self.gap
        return left if left > self.gap / 10 else 0.0

    def needed(self) -> list[str]:
        """What alone would make the step as long as it was: a speed between nodes, or of the GPUs."""
        e, cluster = self.estimate, self.estimate.job.cluster
        slowed: dict[str, Callable] = {}
        if e.layout.ranks > cluster.gpus_per_node:
            slowed["between nodes {} a GPU, of " + _speed(cluster.inter_node_bandwidth)] = _network
        slowed["GPUs at {:.0%} of what they reach in products"] = _clock
        found = []
        for words, slower in slowed.items():
            low, high = -4.0, 0.0  # tens of a share
            longer = lambda ten: (
                estimate(replace(e.job, cluster=slower(cluster, 10**ten)), e.layout).step_seconds
            )
            if longer(low) < self.seconds:
                continue
            for _ in range(12):
                middle = (low + high) / 2
                low, high = (middle, high) if longer(middle) > self.seconds else (low, middle)
            share = 10**high
            network = slower is _network
            found.append(words.format(_speed(share * cluster.inter_node_bandwidth) if network else share))
        return found

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
            "impossible": "This cannot be: it is more than the GPUs can do. Are model, batch and sequence"
            " length the run's? Is the number that of one GPU?",
        }
        job = e.job
        recomputed = (
            f", with {e.layout.recomputed or 'all'} layers of a stage computed twice: the least that fits"
        )
        lines = [
            e.title,
            "",
            f"yours      {self.seconds:.2f} s a step, {speed(self.seconds)}",
            f"predicted  {predicted:.2f} s a step, {speed(predicted)}{recomputed * self.least}",
            f"your MFU   {self.mfu:.1%} of the dense {job.precision} peak (attention's causal half);"
            f" {self.mfu / 2:.1%} of the sparse one, which is no measure of training",
            e.interval(),
            said[self.verdict],
            "",
            str(self.runs()),
        ]
        if self.verdict == "slow":
            lines += ["", f"{self.gap:.2f} s are to be explained. Each of these alone would add:"]
            lines += [
                f"  {seconds:.2f} s  {words}{', more than is missing' * (seconds > MUCH * self.gap)}"
                for words, seconds in self.longer()
            ]
            if left := self.unexplained():
                lines += [f"None of these: all that may be leave {left:.2f} s. As long would take:"]
                lines += [f"  {words}" for words in self.needed() or ["nothing that is known here"]]
            lines += [
                "A rank that is slow or waits is none of these: three-axes explain finds it in a trace."
            ]
        return "\n".join(lines)

    def nearest(self) -> list[tuple[PublishedRun, float]]:
        """The nearest published runs, and seconds of each here: as far from our prediction as it was."""
        e = self.estimate
        return [(run, math.exp(run.error) * e.step_seconds) for run in nearest(e.job, e.layout.ranks)]

    def runs(self) -> Table | str:
        """The nearest published runs as a table; a sentence where there are none."""
        rows = []
        for run, here in self.nearest():
            size = f"{run.model}, {run.params:.3g}B, {run.batch} × {run.seq_len:,}"
            where = f"{run.gpus} × {run.device}, {run.precision}"
            rows.append([run.source, size, where, f"{run.step_s:.2f} s", f"{here:.2f} s"])
        if not rows:
            return "No published run of its kind is at hand."
        return Table(["the nearest published runs", "model and batch", "on", "took", "as here"], rows)

    def data(self) -> dict:
        """The verdict for other programs."""
        named = [dict(run._asdict(), here=here) for run, here in self.nearest()]
        causes = [{"cause": words, "seconds": seconds} for words, seconds in self.longer()]
        verdict = dict(verdict=self.verdict, step_seconds=self.seconds, factor=self._factor, mfu=self.mfu)
        slow = self.verdict == "slow"
        left = dict(unexplained=self.unexplained() if slow else 0.0, needed=self.needed() if slow else [])
        return verdict | {"nearest": named, "longer": causes} | left
