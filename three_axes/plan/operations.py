"""Lists what a rank does in a training step: each operation with what it computes, keeps and sends.

From this list `cost` computes seconds, `memory` bytes held and `traffic` bytes sent. Counts on real or fake
ranks are compared with it.

`op` has the fields of an operation. `attention` and `feed_forward` make a layer's operations, `data_parallel`
those of a whole step. Half-precision numbers take 2 bytes.
Source: Korthikanti et al. 2022, sections 3 and 4 (what is kept, what is sent).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .attention import attention
from .feed_forward import feed_forward
from .job import Job
from .layout import Layout
from .op import Kept, LayerOnRank, Op, norm, partial_sums, product, sending, stream, summed
from .shape import ModelShape
from .stages import layer_matrices


class OperationLists(NamedTuple):
    """The operations of one or many layouts. Layouts with the same operations share one entry: `alike` has a
    layout for each entry, `which` each layout's entry (None: its own). layers: a list for each kind of layer.
    """

    alike: Layout
    which: np.ndarray | None
    embedding: list[Op]
    head: list[Op]
    layers: list[list[Op]]


def lists(job: Job, layout: Layout) -> OperationLists:
    """The operations of a microbatch; they are the same for any schedule, recompute policy, cluster speed."""
    one, which = layout.alike()
    kinds = [layer(job, one, kind) for kind, _ in job.model.kinds]
    return OperationLists(one, which, embedding(job, one), head(job, one), kinds)


def layer(job: Job, layout: Layout, kind: ModelShape | None = None) -> list[Op]:
    """The operations of one layer for a microbatch. kind: the layer's shape; by default the job's model."""
    at = LayerOnRank(job, layout, kind or job.model)
    model, holds, x, parts = at.model, job.framework.holds, at.x, at.parts
    # Dropout's masks, a byte a number; gated models use no dropout.
    masks = Kept(0 if model.bare else at.tokens * model.hidden / parts)
    eager = model.bare and not job.framework.runs.fused  # PyTorch's own LayerNorm, GELU and dropout are fused

    # Bytes moved for a byte of x. Fused, a residual sum moves 4 bytes a number, dropout 3; eager, a sum 6.
    add, add_kernels = (3.0, 1) if eager else (2.0 if model.bare else 3.5, 1)
    normed, add = x / parts * (model.norms / 2), add * x / parts
    # Policies of recompute that compute a layer's end again.
    last = ("full",) if job.framework.sends.whole_recompute else ()
    ops = [
        *norm("norm 1", normed, eager, holds.norm_bytes, Kept(x / parts, per_op=x / parts)),
        *attention(at, eager),
        *stream("residual 1", add, add_kernels, keeps=masks),
        *norm("norm 2", normed, eager, holds.norm_bytes, Kept(x / parts)),
        *feed_forward(at, eager, last),
        *stream("residual 2", add, add_kernels, keeps=masks),
    ]
    trained = sum(op.adapters for op in ops) if job.lora else layer_matrices(model, layout)
    return [*ops, summed(job, layout, trained)]


def embedding(job: Job, layout: Layout) -> list[Op]:
    """The first stage's operations besides its layers. Looking up tokens takes no time that is counted."""
    x = LayerOnRank(job, layout, job.model).x
    split, whole = layout.sequence_parallel * 1, job.framework.holds.split_vocabulary * 1
    trained = job.lora is None
    learned = (job.model.positions > 0) * split * trained
    table = job.framework.holds.number_bytes * layout.positions(job.seq_len) * job.model.hidden
    return [
        *partial_sums("sum of the embedding", "F", layout, x, (whole, whole)),
        sending("gradient into the embedding", "tp", "W", "all_gather", split * whole * trained, x),
        sending("gradient of learned positions", "tp", "W", "all_gather", learned, table),
    ]


def head(job: Job, layout: Layout) -> list[Op]:
    """The last stage's operations besides its layers: the product that makes the logits, and the loss."""
    model, t, at = job.model, layout.tp, LayerOnRank(job, layout, job.model)
    x, sb, vocabulary = at.x, at.tokens, model.vocab / t
    split, whole = layout.sequence_parallel * 1, job.framework.holds.split_vocabulary * 1
    # 16 bytes moved for each logit, or, with one operation at a time, 6 to make it float32 and 8 for softmax,
    # and backward 4, 12 and 6.
    scores = (16.0 if job.framework.runs.fused_loss else 36.0) * sb * vocabulary
    weights, scored = model.hidden * vocabulary, product("head", sb, model.hidden, vocabulary, "head", "head")
    beside = dict(block="head", hides="input gradients")
    once = [
        sending("gather for the head", "tp", "F", "all_gather", split * whole, x),
        *at.trained("head", scored, weights),
        summed(job, layout, weights * (job.lora is None), "head"),
        Op("loss", "head", "F", 0.0, scores / 2, 3),
        Op("loss", "head", "I", 0.0, scores / 2, 3),
        sending("three numbers a token", "tp", "F", "all_reduce", 3 * whole, 4.0 * sb),
        *partial_sums("gradient of the head", "I", layout, x, (whole, whole), under="W", **beside),
    ]
    # Each module that predicts a further token. Its layer is counted with the stage's layers.
    joined = product("joined with the next token", sb, 2 * model.hidden, model.hidden / t, part="head")
    return once + model.mtp * [*joined, *once]


def between_stages(job: Job, layout: Layout) -> Op:
    """One message of a pipeline: an activation or a gradient, of which each tp rank sends all or its part."""
    split = np.asarray(layout.sequence_parallel) | job.framework.sends.splits_sends
    x = LayerOnRank(job, layout, job.model).x / np.where(split, layout.tp, 1)
    return sending("send", "pp", "F", "send", 1, x)
