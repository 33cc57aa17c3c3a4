"""Computes the memory and the seconds of all layouts that the planner tries for a job.

Bytes are computed once. Seconds are computed again for a cluster with other speeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..paper.hardware import Cluster
from .candidates import SIZES, all_rows, runs
from .cost import all_work, constants, step_terms
from .data_parallel import synchronisation
from .job import Job
from .layout import Layout
from .memory import peak_memory, saved
from .op import Op
from .operations import lists
from .stages import layers_on_rank


class Group(NamedTuple):
    """Layouts of one schedule and recompute policy. which: for each layout the index of its operations in
    `Space._lists`. once: operations of a whole step.
    """

    layouts: Layout
    which: np.ndarray
    once: list[Op]


class Space:
    """Every layout of a job on so many GPUs that its framework offers. only: fixed sizes.

    numbers: a row for each layout, with its bytes on the fullest GPU. names: (schedule, recompute policy);
    the column 'names' of a row is an index into it. impossible: sizes -> why no layout can have them. None of
    these depends on the speed of the cluster: `serves` says which jobs may share them. kinds: results of
    checks that hold for every batch, from a space of this model, GPUs and framework (`candidates.all_rows`).
    """

    def __init__(self, job: Job, gpus: int, only: dict[str, int], kinds: dict[tuple, str] | None = None):
        self.job, self.gpus, self.only = job, gpus, only
        self.names: list[tuple[str, str]] = []
        self._groups: list[Group] = []
        self._seconds: dict[Cluster, np.ndarray] = {}
        self.kinds = {} if kinds is None else kinds
        rows, self.impossible = all_rows(job, gpus, only, self.kinds)
        self._lists = lists(job, self._layouts(rows))
        which = np.arange(len(rows)) if self._lists.which is None else self._lists.which
        offers, looked_at = job.framework.offers, []
        recomputes: Sequence[str] = offers.recomputes
        # A policy with nothing to recompute is tried only if no other is offered: selective beside a fused
        # attention; modules in a dense layer, whose norms are fused with the products after them.
        dense = not (job.model.experts or job.model.latent)
        for policy, idle in (("selective", job.framework.runs.fused_attention), ("modules", dense)):
            recomputes = [one for one in recomputes if not idle or one != policy] or recomputes
        for schedule, recompute in itertools.product(offers.schedules, recomputes):
            can = np.flatnonzero(runs(job, schedule, recompute, rows))
            if not len(can):
                continue
            chosen = rows[can]
            layouts = self._layouts(chosen, schedule=schedule, recompute=recompute)
            of_kinds = saved(self._lists._replace(which=which[can]), recompute)
            chosen["names"] = len(self.names)
            chosen["memory"] = peak_memory(job, layouts, of_kinds=of_kinds)
            self.names.append((schedule, recompute))
            self._groups.append(Group(layouts, which[can], synchronisation(job, layouts)))
            looked_at.append(chosen)
        self.numbers = np.concatenate(looked_at) if looked_at else rows[:0]

    def _layouts(self, rows: np.ndarray, **named: str) -> Layout:
        sizes = {name: rows[name] for name in SIZES}
        return self.job.framework.layout(**sizes, sequence_parallel=rows["sp"], **named)

    def partly(self, job: Job, every: np.ndarray, most: float) -> np.ndarray:
        """Further rows: layouts that fit if some layers of each stage are recomputed, as few as possible, and
        do not fit if none are. most: the bytes that fit. every: the result of `timed`.
        """
        if not job.framework.offers.recomputes_some:
            return every[:0]
        c, model = constants(), job.model
        made, works = [every[:0]], all_work(self._lists, job, c, ["full"])["full"]
        for name, (schedule, recompute) in enumerate(self.names):
            if recompute != "full":
                continue
            whole, group = every[every["names"] == name], self._groups[name]
            of_none = saved(self._lists._replace(which=group.which), "none")
            none = peak_memory(job, replace(group.layouts, recompute="none"), of_kinds=of_none)
            can = np.flatnonzero((none > most) & (whole["memory"] <= most))
            rows, none = whole[can], none[can]
            layouts = self._layouts(rows, schedule=schedule, recompute=recompute)
            layers, chunks = layers_on_rank(model, layouts, np.minimum(1, layouts.pp - 1)), layouts.chunks
            over = (none - most) / (none - rows["memory"])
            rows["recomputed"] = chunks * np.ceil(over * layers / chunks)  # the same number in each chunk
            layouts = self._layouts(rows, schedule=schedule, recompute=recompute)
            of_kinds = saved(self._lists._replace(which=group.which[can]), recompute)
            rows["memory"] = peak_memory(job, layouts, of_kinds=of_kinds)
            own = [work.spread(group.which[can]) for work in works]
            rows["seconds"] = sum(step_terms(job, layouts, c, own, synchronisation(job, layouts)).values())
            made.append(rows[(rows["memory"] <= most) & (rows["recomputed"] < layers)])
        return np.concatenate(made)

    def serves(self, job: Job) -> bool:
        """Whether these are the layouts of `job` too. It may differ in the speeds of its cluster, and without
        experts also in the memory of a GPU (layouts with experts are tried only if their states fit).
        """
        device = self.job.cluster.device
        if not job.model.experts:
            device = replace(device, memory=job.cluster.device.memory)
        given = self.job.cluster
        speeds = {one: getattr(job.cluster, one) for one in ("intra_node_bandwidth", "inter_node_bandwidth")}
        there = replace(self.job, cluster=replace(given, device=device, **speeds))
        return job == there

    def timed(self, job: Job) -> np.ndarray:
        """A copy of `numbers` with the seconds on this job's cluster."""
        device = replace(job.cluster.device, memory=self.job.cluster.device.memory)
        speeds = replace(job.cluster, device=device)  # the only part on which seconds depend
        if speeds not in self._seconds:
            self._seconds[speeds] = self._timed(job)
        timed = self.numbers.copy()
        timed["seconds"] = self._seconds[speeds]
        return timed

    def _timed(self, job: Job) -> np.ndarray:
        c, seconds = constants(), [np.zeros(0)]
        works = all_work(self._lists, job, c, {recompute for _, recompute in self.names})
        for layouts, which, once in self._groups:
            own = [work.spread(which) for work in works[layouts.recompute]]
            seconds.append(sum(step_terms(job, layouts, c, own, once).values()))
        return np.concatenate(seconds)
