"""Finds the fastest layout of a job on a number of GPUs: computes time and memory of all layouts, ranks those
that fit, and says why others are impossible or slower.

The formulas of `cost` and `memory` run on arrays: all layouts of one schedule and recompute policy at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..checks import whole
from ..table import Table, human
from .candidates import Candidate, Candidates
from .certainty import Sure, sure
from .job import CHANGES, Job
from .layout import Axes
from .memory import room
from .space import Space
from .step import Estimate, estimate


@dataclass(eq=False, repr=False)
class Plan:
    """All layouts of a job on a number of GPUs. ranked: those that fit, fastest first. tight: those that fit
    only if PyTorch's allocator reserves less than usual, fastest first. too_large: those that need more than
    the GPU's memory, least memory first. space: the layouts that were tried, without those that recompute
    only some layers of a stage.
    """

    job: Job
    space: Space
    ranked: Candidates
    tight: Candidates
    too_large: Candidates

    @property
    def gpus(self) -> int:
        """The number of GPUs of each layout."""
        return self.space.gpus

    @property
    def impossible(self) -> dict[Axes, str]:
        """Sizes -> why no layout can have them."""
        return self.space.impossible

    @property
    def looked_at(self) -> int:
        """The number of layouts in `space`, also of those that do not fit."""
        return len(self.space.numbers)

    @property
    def options(self) -> dict:
        """The fixed sizes that `plan` was given."""
        return dict(self.space.only)

    @property
    def best(self) -> Candidate:
        """The fastest layout that fits. Raises ValueError if none does: the reason, and what would help."""
        if self.ranked:
            return self.ranked[0]
        device, model = self.job.cluster.device, self.job.model.name
        if not self.tight and not self.too_large:
            if not self.impossible:
                schedules = " or ".join(self.job.framework.offers.schedules)
                raise ValueError(
                    f"no layout of {model} on {self.gpus} GPUs can have the pipeline that {schedules} needs:"
                    " give more stages (pp), or choose another schedule"
                )
            (axes, reason), *_ = self.impossible.items()
            raise ValueError(
                f"{model} cannot be laid out on {self.gpus} GPUs with a batch of {self.job.global_batch}:"
                f" {axes}, for one: {reason}"
            )
        tried = "".join(f"; it fits {remedy}" for remedy in self.remedies)
        if self.tight:
            raise ValueError(
                f"{model} is tight on {self.gpus} × {device.name}: {self.tight[0].layout}, the fastest,"
                f" allocates {human(self.tight[0].memory)} of {human(device.memory)}, and PyTorch's allocator"
                f" reserves more than that. Try it{tried}"
            )
        raise ValueError(
            f"{model} does not fit {self.gpus} × {device.name} of {human(device.memory)}; the smallest needs"
            f" {human(self.too_large[0].memory)}{tried}"
        )

    @cached_property
    def remedies(self) -> list[str]:
        """At most three phrases, each a change with which a layout fits (`remedies.remedies`). [] if one fits
        without a change.
        """
        from .remedies import remedies

        fits = lambda job, gpus, **only: bool(plan(job, gpus=gpus, **only).ranked)
        return [] if self.ranked else remedies(self.job, self.gpus, fits, **self.options)

    @cached_property
    def sure(self) -> Sure:
        """The interval for this kind of run, and the difference below which two layouts tie."""
        return sure(self.job)

    def ties(self, row: Candidate) -> bool:
        """Whether a layout is so close to the best that real runs might reverse their order."""
        return row.seconds <= (1 + self.sure.apart) * self.best.seconds

    @cached_property
    def by_axes(self) -> list[Candidate]:
        """For each combination of axes' sizes its fastest layout that fits. The fastest of all is first."""
        return self.ranked.first_of_each() if self.ranked else []

    def estimate(self, row: Candidate | None = None) -> Estimate:
        """The estimate of the best layout, or of another row."""
        return estimate(self.job, (row or self.best).layout)

    def why(self, **sizes: int) -> str:
        """Why these sizes, such as dp=4, tp=8, are not the best: what they lose to it, or that they do not
        fit, are impossible or were not tried.
        """
        axes = Axes(**sizes)
        if axes in self.impossible:
            return self.impossible[axes]
        places = [row.axes for row in self.by_axes]
        if axes in places:
            return self._why_there(places.index(axes))
        device = self.job.cluster.device
        if tight := next((row for row in self.tight if row.axes == axes), None):
            return (
                f"it is tight: {tight.layout} allocates {human(tight.memory)} of {human(device.memory)}, and"
                f" PyTorch's allocator reserves more than that; a step would take {tight.seconds:.2f} s"
            )
        if large := next((row for row in self.too_large if row.axes == axes), None):
            over = large.memory - device.memory
            return (
                f"it does not fit: the layout with the least memory ({large.layout}) needs"
                f" {human(large.memory)} a GPU, {human(over)} too much"
            )
        if axes.ranks != self.gpus:
            return f"{axes} takes {axes.ranks} GPUs, but there are {self.gpus}"
        only = ", ".join(f"{axis} {size}" for axis, size in self.space.only.items() if axis in Axes._fields)
        return f"{axes} was not tried: {f'only {only} was' if only else 'it was not asked for'}"

    def _why_there(self, place: int) -> str:
        mine, best = self.estimate(self.by_axes[place]), self.estimate()
        if place == 0:
            rivals = ""
            if len(self.by_axes) > 1:
                slower = self.by_axes[1].seconds / best.step_seconds - 1
                ahead = f"{slower:.1%}" if slower >= 0.0005 else "less than 0.1%"
                rivals = f", {ahead} ahead of {self.by_axes[1].layout}"
                rivals += ", a tie" * self.ties(self.by_axes[1])
            return f"the fastest: {best.step_seconds:.2f} s a step{rivals}"
        loses = sorted(((mine.time[k] - best.time[k], k) for k in mine.time), reverse=True)[:2]
        named = " and ".join(f"{s:.2f} s on {k}" for s, k in loses if s > 0)
        behind = mine.step_seconds / best.step_seconds - 1
        gains = sum(s for s, k in loses if s > 0) - (mine.step_seconds - best.step_seconds)
        return (
            f"number {place + 1} of the {len(self.by_axes)} tuples that fit: {mine.step_seconds:.2f} s,"
            f" {behind:.1%} slower than {best.layout.axes}{', a tie' * self.ties(self.by_axes[place])}.\n"
            f"It loses {named}" + (f", and wins back {gains:.2f} s elsewhere." if gains >= 0.005 else ".")
        )

    def flips(self) -> list[tuple[str, float, Candidate]]:
        """(quantity, factor, the best layout then), for each quantity of CHANGES with the first factor of
        0.75, 1.5, 0.5 and 2 that makes other sizes the best. Quantities without such a factor are left out.
        """
        flipped = []
        for what in CHANGES:
            for factor in (0.75, 1.5, 0.5, 2):
                other = self.changed(what, factor)
                if other is not None and other.ranked and other.best.axes != self.best.axes:
                    flipped.append((what, factor, other.best))
                    break
        return flipped

    def changed(self, what: str, factor: float) -> Plan | None:
        """The plan with the quantity `what` (of CHANGES) times `factor`; None if a job cannot have it."""
        try:
            job = self.job.changed(what, factor)
        except ValueError:
            return None
        old = self.space
        space = old if old.serves(job) else Space(job, self.gpus, old.only, old.kinds)
        return _ranked(job, space)

    def table(self, rows: int = 10) -> Table:
        """A table of the best layout of each combination of sizes; without rows if nothing fits."""
        best = self.ranked[0].seconds if self.ranked else 0.0
        job = self.job
        tokens = job.global_batch * job.seq_len / self.gpus
        made = []
        for row in self.by_axes[:rows]:
            behind, speed = row.seconds / best - 1, tokens / row.seconds
            slower = f"{'tie, ' * (behind > 0 and self.ties(row))}{behind:.1%}"
            made.append([str(row.layout), f"{row.seconds:.2f} s", slower, f"{speed:,.0f}", human(row.memory)])
        title = (
            f"{job.model.name} on {self.gpus} × {job.cluster.device.name} ({job.cluster.name}), batch"
            f" {job.global_batch} × {job.seq_len}, {', '.join([job.framework.name, *job.switches])}:"
            f" {self.looked_at:,} layouts, {len(self.ranked):,} fit, {len(self.tight):,} more are tight"
        )
        return Table(["layout", "step", "behind", "tokens/s/GPU", "memory"], made, title=title)

    def __repr__(self) -> str:
        return repr(self.table())


def plan(job: Job, *, gpus: int, **only) -> Plan:
    """The plan of a job on `gpus` GPUs. It tries what the job's framework offers: sizes of dp, tp, pp, cp and
    ep, microbatches, schedules, interleavings, ZeRO stages, recompute, sequence parallelism. `candidates` and
    `space` leave some out.

    only: fixed sizes of axes, such as tp=8, and `shard`. With fused attention 'selective' recompute
    equals 'none', and is tried only if the framework offers nothing else. Raises ValueError for numbers that
    make no sense. If no layout fits, the plan's `ranked` is empty.
    """
    whole("gpus", gpus, 1, 10**7)
    only = {axis: size for axis, size in only.items() if size is not None}
    for axis, size in only.items():
        whole(axis, size)
    return _ranked(job, Space(job, gpus, only))


def _ranked(job: Job, space: Space) -> Plan:
    most = room(job)
    every = space.timed(job)
    every = np.concatenate([every, space.partly(job, every, most)])
    fits, over = every["memory"] <= most, every["memory"] > job.cluster.device.memory
    pick = lambda by, keep: Candidates(every, space.names, job.framework, by, keep)
    return Plan(job, space, pick("seconds", fits), pick("seconds", ~fits & ~over), pick("memory", over))
