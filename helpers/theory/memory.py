"""How many bytes each GPU holds, and for what: formulas a reader can redo by hand.

Letters as everywhere: N parameters; d, t, p the sizes of data, tensor and pipeline
parallelism; m microbatches of b sequences of s tokens; h hidden, a heads, L layers, v chunks on
each pipeline rank. Half-precision numbers take 2 bytes, float32 takes 4.

Sources: states, Rajbhandari et al. 2020 (ZeRO), section 3.1; activations, Korthikanti et al.
2022, section 4 and Table 2, here for any width, grouped queries and gated feed-forward parts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .layout import Layout, layers_on_rank
from .models import ModelShape

# What people count for one parameter trained with Adam, and how they come to differ.
BYTES_PER_PARAMETER = {
    "all float32": {"weights": 4, "gradients": 4, "optimizer": 8},  # 16: Adam keeps m and v
    # 16: m, v and a float32 master copy of the weights.
    "mixed": {"weights": 2, "gradients": 2, "optimizer": 12},
    "mixed, float32 gradients": {"weights": 2, "gradients": 4, "optimizer": 12},  # 18: Megatron-LM
    # 20: a float32 sum beside the half-precision ones.
    "mixed, both gradients": {"weights": 2, "gradients": 6, "optimizer": 12},
    "mixed, no master copy": {"weights": 2, "gradients": 2, "optimizer": 8},  # 12
    "8-bit Adam": {"weights": 2, "gradients": 2, "optimizer": 6},  # 10: master copy, m and v of one byte each
}

# Of mixed precision: half-precision weights; float32 master copy, m and v.
WEIGHT_BYTES, OPTIMIZER_BYTES = (2, 12)
SCORE_BYTES = 4  # for each of the vocabulary's scores, in float32
EAGER_SCORE_BYTES = (
    10  # more of them, one by one: half-precision ones, their softmax and its gradient in float32
)


def states(
    params: float,
    d: float = 1,
    zero: int = 0,
    weights: int = WEIGHT_BYTES,
    gradients: int = 2,
    optimizer: int = OPTIMIZER_BYTES,
) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state for `params` parameters on one of d ranks.

    zero 1 splits the optimizer state over d, zero 2 the gradients too, zero 3 the weights too.
    16·N bytes in all without ZeRO, 16·N/d with ZeRO-3.
    """
    return {
        "weights": weights * params / (d if zero >= 3 else 1),
        "gradients": gradients * params / (d if zero >= 2 else 1),
        "optimizer": optimizer * params / (d if zero >= 1 else 1),
    }


def stage_params(model: ModelShape, layout: Layout, stage):
    """Parameters on one GPU of pipeline rank `stage` (0 to p-1), ZeRO left aside. Takes arrays.

    Matrices, biases and embeddings are split over t; the norms, which are not, are counted as if they were:
    they are less than one parameter in ten thousand.
    """
    first, last = stage == 0, stage == _head_rank(layout)
    # The last stage needs the embedding too.
    copied = (model.vocab * model.hidden if model.tied else 0) * (_head_rank(layout) != 0)
    held = (
        layers_on_rank(model, layout, stage) * model.layer_params
        + first * model.embedding_params
        + last * (model.head_params + copied)
    )
    return held / layout.tp


def _head_rank(layout: Layout):
    """The pipeline rank that holds the head: the last, and the first where stages run down the ranks and back
    up.
    """
    return layout.pp * 0 if layout.schedule == "ZB-V" else layout.pp - 1


def activations_per_layer(model: ModelShape, layout: Layout, seq_len: float) -> dict[str, float]:
    """Bytes that one layer keeps for backward, for one microbatch, by what for.

    For a GPT without fused attention the sum is s·b·h·(10 + 24/t + 5·a·s/(h·t)), with sequence
    parallelism s·b·h·(34/t + 5·a·s/(h·t)): Korthikanti et al. 2022, Table 2. Dropout masks, of one byte
    each, are counted for models with biases, which use dropout, and not for gated ones, which do not.
    """
    t, sb, h = layout.tp, seq_len * layout.microbatch, model.hidden
    between = t if layout.sequence_parallel else 1  # what lies between the matrices
    dropout = 0 if model.gated else 1
    if layout.recompute == "full":
        return {"layer input": 2 * sb * h / between}
    # Of q, k, v, out, (gate,) up, down in this order the first, third and so on are kept.
    if layout.recompute == "per-op":
        kept = {
            "layer input": 2 * sb * h / between,
            "queries, values": 2 * sb * (model.q_width + model.kv_width) / t,
            "attention output": 2 * sb * model.q_width / t,
            "feed-forward inside": 2 * sb * model.ffn / t,
        }
        return kept | ({"feed-forward output": 2 * sb * h / between} if model.gated else {})
    terms = {
        "norm inputs": 4 * sb * h / between,
        "attention input": 2 * sb * h / between,
        "queries, keys, values": 2 * sb * (model.q_width + 2 * model.kv_width) / t,
        "attention output": 2 * sb * model.q_width / t,
        "feed-forward input": 2 * sb * h / between,
        "feed-forward inside": 2 * sb * model.ffn * (3 if model.gated else 2) / t,
        "dropout masks": dropout * 2 * sb * h / between,
    }
    if layout.eager and model.gated:
        terms["SiLU's output"] = 2 * sb * model.ffn / t
    if not layout.fused_attention and layout.recompute == "none":
        # Softmax; its mask and dropped copy.
        terms["attention scores"] = (2 + 3 * dropout) * sb * seq_len * model.heads / t
    return terms


def in_flight(layout: Layout, m: float, stage: int) -> float:
    """Microbatches whose activations stage `stage` holds at its fullest, in units of all its chunks.

    1F1B: p - stage. Interleaved: p·(1 + (p-1)/(p·v)) on the first stage. See `schedules` for the orders.
    """
    p, v = layout.pp, layout.interleave
    most = {
        "GPipe": m,
        "1F1B": p - stage,
        "ZB-H1": p,
        "ZB-H2": 2 * p - 1,
        "ZB-V": p,
        "interleaved": ((v - 1) * p + 2 * (p - stage - 1) + 1) / v,
    }[layout.schedule]
    return np.minimum(m, most)


def stage_memory(
    model: ModelShape, layout: Layout, seq_len: int, m, stage, overhead: float = 0.0
) -> dict[str, float]:
    """Bytes on one GPU of a pipeline rank, by what for.

    Takes arrays. `overhead`: context, communicators and the like.
    """
    # Where gradients are summed in float32, autograd makes half-precision ones first; fused kernels add to
    # the sum at once.
    gradients = layout.gradient_bytes + 2 * (layout.eager and layout.gradient_bytes == 4)
    parts = states(stage_params(model, layout, stage), layout.dp, layout.zero, gradients=gradients)
    sb, t = seq_len * layout.microbatch, layout.tp
    first, last = stage == 0, stage == _head_rank(layout)
    per_layer = sum(activations_per_layer(model, layout, seq_len).values())
    held = layers_on_rank(model, layout, stage) * per_layer
    if not model.gated:  # a byte a number for the dropout mask behind the embedding
        held = held + first * sb * model.hidden / (t if layout.sequence_parallel else 1)
    parts["activations"] = held * in_flight(layout, m, stage)
    if layout.recompute in ("per-op", "full"):  # one layer is whole again while its backward runs
        whole = replace(layout, recompute="none")
        parts["activations"] = parts["activations"] + sum(
            activations_per_layer(model, whole, seq_len).values()
        )
    # One microbatch at a time: the norm's and the head's input, and float32 scores.
    parts["logits"] = (
        last * sb * (4.0 * model.hidden + (SCORE_BYTES + EAGER_SCORE_BYTES * layout.eager) * model.vocab) / t
    )
    # Two layers' weights are gathered at a time, one in use and one on its way. PyTorch's FSDP keeps
    # embedding and head gathered as well.
    ends = layout.eager * (first * model.embedding_params + last * model.head_params)
    parts["gathered weights"] = (layout.zero == 3) * WEIGHT_BYTES * (2.0 * model.layer_params + ends) / t
    parts["overhead"] = overhead
    return parts


def largest_stage(
    model: ModelShape, layout: Layout, seq_len: int, m: float, overhead: float = 0.0
) -> tuple[int, dict[str, float]]:
    """(stage, its bytes by what for) of the pipeline rank that holds most: the one that must fit."""
    stages = [stage_memory(model, layout, seq_len, m, k, overhead) for k in range(layout.pp)]
    fullest = max(range(layout.pp), key=lambda k: sum(stages[k].values()))
    return fullest, {name: float(size) for name, size in stages[fullest].items() if size}


def peak_memory(model: ModelShape, layout: Layout, seq_len: int, m, overhead: float = 0.0):
    """Bytes on the fullest GPU, for arrays of layouts: what `largest_stage` finds, which is one of the first
    two ranks or the last.
    """
    candidates = (0, np.minimum(1, layout.pp - 1), layout.pp - 1)
    return np.max(
        [sum(stage_memory(model, layout, seq_len, m, k, overhead).values()) for k in candidates], axis=0
    )
