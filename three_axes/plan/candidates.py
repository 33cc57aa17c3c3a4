"""Lists the layouts whose seconds the planner computes, as rows of numbers; a `Candidate` is one row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..checks import divisors
from ..paper.axes import AXES
from .frameworks import Framework
from .job import Job
from .layout import Axes, Layout
from .memory import stage_states
from .possible import check_size
from .shape import ModelShape
from .stages import can_be_spread

# The columns of a row: fields of `Layout`; the index of its schedule and recompute policy in a list of names;
# whether it has sequence parallelism; its seconds, and the bytes of the fullest GPU.
SIZES = (*Axes._fields, "microbatch", "interleave", "zero", "shard", "recomputed")
_ROW = np.dtype([(k, int) for k in (*SIZES, "names")] + [("sp", bool), ("seconds", float), ("memory", float)])
SOUGHT = ("dp", "tp", "pp", "cp", "ep")  # axes of which several sizes are tried
LEAST_TOKENS = 4096  # of a sequence on a rank; cp leaves fewer only if it is requested
MOST_TOKENS = 16384  # of a microbatch on a rank, for models with experts, which have many layouts


class Candidate(NamedTuple):
    """One possible layout, with its step time (s) and the fullest GPU's memory (bytes)."""

    layout: Layout
    seconds: float
    memory: float

    @property
    def axes(self) -> Axes:
        """The sizes of its axes alone."""
        return self.layout.axes


class Candidates(Sequence[Candidate]):
    """The rows that `keep` selects, in ascending order of column `by`; a row becomes a `Candidate` when it is
    used. names: (schedule, recompute policy) by the index in a row.
    """

    def __init__(self, numbers: np.ndarray, names: list[tuple], framework: Framework, by: str, keep):
        self._numbers, self._by, self._keep = numbers, by, keep
        self.names, self.framework = names, framework

    @cached_property
    def numbers(self) -> np.ndarray:
        """The selected rows, sorted when a candidate is first used: often only their number is needed."""
        chosen = self._numbers[self._keep]
        return chosen[np.argsort(chosen[self._by], kind="stable")]

    def __len__(self) -> int:
        return int(np.count_nonzero(self._keep))

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        row = self.numbers[i]
        schedule, recompute = self.names[row["names"]]
        sizes = {k: int(row[k]) for k in SIZES}
        named = dict(schedule=schedule, recompute=recompute, sequence_parallel=bool(row["sp"]))
        layout = self.framework.layout(**sizes, **named)
        return Candidate(layout, float(row["seconds"]), float(row["memory"]))

    def first_of_each(self) -> list[Candidate]:
        """The first candidate with each choice of the axes' sizes, in the rows' order."""
        axes = np.stack([self.numbers[axis] for axis in Axes._fields], axis=1)
        _, first = np.unique(axes, axis=0, return_index=True)
        return [self[int(k)] for k in sorted(first)]


def all_rows(
    job: Job, gpus: int, only: dict[str, int], kinds: dict[tuple, str]
) -> tuple[np.ndarray, dict[Axes, str]]:
    """(a row for each layout, without schedule and recompute policy; sizes -> why they are impossible). only:
    fixed sizes. kinds: (sizes, shard) -> why they are impossible for every batch and length, or ""; new ones
    are added.
    """
    framework, rows, impossible, asked = job.framework, [], {}, only.get("shard", 0)
    # Sizes, their shard, the ZeRO stages to try, and the largest microbatch.
    possible: list[tuple[Axes, int, tuple[int, ...], int]] = []
    for axes in _all_axes(job, gpus, only):
        shard = asked if asked < axes.dp * axes.cp else 0  # 0: over all replicas
        zeros = framework.offers.zeros if axes.pp == 1 else framework.offers.zeros_in_pipeline
        zeros = tuple(zero for zero in zeros if zero or not shard)
        layout = framework.layout(**axes._asdict(), shard=shard, zero=max(zeros, default=0))
        if (axes, shard) not in kinds:
            kinds[axes, shard] = _refusal(job.check_kind, layout, gpus)
        if refusal := kinds[axes, shard] or _refusal(check_size, layout, job.global_batch, job.seq_len):
            impossible[axes] = refusal
            continue
        if not zeros:
            only_zero = " or ".join(map(str, framework.offers.zeros))
            impossible[axes] = f"with a pipeline {framework.name} has no ZeRO {only_zero}, which is asked for"
        most = max(1, MOST_TOKENS * axes.cp // job.seq_len) if job.model.experts else 64
        possible.append((axes, shard, zeros, most))
    if job.model.experts:
        possible = _that_fit(job, possible)
    spread = {p: _chunks(job.model, framework, p) for p in {axes.pp for axes, *_ in possible}}
    for axes, shard, zeros, most in possible:
        share, chunks = job.global_batch // axes.dp, spread[axes.pp]
        # Choices that make no difference are tried once. Ranks along tp too may hold copies of an expert.
        copies = axes.dp * axes.cp * (axes.tp if job.model.experts else 1)
        different = zeros if copies > 1 else zeros[:1]
        splits = (True, False) if axes.tp > 1 and not job.model.experts else (True,)
        rows += [
            (*axes, b, v, zero, shard, 0, 0, sp, 0.0, 0.0)
            for b in divisors(share)
            if b <= most
            for v in (chunks if share // b % axes.pp == 0 else chunks[:1])
            for zero in different
            for sp in splits
        ]
    if not rows and not impossible:
        given = ", ".join(f"{axis} {size}" for axis, size in only.items())
        raise ValueError(f"{given} cannot be on {gpus} GPUs: the sizes must multiply to {gpus}")
    return np.array(rows, _ROW), impossible


def _refusal(check, *given) -> str:
    """The message with which a check refuses these arguments, or ""."""
    try:
        check(*given)
    except ValueError as e:
        return str(e)
    return ""


def _all_axes(job: Job, gpus: int, only: dict[str, int]) -> Iterator[Axes]:
    """All sizes of the axes in `SOUGHT`; others are 1 unless they are requested. So an expert is split (etp)
    only on request: whole experts on as many ranks compute the same and send fewer bytes.
    """
    asked = {axis.name: only.get(axis.name, 1) for axis in AXES if axis.name not in SOUGHT}
    allowed = lambda axis, sizes: [n for n in sizes if n == only.get(axis, n)]
    experts = job.model.experts
    others = Axes(**asked).ranks
    for t in allowed("tp", divisors(gpus // others) if gpus % others == 0 else []):
        for p in allowed("pp", divisors(gpus // others // t)):
            inner = gpus // others // t // p
            lengths = [c for c in divisors(inner) if c == 1 or c * LEAST_TOKENS <= job.seq_len]
            for c in [only["cp"]] if inner % only.get("cp", gpus + 1) == 0 else allowed("cp", lengths):
                d = inner // c
                if d != only.get("dp", d):
                    continue
                folds = max(1, inner * t // asked["etp"])  # ranks over which experts may be distributed
                spread = divisors(math.gcd(experts.count, folds)) if experts else [1]
                for e in [only["ep"]] if "ep" in only else spread:
                    yield Axes(dp=d, tp=t, pp=p, cp=c, ep=e, **asked)


def passed_over(job: Job, gpus: int, only: dict[str, int]) -> Iterator[tuple[str, int]]:
    """("cp", size) for each of 2, 4, 8 that divides GPUs and half the sequence, and was not tried."""
    if only.get("cp", 1) == 1:
        for c in (2, 4, 8):
            tried = "cp" not in only and c * LEAST_TOKENS <= job.seq_len
            if gpus % c == 0 and job.seq_len % (2 * c) == 0 and not tried:
                yield "cp", c


def _that_fit(job: Job, possible: list[tuple]) -> list[tuple]:
    """The possible sizes, each with only those ZeRO stages whose states alone fit on a middle pipeline stage.
    If none does, the last ZeRO stage is kept, with microbatches of one sequence, to show by how much it does
    not fit.
    """
    if not possible:
        return []
    sizes = dict(zip((*Axes._fields, "shard"), np.array([(*axes, shard) for axes, shard, *_ in possible]).T))
    fits: dict[int, Any] = {}
    for zero in {zero for _, _, zeros, _ in possible for zero in zeros}:
        layout = job.framework.layout(**sizes, zero=zero)
        held = sum(stage_states(job, layout, layout.pp // 2).values())
        fits[zero] = held <= job.cluster.device.memory
    admitted = []
    for i, (axes, shard, zeros, most) in enumerate(possible):
        good = tuple(zero for zero in zeros if fits[zero][i])
        admitted.append((axes, shard, good, most) if good else (axes, shard, zeros[-1:], 1))
    return admitted


def _chunks(model: ModelShape, framework: Framework, p: int) -> list[int]:
    """The numbers of chunks that a pipeline rank may have, if p divides the number of microbatches."""
    if p == 1:
        return [1]
    most = min(framework.offers.most_chunks, model.layers // p + 1)
    return [v for v in range(1, most + 1) if can_be_spread(model, p * v)]


def runs(job: Job, schedule: str, recompute: str, rows: np.ndarray) -> np.ndarray:
    """Which rows can have this schedule and recompute policy: see `possible.check`. Without a pipeline all
    schedules are the same, and only 1F1B is tried.
    """
    kind = Layout(schedule=schedule).pipeline
    p, v = rows["pp"], rows["interleave"]
    if kind.chunks == 0:
        return v > 1
    if kind.alone:
        return v == 1
    enough = job.global_batch // (rows["dp"] * rows["microbatch"]) >= kind.fills * p
    even = job.model.layers % (kind.chunks * p) == 0
    divide = (kind.chunks == 1) | even  # `all_rows` has checked layouts with one chunk on a rank
    return (
        (v == 1)
        & (p > 1)
        & enough
        & divide
        & (not kind.splits or recompute in ("none", "selective", "modules"))
    )
