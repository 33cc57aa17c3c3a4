"""Which layout? Look at all of them, say why most will not do, rank the rest, and say what would change the
answer.

The same formulas as `cost` and `memory`, evaluated for all layouts of a kind at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..table import Table, human
from .checks import divisors, whole
from .cost import OVERHEAD, Estimate, estimate, step_terms
from .hardware import Cluster
from .layout import RECOMPUTE, SCHEDULES, USUAL, ZERO_BUBBLE, Layout, check
from .memory import peak_memory
from .models import ModelShape


@dataclass(frozen=True)
class Candidate:
    """One layout that can be, with its step time (s) and the fullest GPU's memory (bytes)."""

    layout: Layout
    seconds: float
    memory: float

    @property
    def axes(self) -> tuple[int, int, int]:
        """(dp, tp, pp)"""
        return self.layout.dp, self.layout.tp, self.layout.pp


# What may turn out otherwise -> what `plan` is then given, from a plan and a factor. A batch of 0 stands for
# one that is no whole number.
CHANGES = {
    "speed between nodes": lambda p, f: {"cluster": replace(p.cluster, nic=p.cluster.nic * f)},
    "speed inside a node": lambda p, f: {"cluster": replace(p.cluster, link=p.cluster.link * f)},
    "memory of a GPU": lambda p, f: {
        "cluster": replace(p.cluster, device=replace(p.cluster.device, memory=p.cluster.device.memory * f))
    },
    "global batch": lambda p, f: {
        "global_batch": int(p.global_batch * f) if float(p.global_batch * f).is_integer() else 0
    },
    "sequence length": lambda p, f: {"seq_len": max(1, int(p.seq_len * f))},
}


@dataclass
class Plan:
    """All layouts of a model on a cluster. `ranked`: those that fit, fastest first. `too_large`: those that
    do not, with the least first. `impossible`: (dp, tp, pp) -> why it cannot be at all."""

    model: ModelShape
    cluster: Cluster
    gpus: int
    global_batch: int
    seq_len: int
    ranked: list[Candidate]
    too_large: list[Candidate]
    impossible: dict[tuple[int, int, int], str]
    looked_at: int
    fixed: dict = field(default_factory=dict)

    @property
    def best(self) -> Candidate:
        if not self.ranked:
            if not self.too_large:
                (axes, reason), *_ = self.impossible.items()
                raise ValueError(
                    f"{self.model.name} cannot be laid out on {self.gpus} GPUs with a batch of"
                    f" {self.global_batch}: (dp, tp, pp) = {axes}, for one: {reason}"
                )
            least = f"; the smallest needs {human(self.too_large[0].memory)}"
            raise ValueError(
                f"{self.model.name} does not fit {self.gpus} × {self.cluster.device.name} "
                f"of {human(self.cluster.device.memory)}{least}"
            )
        return self.ranked[0]

    @cached_property
    def by_axes(self) -> list[Candidate]:
        """The best of each (dp, tp, pp), fastest first."""
        first: dict[tuple[int, int, int], Candidate] = {}
        for row in self.ranked:
            first.setdefault(row.axes, row)
        return list(first.values())

    def estimate(self, row: Candidate | None = None) -> Estimate:
        """The best layout, or another row, with its time and memory by what for."""
        return estimate(
            self.model,
            (row or self.best).layout,
            self.cluster,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
        )

    def why(self, dp: int, tp: int, pp: int) -> str:
        """Why this (dp, tp, pp) is where it is: its rank and what it loses to the best, or the reason it is
        out.
        """
        if (dp, tp, pp) in self.impossible:
            return self.impossible[dp, tp, pp]
        axes = [row.axes for row in self.by_axes]
        if (dp, tp, pp) not in axes:
            close = next((row for row in self.too_large if row.axes == (dp, tp, pp)), None)
            if close is None:
                return f"dp·tp·pp = {dp}·{tp}·{pp} = {dp * tp * pp}, but there are {self.gpus} GPUs"
            over = close.memory - self.cluster.device.memory
            return (
                f"it does not fit: at its smallest ({close.layout}) {human(close.memory)} a GPU,"
                f" {human(over)} too much"
            )
        place = axes.index((dp, tp, pp))
        mine, best = self.estimate(self.by_axes[place]), self.estimate()
        if place == 0:
            rivals = (
                f", {self.by_axes[1].seconds / best.step_seconds - 1:.1%} ahead of {self.by_axes[1].layout}"
                if len(axes) > 1
                else ""
            )
            return f"the fastest: {best.step_seconds:.2f} s a step{rivals}"
        loses = sorted(((mine.time[k] - best.time[k], k) for k in mine.time), reverse=True)[:2]
        named = " and ".join(f"{s:.2f} s on {k}" for s, k in loses if s > 0)
        gains = sum(s for s, k in loses if s > 0) - (mine.step_seconds - best.step_seconds)
        return (
            f"number {place + 1} of {len(axes)} (dp, tp, pp): {mine.step_seconds:.2f} s,"
            f" {mine.step_seconds / best.step_seconds - 1:.1%} slower than {best.layout}; it loses {named}"
            + (f", and wins back {gains:.2f} s elsewhere" if gains >= 0.005 else "")
        )

    def flips(self) -> list[tuple[str, float, Candidate]]:
        """(what, times how much, the winner then): the smallest change of each that makes another (dp, tp,
        pp) win.
        """
        found = []
        for what in CHANGES:
            for factor in (0.75, 1.5, 0.5, 2, 0.25, 4, 0.125, 8):
                other = self.changed(what, factor)
                if other is not None and other.ranked and other.best.axes != self.best.axes:
                    found.append((what, factor, other.best))
                    break
        return found

    def changed(self, what: str, factor: float) -> Plan | None:
        """The plan with one thing (of CHANGES) times `factor`; None where that leaves no whole batch."""
        given = dict(
            model=self.model,
            cluster=self.cluster,
            gpus=self.gpus,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
        )
        given |= CHANGES[what](self, factor)
        return plan(**given, **self.fixed) if given["global_batch"] else None

    def table(self, rows: int = 10) -> Table:
        """The best of each (dp, tp, pp); no rows where nothing fits."""
        best = self.ranked[0].seconds if self.ranked else 0.0
        tokens = self.global_batch * self.seq_len / self.gpus
        return Table(
            ["layout", "step", "behind", "tokens/s/GPU", "memory"],
            [
                [
                    str(r.layout),
                    f"{r.seconds:.2f} s",
                    f"{r.seconds / best - 1:.1%}",
                    f"{tokens / r.seconds:,.0f}",
                    human(r.memory),
                ]
                for r in self.by_axes[:rows]
            ],
            title=(
                f"{self.model.name} on {self.gpus} × {self.cluster.device.name} ({self.cluster.name}), batch"
                f" {self.global_batch} × {self.seq_len}: {self.looked_at:,} layouts, {len(self.ranked):,} fit"
            ),
        )

    def __repr__(self) -> str:
        return repr(self.table())


def plan(
    model: ModelShape,
    cluster: Cluster,
    *,
    gpus: int,
    global_batch: int,
    seq_len: int,
    zeros: tuple[int, ...] = (0, 1, 2, 3),
    recomputes: tuple[str, ...] = ("none", "full"),
    schedules: tuple[str, ...] = USUAL,
    overlap: bool = True,
    eager: bool = False,
    balanced: bool = False,
) -> Plan:
    """Every layout of `model` on `gpus` GPUs: all dp·tp·pp, microbatches, schedules, interleavings, ZeRO
    stages, recompute, SP.

    Fused attention throughout, so 'selective' recompute would be 'none'. With a pipeline no more than ZeRO-1:
    DeepSpeed refuses 2 and 3 there, Megatron-LM has none, and PyTorch's schedules keep whole gradients and
    weights until the last microbatch. schedules: what your framework runs; those that split the backward are
    asked for by name. eager, balanced: see `Layout`. Raises ValueError for numbers that make no sense and
    unknown schedules. A plan without a layout that fits has an empty `ranked`.
    """
    for name, value, most in (
        ("gpus", gpus, 10**7),
        ("global_batch", global_batch, 10**9),
        ("seq_len", seq_len, 10**9),
    ):
        whole(name, value, 1, most)
    for name, given, known in (
        ("schedules", schedules, SCHEDULES),
        ("recomputes", recomputes, RECOMPUTE),
        ("zeros", zeros, (0, 1, 2, 3)),
    ):
        if not given or (unknown := [each for each in given if each not in known]):
            raise ValueError(
                f"{name} are some of {', '.join(map(str, known))}; {repr(unknown[0]) if given else 'none'} is"
                " given"
            )
    if balanced and set(schedules) <= {"interleaved", "ZB-V"}:
        raise ValueError(
            "balanced stages are worked out for one chunk on each pipeline rank, which"
            f" {' and '.join(schedules)} have more of; take 1F1B, ZB-H1 or ZB-H2 as well"
        )
    space, impossible = _space(model, gpus, global_batch, balanced)
    if not len(space):
        return Plan(model, cluster, gpus, global_batch, seq_len, [], [], impossible, 0)
    rows: list[Candidate] = []
    for schedule, recompute in itertools.product(schedules, recomputes):
        can = space[_runs(schedule, recompute, model, space, global_batch, balanced)]
        for zero, sp in itertools.product(zeros, (True, False)):
            d, t, p, b, v = can.T
            chosen = can[((t > 1) | sp) & ((d > 1) | (zero == min(zeros))) & ((p == 1) | (zero <= 1))]
            if not len(chosen):  # what would make no difference is looked at once
                continue
            d, t, p, b, v = chosen.T
            many = Layout(d, t, p, b, v, schedule, zero, recompute, sp, eager=eager, balanced=balanced)
            m = global_batch // (d * b)
            seconds = sum(step_terms(model, many, cluster, m, seq_len, overlap).values())
            held = peak_memory(model, many, seq_len, m, OVERHEAD)
            rows += [
                Candidate(Layout(*axes, schedule, zero, recompute, sp, eager=eager, balanced=balanced), s, h)
                for axes, s, h in zip(chosen.tolist(), seconds.tolist(), held.tolist())
            ]
    fit = sorted((r for r in rows if r.memory <= cluster.device.memory), key=lambda r: r.seconds)
    large = sorted((r for r in rows if r.memory > cluster.device.memory), key=lambda r: r.memory)
    return Plan(
        model,
        cluster,
        gpus,
        global_batch,
        seq_len,
        fit,
        large,
        impossible,
        len(rows),
        dict(
            zeros=zeros,
            recomputes=recomputes,
            schedules=schedules,
            overlap=overlap,
            eager=eager,
            balanced=balanced,
        ),
    )


def _space(
    model: ModelShape, gpus: int, global_batch: int, balanced: bool
) -> tuple[np.ndarray, dict[tuple[int, int, int], str]]:
    """(an array of rows dp, tp, pp, microbatch, interleave; which (dp, tp, pp) cannot be, and why)."""
    space, impossible = [], {}
    for t in divisors(gpus):
        for p in divisors(gpus // t):
            d = gpus // t // p
            try:
                check(model, Layout(d, t, p, balanced=balanced), global_batch)
            except ValueError as e:
                impossible[d, t, p] = str(e)
                continue
            for b in (b for b in range(1, 65) if global_batch // d % b == 0):
                m = global_batch // d // b
                depths = (
                    [1]
                    if p == 1 or balanced
                    else [
                        v
                        for v in range(1, model.layers // p + 2)
                        if (model.layers % (p * v) == 0 or (model.layers + 2) % (p * v) == 0)
                        and (v == 1 or m % p == 0)
                    ]
                )
                space += [(d, t, p, b, v) for v in depths]
    return np.array(space), impossible


def _runs(
    schedule: str, recompute: str, model: ModelShape, space: np.ndarray, global_batch: int, balanced: bool
) -> np.ndarray:
    """Which rows of the space `schedule` can run, as `check` has it.

    Without a pipeline all schedules are one, 1F1B.
    """
    d, t, p, b, v = space.T
    if schedule == "interleaved":
        return v > 1
    if schedule == "1F1B":
        return v == 1
    if schedule in ZERO_BUBBLE:
        layers = 2 * p if schedule == "ZB-V" else 1
        return (
            (v == 1)
            & (p > 1)
            & (recompute == "none")
            & (not (balanced and schedule == "ZB-V"))
            & (model.layers % layers == 0)
            & (global_batch // (d * b) >= ZERO_BUBBLE[schedule] * p)
        )
    return (v == 1) & (p > 1)
