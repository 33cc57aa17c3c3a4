"""Computes how many bytes a GPU sends in a step, and in which collectives, from the list of operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from ..paper.axes import ALWAYS
from ..paper.collectives import algorithmic_bytes
from .data_parallel import synchronisation
from .job import Job
from .layout import Layout
from .op import Op
from .operations import between_stages, embedding, head, layer
from .stages import kinds_on_rank


@dataclass
class Calls:
    """One kind of collective on one axis: calls in a step, and bytes of the whole tensors of all calls."""

    op: str
    axis: str
    calls: int
    payload: float


def _step(job: Job, layout: Layout, stage: int) -> Iterator[tuple[float, Op]]:
    """(how often in a step, operation) for all operations of a rank of a pipeline stage."""
    m, last = job.microbatches(layout), layout.pipeline.head_rank(layout.pp)
    for kind, many in kinds_on_rank(job.model, layout, stage):
        for op in layer(job, layout, kind):
            recomputed = op.phase == "F" and layout.recompute in op.recomputed
            yield m * float(many) * (1 + recomputed * float(layout.share_recomputed(many))), op
    ends = chain(embedding(job, layout) if stage == 0 else (), head(job, layout) if stage == last else ())
    yield from ((m, op) for op in ends)
    # Each chunk sends an activation and a gradient; the model's first and last chunk send one of them. If a
    # schedule is folded, the last rank has two chunks in a row, with no message between them.
    turns = layout.pp > 1 and layout.pipeline.folded and stage == layout.pp - 1
    messages = 2 * layout.chunks - (stage == 0) - (stage == last) - 2 * turns
    yield m * messages * (layout.pp > 1), between_stages(job, layout)
    yield from ((1, op) for op in synchronisation(job, layout, stage))


def calls(job: Job, layout: Layout, stage: int = 0) -> list[Calls]:
    """The collectives of a step on a rank of a pipeline stage, by name and axis."""
    totals: dict[tuple[str, str], list[float]] = {}
    for times, op in _step(job, layout, stage):
        if (its := op.sends) and times * its.calls > 0 and layout.members(its.axis) > 1:
            total = totals.setdefault((its.collective, its.axis), [0.0, 0.0])
            total[0] += times * its.calls
            total[1] += times * its.calls * its.payload
    return [Calls(op, axis, round(n), size) for (op, axis), (n, size) in sorted(totals.items())]


def sent(job: Job, layout: Layout, stage: int | None = None) -> dict[str, float]:
    """Axis -> bytes that a GPU sends in a step; dp, tp and pp always. stage: by default the middle one."""
    stage = layout.pp // 2 if stage is None else stage
    by_axis = dict.fromkeys(ALWAYS, 0.0)
    for call in calls(job, layout, stage):
        more = algorithmic_bytes(call.op, call.payload, layout.members(call.axis))
        by_axis[call.axis] = by_axis.get(call.axis, 0.0) + more
    return by_axis
