"""How long a training step takes: a sum of named terms, each a line to be redone by hand.

The slowest pipeline stage sets the pace. Its seconds are computed from the list of `operations`:

    matrix products  FLOPs / (achievable FLOP/s · efficiency) + bytes / (bandwidth · efficiency)
    collectives      see `paper.collectives`; if they may run under computation, only what it does not hide
    the rest         bytes / (bandwidth · efficiency)

A layer takes the longer of this time and the host's time to launch it, m times for m microbatches. Embedding
and head, sends between stages, the bubble, data parallelism and the optimizer are added.

Five constants were fitted to two published tables of A100 runs and to nothing else, with an earlier form of
this model. A sixth, `exposed`, was set by judgement, and a seventh, `slowed`, is from published measurements
(data/cost_constants.json). `validation.table` compares predictions with published runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..files import find
from ..paper.axes import AXES
from ..paper.collectives import all_to_all_seconds, group_seconds, send_seconds
from .data_parallel import synchronisation, unhidden, whole_until_last
from .feed_forward import ROUTER
from .job import Job
from .layout import Layout, spread
from .op import Op
from .operations import OperationLists, between_stages, lists
from .stages import kinds_among, kinds_on_rank, layers_on_rank

# A layer's terms: what it computes, and one for each axis along which it sends.
COMPUTED = ("matrices", "experts", "attention", "elementwise", "casts")
TERMS = (*COMPUTED, *dict.fromkeys(axis.part for axis in AXES if axis.talks == "layer"))


class Constants(NamedTuple):
    """Three shares of printed bandwidths, two of achievable FLOP/s, and two of communication that is exposed
    although it runs under computation: data/cost_constants.json has their units, bounds and sources.
    """

    gemm_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    intra_node_efficiency: float
    inter_node_efficiency: float
    exposed: float
    slowed: float


@cache
def constants() -> Constants:
    """The constants of data/cost_constants.json."""
    stored = json.loads(find("data/cost_constants.json").read_text(encoding="utf-8"))
    return Constants(**{name: stored[name]["value"] for name in Constants._fields})


def seconds_of(op: Op, job: Job, layout: Layout, c: Constants):
    """Seconds of an operation, or of one call of a collective, while nothing else runs. Takes arrays."""
    if sent := op.sends:
        inside, nodes = layout.reach(sent.axis, job.cluster.gpus_per_node)
        shares = c.intra_node_efficiency, c.inter_node_efficiency
        if sent.collective == "all_to_all":
            copies = 1.0, 1.0
            if sent.axis == "ep" and job.framework.sends.once_a_node and (experts := job.model.experts):
                # A rank gets one copy of a token, even if several of the token's k experts are there, and so
                # does a node. copies: the shares of the k copies that are sent to ranks, and to nodes.
                k = experts.per_token
                copies = tuple(n / k * (1 - (1 - 1 / n) ** k) for n in (inside * nodes, nodes))
            return all_to_all_seconds(sent.payload, inside, nodes, job.cluster, *shares, copies)
        if sent.collective == "send":
            return send_seconds(sent.payload, nodes > 1, job.cluster, *shares)
        return group_seconds(sent.collective, sent.payload, inside, nodes, job.cluster, *shares)
    gpu = job.cluster.device
    eager = op.part == "attention" and not job.framework.runs.fused_attention
    efficiency = c.attention_efficiency if eager else c.gemm_efficiency * op.share
    peak = gpu.achievable if op.rate == "bf16" else gpu.rate(op.rate)
    bandwidth = job.cluster.memory_speed(op.memory, c.memory_efficiency)
    return op.flops / (peak * efficiency) + op.streamed / bandwidth


class Work(NamedTuple):
    """Seconds that a list of operations takes, by part and phase, for one microbatch. Phases: F forward, I
    input gradients, W weight gradients, R the forward that backward computes again. host: the host's seconds
    to launch kernels, by phase. routed: seconds of a forward in which the host waits for a router; else 0.
    """

    seconds: dict[str, dict[str, float]]
    host: dict[str, float]
    routed: float = 0.0

    def phase(self, phase: str):
        """Seconds of F, I, W or R, over all parts."""
        return sum(phases[phase] for phases in self.seconds.values())

    def part(self, part: str):
        """Seconds of one part, over all phases, with what is computed again."""
        return sum(self.seconds[part].values())

    @property
    def total(self):
        """Seconds of all parts and phases."""
        return sum(self.part(part) for part in self.seconds)

    def again(self, share) -> Work:
        """A copy in which backward computes only this share of R again."""
        some = lambda phases: phases | {"R": share * phases["R"]}
        return Work(
            {part: some(phases) for part, phases in self.seconds.items()}, some(self.host), self.routed
        )

    def spread(self, which) -> Work:
        """The values for all layouts, from those for one layout of each kind: see `Layout.alike`."""
        wide = lambda phases: {phase: spread(x, which) for phase, x in phases.items()}
        seconds = {part: wide(phases) for part, phases in self.seconds.items()}
        return Work(seconds, wide(self.host), spread(self.routed, which))


def uncovered(sent, free, least: float):
    """Seconds of communication that do not run under `free` seconds of computation, and at least the share
    `least` of all `sent` seconds. Takes arrays.
    """
    return np.maximum(sent - free, least * sent)


def durations(ops: list[Op], job: Job, layout: Layout, c: Constants) -> list:
    """Seconds of all calls of each operation. If a collective may run while products compute, only the
    seconds that the products do not cover are counted, and at least the share `exposed` of all of them.
    """
    known: dict[tuple, float] = {}  # equal operations are computed once; arrays are compared by identity
    took = []
    for op in ops:
        sent = op.sends
        numbers = map(id, (op.flops, op.streamed, op.share, sent and sent.payload))
        key = op.rate, op.part, op.memory, sent and (sent.collective, sent.axis), *numbers
        if key not in known:
            known[key] = seconds_of(op, job, layout, c)
        took.append(sent.calls * known[key] if sent else known[key])
    products: dict[tuple[str, str], float] = {}
    for op, seconds in zip(ops, took):
        if op.block and not op.sends:
            products[op.block, op.phase] = products.get((op.block, op.phase), 0.0) + seconds
    exposed = lambda op, seconds: uncovered(seconds, products.get((op.block, op.under), 0.0), c.exposed)
    hides = job.framework.hides
    return [exposed(op, seconds) if op.hides in hides else seconds for op, seconds in zip(ops, took)]


def work(ops: list[Op], job: Job, layout: Layout, c: Constants, took: list | None = None) -> Work:
    """Sum the seconds of a list of operations by part and phase. took: their `durations`, if known."""
    took = took or durations(ops, job, layout, c)
    seconds = {part: dict.fromkeys("FIWR", 0.0) for part in dict.fromkeys(op.part for op in ops)}
    host: dict[str, Any] = dict.fromkeys("FIWR", 0.0)
    forward = []
    for op, one in zip(ops, took):
        sent = op.sends
        count = op.kernels + (sent.calls * (np.asarray(layout.members(sent.axis)) > 1) if sent else 0)
        launched = count * job.framework.runs.launch_seconds
        if op.phase == "F":
            forward.append((op, one, count, launched))
        for phase in op.phase + "R" * (op.phase == "F" and layout.recompute in op.recomputed):
            seconds[op.part][phase] = seconds[op.part][phase] + one
            host[phase] = host[phase] + launched
    # While tokens are sent to experts, layers of another microbatch compute.
    overlaps = "dispatch" in job.framework.hides
    made = Work(seconds, host, 0.0 if overlaps else _routed(forward))
    if "expert parallel" in seconds and overlaps:
        sent = made.part("expert parallel")
        computed = sum(made.part(part) for part in COMPUTED if part in seconds)
        share = uncovered(sent, computed, c.exposed) / np.maximum(sent, 1e-30)
        seconds["expert parallel"] = {phase: s * share for phase, s in seconds["expert parallel"].items()}
    return made


def _routed(forward: list[tuple]):
    """Seconds of a forward in which the host waits at the router, until it knows how many rows each expert
    gets; 0 without a router. When the host knows, the GPU has run all that was launched. Up to the next
    layer's router the host gets ahead only if it launches kernels faster than the GPU runs them. The last
    kernel of an operation starts when it is launched, or when the GPU has run those before it, whichever is
    later. forward: (operation, its seconds, number of its kernels, seconds to launch them).
    """
    names = [op.name for op, *_ in forward]
    if ROUTER not in names or not any(np.any(launched) for *_, launched in forward):
        return 0.0
    at = names.index(ROUTER) + 1
    host = gpu = 0.0
    for _, seconds, count, launched in forward[at:] + forward[:at]:
        host = host + launched
        gpu = np.maximum(gpu + seconds, host + seconds / np.maximum(count, 1))
    return gpu


def all_work(
    made: OperationLists, job: Job, c: Constants, recomputes: Iterable[str]
) -> dict[str, list[Work]]:
    """The work of the embedding, the head and each kind of layer, for each policy of recompute and each
    layout of `made.alike`. In backward only layers are computed again, not the embedding and the head.
    """
    timed = lambda ops: (ops, durations(ops, job, made.alike, c))
    without = replace(made.alike, recompute="none")
    outer = [work(ops, job, without, c, took) for ops, took in map(timed, (made.embedding, made.head))]
    kinds = [timed(ops) for ops in made.layers]
    alike = {recompute: replace(made.alike, recompute=recompute) for recompute in recomputes}
    return {
        name: [*outer, *(work(ops, job, same, c, took) for ops, took in kinds)]
        for name, same in alike.items()
    }


def step_terms(
    job: Job,
    layout: Layout,
    c: Constants | None = None,
    works: list[Work] | None = None,
    once: list[Op] | None = None,
) -> dict[str, Any]:
    """Seconds of one step by term. Arrays in `layout` give arrays. Optional, if known: works, the result of
    `all_work`, for each layout; once, the result of `synchronisation`.
    """
    c = c or constants()
    model, p, v, m = job.model, layout.pp, layout.interleave, job.microbatches(layout)
    piped = np.asarray(p) > 1
    if works is None:
        made = lists(job, layout)
        works = all_work(made, job, c, [layout.recompute])[layout.recompute]
        works = [one.spread(made.which) for one in works]
    begin, end, *kinds = works
    # Inner stages hold `deep` layers. If the stages divide L + 2 and not L, the first and last hold one less.
    outer = 0, layout.pipeline.head_rank(p)
    on_first, on_last = ([n for _, n in kinds_on_rank(model, layout, rank)] for rank in outer)
    deep = np.maximum(sum(on_first), layers_on_rank(model, layout, np.minimum(1, p - 1)))
    if np.any(layout.recomputed):
        kinds = [kind.again(layout.share_recomputed(deep)) for kind in kinds]
    timed = [_timed(kind) for kind in kinds]
    # Layers of each kind on a stage behind all layers of the first kind; without a pipeline, on the only one.
    counts = [n for _, n in kinds_among(model, layout, piped * model.layers, deep)]
    whole = lambda counts: sum(count * kind.takes for count, kind in zip(counts, timed))
    inner, first, last = whole(counts), whole(on_first) + begin.total, whole(on_last) + end.total
    together = ~piped | layout.pipeline.folded  # embedding and head on one rank
    last = last + together * begin.total
    pace = np.where(piped, np.maximum(np.maximum(inner, last), first), last)  # of the slowest stage
    every = lambda what: sum(count * what(kind) for count, kind in zip(counts, timed))
    terms = {}
    for part in TERMS:
        if any(part in kind.work.seconds for kind in timed):
            terms[part] = m * every(lambda kind: kind.work.part(part) if part in kind.work.seconds else 0.0)
    terms["waiting for the host"] = m * every(lambda kind: kind.takes - kind.gpu)
    terms["head"] = m * (pace - inner)

    message = seconds_of(between_stages(job, layout), job, layout, c)
    exposed = message
    if "sends" in job.framework.hides and layout.pipeline.chunks == 0:  # the schedule is 'interleaved'
        exposed = uncovered(message, inner / layout.chunks / 2, c.exposed)
    terms["pipeline sends"] = piped * 2.0 * (m * layout.chunks * exposed + (p - 1) * message)
    # The slowest stage is idle while a microbatch is on the others: `rest`, their layers, embedding and head.
    last_is_slowest = (last >= first) & (last > inner)
    first_is_slowest = ~last_is_slowest & (first > inner)
    totals = [count for _, count in model.kinds]
    totals[-1] += model.mtp
    elsewhere = [
        (total - np.where(last_is_slowest, behind, np.where(first_is_slowest, before, here)))
        * (kind.takes / kind.gpu)
        for total, before, here, behind, kind in zip(totals, on_first, counts, on_last, timed)
    ]
    rest = [(kind.work, count) for kind, count in zip(timed, elsewhere)]
    rest += [(begin, ~first_is_slowest & ~(last_is_slowest & together)), (end, ~last_is_slowest)]
    waits = (sum(count * sum(map(part.phase, phases)) for part, count in rest) for phases in ("F", "IR", "W"))
    terms["bubble"] = piped * layout.pipeline.bubble(*waits, v)

    backward = every(lambda kind: kind.takes * (1 - kind.work.phase("F") / kind.gpu))
    terms["data parallel"], terms["optimizer"] = _once(
        job, layout, c, m, inner, backward, once or synchronisation(job, layout)
    )
    return terms


class _Kind(NamedTuple):
    """A layer of one kind for one microbatch. gpu: seconds of the GPU's work; takes: seconds of the layer, in
    which the GPU may wait for the host to launch kernels.
    """

    work: Work
    gpu: float
    takes: float


def _timed(of: Work) -> _Kind:
    """A layer takes the longer of GPU's and host's time; with a router its forward and backward each do."""
    gpu, forward = of.total, of.phase("F")
    backward = sum(seconds for phase, seconds in of.host.items() if phase != "F")
    routed = np.maximum(forward, of.routed) + np.maximum(gpu - forward, backward)
    return _Kind(of, gpu, np.where(of.routed > 0, routed, np.maximum(gpu, backward + of.host["F"])))


def _once(job: Job, layout: Layout, c: Constants, m, both, backward, ops: list[Op]):
    """Exposed seconds of data parallelism, and seconds of the optimizer. m: microbatches. both: seconds of a
    stage's layers for one microbatch, forward and backward; backward: of backward alone. ops: the result of
    `synchronisation`.
    """
    hides, zero = job.framework.hides, np.asarray(layout.zero)
    took: dict[str, Any] = {}
    for op in ops:
        times = op.sends.calls if op.sends else 1
        took[op.name] = took.get(op.name, 0.0) + times * seconds_of(op, job, layout, c)
    exposed = took["copies"] + took.get("gradient of a tied head", 0.0)
    every = (zero == 2) & job.framework.sends.reduces_each  # gradients are reduced in every microbatch
    # Gradients are reduced under the backward of the last microbatch, or under that of each. ZeRO-3's gathers
    # and reductions together may run under all that is computed.
    free = np.where(zero == 3, m * both, np.where(every, m, 1) * backward)
    sent = took["gradients"] + took["gathered weights"]
    gradients = uncovered(sent, free, c.exposed) if "gradients" in hides else sent
    if job.framework.sends.fsdp:
        gradients = np.where(zero == 3, _fsdp(job, layout, c, m, both, backward, took), gradients)
    exposed = exposed + gradients
    updated = took["updated weights"]
    if "updated weights" in hides:
        updated = uncovered(updated, both - backward, c.exposed)
    return exposed + updated, took["optimizer"]


def _fsdp(job: Job, layout: Layout, c: Constants, m, both, backward, took: dict[str, Any]):
    """Exposed seconds of FSDP's gathers and scatters. In each microbatch half of the gathers run under its
    forward, the other half and the scatters under its backward, or all scatters under the last backward.
    Nothing hides the first gather and the last scatter. In a pipeline all may run under all that is computed.
    They slow the computation: a share `slowed` of their seconds counts as exposed.
    """
    gathers, scatters = took["gathered weights"], took["gradients"]
    unhidden_of = {"F": 0.0, "I": 0.0}
    for op in unhidden(job, layout):
        unhidden_of[op.phase] = unhidden_of[op.phase] + seconds_of(op, job, layout, c)
    # Backwards in which gradients are reduced, and those in which they are only summed.
    reducing = np.where(whole_until_last(job, layout), 1, m)
    passes = (
        (gathers / 2, m * unhidden_of["F"], m * (both - backward)),
        (gathers / 2 * reducing / m + scatters, reducing * unhidden_of["I"], reducing * backward),
        (gathers / 2 * (1 - reducing / m), 0.0, (m - reducing) * backward),
    )
    exposed = 0.0
    for sent, unhidden_, free in passes:
        bare = np.minimum(unhidden_, sent)
        exposed = exposed + bare + uncovered(sent - bare, free, c.slowed)
    return np.where(np.asarray(layout.pp) > 1, uncovered(gathers + scatters, m * both, c.slowed), exposed)


# Term -> its formula in words, which `estimate --explain` prints.
FORMULAS = {
    "matrices": "m · L/p · (3, with full recompute 4, less if it stops early) · [FLOPs/achievable"
    " + bytes/bandwidth] / efficiency",
    "experts": "m · L/p · (3, 4) · [FLOPs of k experts a token/achievable + bytes/bandwidth] / efficiency",
    "attention": "m · L/p · 4·s²·b·h/t FLOPs forward, half if fused, and 2 (fused 2.5) times backward",
    "elementwise": "m · L/p · 3 · the bytes of norms, residuals, dropout and activation function",
    "casts": "m · L/p · bytes to narrow inputs and gradients of products: 4 a number and more",
    "waiting for the host": "m · L/p · the seconds by which launching a layer takes longer than computing it",
    "head": "what embedding, head and loss add to the slowest stage, m times",
    "bubble": "the other stages' time for a microbatch / v; ZB-H1 F + I - W, ZB-H2 F + I - 2W and at least F,"
    " ZB-V I - W and at least I/2",
    "optimizer": "44 to 52 bytes a parameter through memory, and its gradient set to 0",
    **{axis.part: axis.formula for axis in AXES if axis.formula},
}
