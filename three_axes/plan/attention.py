"""Operations of a layer's attention: its matrices, its scores, and what ranks that share a sequence send.

Letters: t tensor-parallel ranks, sb tokens of a microbatch on a rank, h hidden width, n bytes of a number,
x bytes of an activation.

Sources: Dao 2023, section 3 (fused attention); DeepSeek-AI 2024, section 2.1 (latent attention). Ranks that
share a sequence: Liu et al. 2023 (ring attention), Llama Team 2024, section 3.3.2 (keys and values gathered),
Jacobs et al. 2023 (Ulysses: heads in place of tokens).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .frameworks import ATTENTION
from .op import Kept, LayerOnRank, Op, enter, leave, norm, sending, stream
from .shape import Latent

SCORES = "attention's scores"  # the operation whose results 'selective' recompute does not keep


def attention(at: LayerOnRank, eager: bool) -> list[Op]:
    """The operations from the output of a layer's first norm to the sum over the tensor-parallel ranks.
    eager: rotary positions and the norms of queries and keys take a kernel for each of PyTorch's operations.
    """
    model, t, sb, x = at.model, at.layout.tp, at.tokens, at.x
    holds = at.job.framework.holds
    n, h = holds.number_bytes, model.hidden
    queries, keys = (n * sb * width / t for width in (model.q_width, model.kv_width))  # bytes
    recomputed = ("per-op", "full")  # policies under which a product is computed again
    if model.latent:
        into = _latent(at, model.latent)
    else:
        matrix = partial(at.product, block="attention")
        # Rotary positions move 20 bytes a number: to negate half of them 2, join 4, cosine 4, sine 4, sum 6.
        rotated = stream("positions", 10.0 * (queries + keys), 10) if eager else []
        normed: list[Op] = []
        if model.qk_norm:  # one norm for queries, one for keys
            normed = [
                *norm("norm of queries", queries, eager, holds.norm_bytes, Kept(queries)),
                *norm("norm of keys", keys, eager, holds.norm_bytes, Kept(keys)),
            ]
        into = [
            *enter(at, x, "attention", 3),
            *matrix("queries", sb, h, model.q_width / t, keeps=Kept(at.gathered(x), queries, 0.0)),
            *matrix("keys", sb, h, model.kv_width / t, first=False, recomputed=recomputed),
            *matrix("values", sb, h, model.kv_width / t, first=False, keeps=Kept(per_op=keys)),
            *normed,
            *rotated,
        ]
    out = queries if not model.latent else n * sb * model.out_width / t
    # The attention's result is kept, and in a narrow precision also a narrow copy for the product.
    own = out if at.job.precision == "bf16" else out + at.narrow(out)
    kept = dict(keeps=Kept(own, per_op=out), recomputed=recomputed)
    output = "attention's output"
    return [
        *into,
        *_scores(at, queries),
        *at.product(output, sb, model.out_width / t, h, block=output, **kept),
        *leave(at.layout, x, "attention", ("full",)),
    ]


def _latent(at: LayerOnRank, part: Latent) -> list[Op]:
    """Latent attention's queries, keys and values. A token's vector is projected down to short vectors, and
    these up to the rank's heads. With sequence parallelism a rank projects only its part of the tokens down.
    """
    model, job, t, sb = at.model, at.job, at.layout.tp, at.tokens
    h, n, mine = model.hidden, job.framework.holds.number_bytes, at.tokens / at.parts
    matrix = partial(at.product, block="attention")
    short = part.kv_rank + part.rope
    queries, keys, values = (n * sb * width / t for width in (model.q_width, model.k_width, model.v_width))
    if part.q_rank:
        kept = Kept(at.narrow(at.x) / at.parts, modules=0.0)
        queries_down = [
            *at.product("queries, down", mine, h, part.q_rank, keeps=kept),
            *stream("norm of queries", 2.0 * n * mine * part.q_rank, 1, keeps=Kept(n * mine * part.q_rank)),
        ]
        gathered, rows, inputs = part.q_rank + short, part.q_rank, n * sb * part.q_rank
    else:
        queries_down, gathered, rows, inputs = [], h + short, h, at.x
    up, result = model.heads * (part.nope + part.values) / t, n * mine * short
    of_queries = Kept(at.gathered(inputs), per_op=queries, modules=0.0)
    of_both = Kept(at.gathered(n * sb * part.kv_rank), per_op=keys + values, modules=0.0)
    again: dict[str, Any] = dict(recomputed=("full", "modules"))
    return [
        *queries_down,
        *at.product("keys and values, down", mine, h, short, keeps=Kept(result)),
        *stream("norm of keys and values", 2.0 * n * mine * part.kv_rank, 1),
        *enter(at, n * sb * gathered, "attention", 2),
        *matrix("queries, up", sb, rows, model.q_width / t, keeps=of_queries, **again),
        *matrix("keys and values, up", sb, part.kv_rank, up, keeps=of_both, **again),
        *stream("keys put together", 2.0 * keys, 1, recomputed=("per-op", "full", "modules")),
    ]


def _scores(at: LayerOnRank, queries) -> list[Op]:
    """The scores, their softmax, and its product with the values: 4·s·width FLOPs a token forward. A fused
    attention skips the half above the diagonal, and its backward computes five products, its forward two. An
    attention that is not fused moves 11 bytes a score: written, scaled and masked, softmax, dropout, read.
    queries: their bytes.
    """
    model, t, sb = at.model, at.layout.tp, at.tokens
    attended, n = model.attended(at.job.seq_len), at.job.framework.holds.number_bytes
    fused = at.job.framework.runs.fused_attention
    flops = 2.0 * sb * attended * (model.q_width + model.out_width) / t * (0.5 if fused else 1)
    scores = 0.0 if fused else 11.0 * sb * attended * model.heads / t
    kernels, back = (1, 2.5) if fused else (5, 2)
    # Bytes a score: softmax 2, and with dropout its mask 1 and its result 2.
    kept_scores = 0.0 if fused else (2 + 3 * (not model.bare)) * sb * attended * model.heads / t
    recomputed = ("full",) if fused else ("selective", "full")
    modules = 0.0 if model.latent else None  # this policy computes latent queries, keys and values again
    stays = queries + n * sb * (model.k_width + model.v_width) / t
    kept = Kept(stays, modules=modules)
    block: dict[str, Any] = dict(block="scores", share=_reached(at, attended) if fused else 1.0)
    return [
        *_context(at),
        Op("attention", "attention", "F", flops, scores, kernels, kept, recomputed, **block),
        Op("attention", "attention", "I", back * flops, 2 * scores, 2 * kernels, **block),
        Op(SCORES, "attention", kernels=0, keeps=Kept(kept_scores), recomputed=("selective", "full")),
    ]


def _reached(at: LayerOnRank, attended):
    """The share of the achievable FLOP/s that a fused attention reaches: see `frameworks.Reached`. attended:
    tokens to which a token attends. A ring processes those of one rank at a time.
    """
    kernel = ATTENTION[at.job.framework.runs.attention]
    reached = kernel.get(at.job.cluster.device.generation, next(iter(kernel.values())))
    at_once = attended / (at.layout.cp if at.job.framework.sends.context == "ring" else 1)
    return reached.at(at_once, at.model.q_width // at.model.heads)


def _context(at: LayerOnRank) -> list[Op]:
    """What cp ranks that share each sequence send, in one of three ways (`frameworks.Sends.context`).

    ring: keys and values go from rank to rank, cp - 1 times, while those of the previous rank are used; in
    backward they go round again, and their gradients all the way back to the owner. gather: each rank gathers
    all keys and values, again in backward if the framework does not keep them, and reduce-scatters their
    gradients. heads: all-to-alls give each rank all tokens of some heads in place of some tokens of all
    heads, and return the results. A rank has two parts of the sequence, one from its start and one from its
    end, so that all ranks have an equal share of the causal half.
    """
    layout, model, cp = at.layout, at.model, np.asarray(at.layout.cp)
    if not np.any(cp > 1):
        return []
    n, sb, t, sends = at.job.framework.holds.number_bytes, at.tokens, layout.tp, at.job.framework.sends

    def send(name, phase, collective, calls, payload, **where) -> Op:
        return sending(name, "cp", phase, collective, calls * (cp > 1), payload, **where)

    both = n * sb * (model.k_width + model.v_width) / t
    if sends.context == "ring":
        # Each part's result is read and added to a float32 sum, which is read and written.
        sums = (2.0 + 8.0) * sb * model.out_width / t * (cp - 1)
        beside = dict(block="scores", hides="keys and values")
        return [
            send("ring of keys and values", "F", "send", cp - 1, both, under="F", **beside),
            # Keys and values stop one hop before their owner; their gradients go all the way back to it.
            send("ring of keys, values, gradients", "I", "send", 2 * cp - 1, both, under="I", **beside),
            *stream("sums of the ring", sums, cp - 1, 1),
        ]
    if sends.context == "gather":
        again = sends.regathers * 1
        return [
            send("gather of keys and values", "F", "all_gather", 1, cp * both),
            send("gather of keys and values", "I", "all_gather", again, cp * both),
            send("gradients of keys and values", "I", "reduce_scatter", 1, cp * both),
        ]
    # If there are fewer key/value heads than ranks, each head is sent to several ranks.
    heads = np.maximum(1, cp * t / (model.heads if model.latent else model.kv_heads))
    parts = (
        ("queries", n * sb * model.q_width / t),
        ("keys and values", both * heads),
        ("results", n * sb * model.out_width / t),
    )
    return [
        send(f"{what}, tokens for heads", phase, "all_to_all", 1, size)
        for phase in "FI"
        for what, size in parts
    ]
