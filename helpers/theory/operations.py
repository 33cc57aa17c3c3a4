"""What a rank does in a step, as one list: each operation with what it computes, keeps and sends.

Seconds (`cost`), bytes held (`memory`) and bytes sent (`traffic`) are three readings of these lines, and
what is counted on real or fake ranks is compared with them.

Phases: F forward, I the gradient of an operation's input, W the gradient of its weights, S once a step.
What backward computes anew is read from F. Letters as in `memory`; half-precision numbers take 2 bytes.
Sources: Korthikanti et al. 2022, sections 3 and 4 (what is kept, what is sent); Dao 2023, section 3 (a fused
attention's backward: five products for two).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .job import Job
from .layout import Layout


class Op(NamedTuple):
    """One line. Numbers are for one microbatch on one rank, for the whole step in phase S; may be arrays.

    part: the term of a step that it belongs to. flops; streamed: bytes through the GPU's memory. kernels: how
    many the host launches. kept, kept_per_op: bytes that stay for backward, without recompute and with
    'per-op'. again: the recompute policies under which it runs once more. collective, axis, calls, payload:
    what is sent, payload being the whole tensor of one call. block, under: it may run while the
    phase `under` of the products of the same block does.
    """

    name: str
    part: str
    phase: str = "F"
    flops: float = 0.0
    streamed: float = 0.0
    kernels: float = 1
    kept: float = 0.0
    kept_per_op: float = 0.0
    again: tuple[str, ...] = ("full",)
    collective: str = ""
    axis: str = ""
    calls: float = 0
    payload: float = 0.0
    block: str = ""
    under: str = ""


def _product(name: str, rows, k, n, block: str = "", part: str = "matrices", **kept) -> list[Op]:
    """(rows × k) · (k × n), forward and its two gradients, which are products of the same size."""
    flops, streamed = 2.0 * rows * k * n, 2.0 * (rows * k + k * n + rows * n)
    return [
        Op(name, part, "F", flops, streamed, block=block, **kept),
        Op(name, part, "I", flops, streamed, block=block),
        Op(name, part, "W", flops, streamed, block=block),
    ]


def _stream(name: str, nbytes, kernels, **kept) -> list[Op]:
    """An operation that moves bytes and computes next to nothing; backward moves twice as many."""
    kept = {"again": ("per-op", "full")} | kept
    return [
        Op(name, "elementwise", "F", 0.0, nbytes, kernels, **kept),
        Op(name, "elementwise", "I", 0.0, 2.0 * nbytes, 2 * kernels),
    ]


def tensor_parallel(name: str, phase: str, collective: str, calls, payload, **where) -> Op:
    """A collective of tensor parallelism."""
    return Op(
        name,
        "tensor parallel",
        phase,
        kernels=0,
        collective=collective,
        axis="tp",
        calls=calls,
        payload=payload,
        **where,
    )


def _summed(job: Job, layout: Layout, params, part: str = "elementwise") -> Op:
    """Gradients added to those of the microbatches before, where they are kept and not reduced at once: read,
    and the sum read and written. A fused product of the weight gradient adds to the sum by itself.
    """
    adds = (np.asarray(layout.zero) < 2) | (not job.framework.reduces_each)
    each = (2 + 2 * job.framework.gradient_bytes) * (not job.framework.fused_sums)
    return Op("sums of gradients", part, "W", streamed=each * adds * params, kernels=0)


def _enter(job: Job, layout: Layout, x, block: str, products: int) -> list[Op]:
    """The way into a pair of split matrices: nothing or a gather, and backward the sum of the input's
    gradient. `products`: how many matrices begin there.
    """
    split = layout.sequence_parallel * 1
    sums = 1 if job.framework.merged else products
    return [
        tensor_parallel(f"gather for {block}", "F", "all_gather", split, x, again=("per-op", "full")),
        tensor_parallel(f"gradient of {block}", "I", "reduce_scatter", split, x, block=block, under="W"),
        tensor_parallel(
            f"gradient of {block}", "I", "all_reduce", (1 - split) * sums, x, block=block, under="W"
        ),
        # Kept in parts, a matrix's input is gathered once more for the gradient of its weights.
        tensor_parallel(
            f"gather for {block}",
            "W",
            "all_gather",
            split * job.framework.regathers,
            x,
            block=block,
            under="I",
        ),
    ]


def _leave(layout: Layout, x, block: str, again: tuple[str, ...]) -> list[Op]:
    """The way out: the ranks' partial sums become one, whole or in parts; backward a gather or nothing."""
    split = layout.sequence_parallel * 1
    return [
        tensor_parallel(f"sum of {block}", "F", "reduce_scatter", split, x, again=again),
        tensor_parallel(f"sum of {block}", "F", "all_reduce", 1 - split, x, again=again),
        tensor_parallel(f"gradient into {block}", "I", "all_gather", split, x),
    ]


def layer(job: Job, layout: Layout) -> list[Op]:
    """One layer, one microbatch, on one GPU."""
    model, framework, t, s = job.model, job.framework, layout.tp, job.seq_len
    h, sb = model.hidden, layout.tokens(s)
    x = _activation(job, layout)
    parts = np.where(layout.sequence_parallel, t, 1)  # it is held in so many
    inputs = x / (parts if framework.regathers else 1)  # of matrices
    wide, keys, inside = (
        framework.number_bytes * sb * n / t for n in (model.q_width, model.kv_width, model.ffn)
    )
    masks = 0 if model.gated else sb * h / parts  # a byte a number; models with biases use dropout
    eager = model.gated and not framework.fused  # PyTorch's own LayerNorm, GELU and dropout are fused
    again = ("per-op", "full")

    # Fused: a norm moves 8 bytes a number, a residual sum 4, dropout 3. One by one, a norm in float32: to
    # float32 6 bytes, square 8, mean 4, product 8, back 6, weight 4; a sum 6.
    norm, norm_kernels = (18.0, 6) if eager else (2.0, 1)
    add, add_kernels = (3.0, 1) if eager else (2.0 if model.gated else 3.5, 1)
    norm, add = norm * x / parts, add * x / parts

    # 4·s·width FLOPs a token; a fused attention skips the half above the diagonal, and its backward makes
    # five products of two. Unfused, 11 bytes a score: written, scaled and masked, softmax, dropout, read.
    fused = framework.fused_attention
    flops = 4.0 * sb * s * model.q_width / t * (0.5 if fused else 1)
    scores = 0.0 if fused else 11.0 * sb * s * model.heads / t
    score_kernels = 1 if fused else 5
    # Softmax; its mask and dropped copy.
    kept_scores = 0.0 if fused else (2 + 3 * (not model.gated)) * sb * s * model.heads / t
    anew = ("full",) if fused else ("selective", "full")
    attention = [
        Op("attention", "attention", "F", flops, scores, score_kernels, kept=wide + 2 * keys, again=anew),
        Op("attention", "attention", "I", (2.5 if fused else 2) * flops, 2 * scores, 2 * score_kernels),
        Op("attention's scores", "attention", kernels=0, kept=kept_scores * (layout.recompute == "none")),
    ]
    # Positions turned into queries and keys, one by one: minus one half 2, put together 4, times cosine 4 and
    # sine 4, sum 6. SiLU 4, times the other half 6.
    turned = _stream("positions", 10.0 * (wide + keys), 10) if eager else []
    act = _stream(
        "activation function",
        (5.0 if eager else 3.0 if model.gated else 2.0) * inside,
        2 if eager else 1,
        kept=inside * (3 if eager else 2 if model.gated else 1),
    )
    gate = _product("gate", sb, h, model.ffn / t, "feed-forward", kept_per_op=inside) if model.gated else []
    last = ("full",) if framework.whole_recompute else ()
    return [
        *_stream("norm 1", norm, norm_kernels, kept=x / parts, kept_per_op=x / parts),
        *_enter(job, layout, x, "attention", 3),
        *_product("queries", sb, h, model.q_width / t, "attention", kept=inputs, kept_per_op=wide),
        *_product("keys", sb, h, model.kv_width / t, "attention", again=again),
        *_product("values", sb, h, model.kv_width / t, "attention", kept_per_op=keys),
        *turned,
        *attention,
        *_product("attention's output", sb, model.q_width / t, h, again=again, kept=wide, kept_per_op=wide),
        *_leave(layout, x, "attention", ("full",)),
        *_stream("residual 1", add, add_kernels, kept=masks),
        *_stream("norm 2", norm, norm_kernels, kept=x / parts),
        *_enter(job, layout, x, "feed-forward", 2 if model.gated else 1),
        *gate,
        *_product(
            "up",
            sb,
            h,
            model.ffn / t,
            "feed-forward",
            kept=inputs,
            kept_per_op=0.0 if model.gated else inside,
            again=again if model.gated else ("full",),
        ),
        *act,
        *_product(
            "down",
            sb,
            model.ffn / t,
            h,
            kept=inside,
            kept_per_op=x / parts if model.gated else 0.0,
            again=("full",) if model.gated else again,
        ),
        *_leave(layout, x, "feed-forward", last),
        *_stream("residual 2", add, add_kernels, kept=masks),
        _summed(job, layout, model.matrix_params / t),
    ]


def embedding(job: Job, layout: Layout) -> list[Op]:
    """What the first stage does beside its layers. Looking tokens up takes next to no time."""
    x = _activation(job, layout)
    split, whole = layout.sequence_parallel * 1, job.framework.split_vocabulary * 1
    learned = (job.model.positions > 0) * split
    table = job.framework.number_bytes * job.seq_len * job.model.hidden
    return [
        tensor_parallel("sum of the embedding", "F", "reduce_scatter", split * whole, x),
        tensor_parallel("sum of the embedding", "F", "all_reduce", (1 - split) * whole, x),
        tensor_parallel("gradient into the embedding", "W", "all_gather", split * whole, x),
        tensor_parallel("gradient of learned positions", "W", "all_gather", learned, table),
    ]


def head(job: Job, layout: Layout) -> list[Op]:
    """What the last stage does beside its layers: the vocabulary's product, and the loss of its scores."""
    model, t, sb = job.model, layout.tp, layout.tokens(job.seq_len)
    x, vocabulary = _activation(job, layout), model.vocab / t
    split, whole = layout.sequence_parallel * 1, job.framework.split_vocabulary * 1
    # Bytes moved for each score. One by one: to float32 6, softmax 8, and backward 4, 12 and 6.
    scores = (16.0 if job.framework.fused_loss else 36.0) * sb * vocabulary
    return [
        tensor_parallel("gather for the head", "F", "all_gather", split * whole, x),
        *_product("head", sb, model.hidden, vocabulary, "head", part="head"),
        _summed(job, layout, model.hidden * vocabulary, "head"),
        Op("loss", "head", "F", 0.0, scores / 2, 3),
        Op("loss", "head", "I", 0.0, scores / 2, 3),
        tensor_parallel("three numbers a token", "F", "all_reduce", 3 * whole, 4.0 * sb),
        tensor_parallel(
            "gradient of the head", "I", "reduce_scatter", split * whole, x, block="head", under="W"
        ),
        tensor_parallel(
            "gradient of the head", "I", "all_reduce", (1 - split) * whole, x, block="head", under="W"
        ),
    ]


def between_stages(job: Job, layout: Layout) -> Op:
    """One message of a pipeline, an activation on or a gradient back: each tp rank sends all, or a part."""
    split = np.asarray(layout.sequence_parallel) | job.framework.splits_sends
    x = _activation(job, layout) / np.where(split, layout.tp, 1)
    return Op("send", "pipeline sends", kernels=0, collective="send", axis="pp", calls=1, payload=x)


def _activation(job: Job, layout: Layout):
    """Bytes of an activation between the matrices, whole."""
    return job.framework.number_bytes * layout.tokens(job.seq_len) * job.model.hidden
