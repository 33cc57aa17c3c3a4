"""All layouts that the planner looks at, and what they take: bytes once, seconds for each cluster."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .candidates import SIZES, all_rows, runs
from .cost import Work, all_work, constants, step_terms
from .hardware import Cluster
from .job import Job
from .layout import Layout
from .memory import kept, peak_memory
from .operations import lists


class Group(NamedTuple):
    """Layouts of one schedule and one recompute policy. which: of the lists is each one's. rows: where they
    are among all.
    """

    layouts: Layout
    which: np.ndarray
    rows: slice


class Space:
    """Every layout of a job on so many GPUs that its framework offers. only: sizes that are given.

    numbers: a row for each, with its bytes on the fullest GPU. names: a schedule and a recompute policy for
    each number in its column 'names'. impossible: sizes -> why they cannot be at all. Neither depends on how
    fast the cluster is, nor do the lists of operations: `serves` says which jobs may share them.
    """

    def __init__(self, job: Job, gpus: int, only: dict[str, int]):
        self.job, self.gpus, self.only = job, gpus, only
        self.names: list[tuple[str, str]] = []
        self._groups: list[Group] = []
        # On each cluster: seconds, nan where nobody has asked yet, and the work of the lists by policy.
        self._on: dict[Cluster, tuple[np.ndarray, dict[str, list[Work]]]] = {}
        rows, self.impossible = all_rows(job, gpus, only)
        self._lists = lists(job, self._layouts(rows))
        which = np.arange(len(rows)) if self._lists.which is None else self._lists.which
        framework, looked_at = job.framework, []
        recomputes = [
            r for r in framework.recomputes if not (r == "selective" and framework.fused_attention)
        ] or ["none"]
        for schedule, recompute in itertools.product(framework.schedules, recomputes):
            can = np.flatnonzero(runs(job, schedule, recompute, rows))
            if not len(can):
                continue
            chosen, start = rows[can], sum(map(len, looked_at))
            group = Group(
                self._layouts(chosen, schedule=schedule, recompute=recompute),
                which[can],
                slice(start, start + len(can)),
            )
            of_kinds = kept(self._lists._replace(which=group.which), recompute)
            chosen["names"] = len(self.names)
            chosen["memory"] = peak_memory(job, group.layouts, of_kinds=of_kinds)
            self.names.append((schedule, recompute))
            self._groups.append(group)
            looked_at.append(chosen)
        self.numbers = np.concatenate(looked_at) if looked_at else rows[:0]

    def _layouts(self, rows: np.ndarray, **named: str) -> Layout:
        sizes = {name: rows[name] for name in SIZES}
        return self.job.framework.layout(**sizes, sequence_parallel=rows["sp"], **named)

    def serves(self, job: Job) -> bool:
        """Whether a job has the same layouts: it may differ in the speeds of its cluster, and in the memory
        of a GPU where there are no experts, whose layouts are looked at only if their states fit.
        """
        device = self.job.cluster.device
        if not job.model.experts:
            device = replace(device, memory=job.cluster.device.memory)
        given = self.job.cluster
        speeds = {
            name: getattr(job.cluster, name) for name in ("intra_node_bandwidth", "inter_node_bandwidth")
        }
        return job == replace(self.job, cluster=replace(given, device=device, **speeds))

    def timed(self, job: Job) -> np.ndarray:
        """The numbers with seconds on a job's cluster; infinite for what does not fit it, where nobody asks
        how long it would take.
        """
        timed, c = self.numbers.copy(), constants()
        fits = timed["memory"] <= job.cluster.device.memory
        device = replace(job.cluster.device, memory=self.job.cluster.device.memory)
        speeds = replace(job.cluster, device=device)  # all that seconds depend on
        if speeds not in self._on:
            works = all_work(self._lists, job, c, {recompute for _, recompute in self.names})
            self._on[speeds] = np.full(len(timed), np.nan), works
        seconds, works = self._on[speeds]
        for layouts, which, rows in self._groups:
            wanted = np.flatnonzero(fits[rows] & np.isnan(seconds[rows]))
            if len(wanted):
                own = [work.spread(which[wanted]) for work in works[layouts.recompute]]
                terms = step_terms(job, _some(layouts, wanted), c, own)
                seconds[rows.start + wanted] = sum(terms.values())
        timed["seconds"] = np.where(fits, seconds, np.inf)
        return timed


def _some(many: Layout, keep: np.ndarray) -> Layout:
    """Those of many layouts that `keep` names."""
    return replace(many, **{k: getattr(many, k)[keep] for k in (*SIZES, "sequence_parallel")})
