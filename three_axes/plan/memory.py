"""Computes how many bytes each GPU holds, by part, with formulas that can be redone by hand.

Letters: N parameters; d, t, p the sizes of data, tensor and pipeline parallelism; m microbatches of b
sequences of s tokens; h hidden, a heads, L layers, v chunks on each pipeline rank. A half-precision number
takes 2 bytes, a float32 takes 4.

Sources: Rajbhandari et al. 2020 (ZeRO), section 3.1, for weights, gradients and optimizer; for activations
Korthikanti et al. 2022, section 4, here with any width, grouped queries and gated feed-forward parts too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import SCORES
from .data_parallel import adapter_share, whole_until_last
from .job import Job, find_precision
from .layout import Count, Layout, spread
from .op import Op
from .operations import OperationLists, lists
from .shape import ModelShape
from .stages import ends_share, expert_share, kinds_on_rank, layer_matrices, layer_share

# Bytes for one parameter trained with Adam, in six variants. The number in a comment is the sum.
BYTES_PER_PARAMETER = {
    "all float32": {"weights": 4, "gradients": 4, "optimizer": 8},  # 16: Adam keeps m and v
    # 16: m, v and a float32 master copy of the weights.
    "mixed": {"weights": 2, "gradients": 2, "optimizer": 12},
    "mixed, float32 gradients": {"weights": 2, "gradients": 4, "optimizer": 12},  # 18: Megatron-LM
    # 20: float32 sums of the gradients beside the half-precision gradients.
    "mixed, both gradients": {"weights": 2, "gradients": 6, "optimizer": 12},
    "mixed, no master copy": {"weights": 2, "gradients": 2, "optimizer": 8},  # 12
    "8-bit Adam": {"weights": 2, "gradients": 2, "optimizer": 6},  # 10: master copy, m and v of one byte each
}

OVERHEAD = 2e9  # bytes on each GPU for the CUDA context and communicators, assumed
AGAIN = ("modules", "per-op", "full")  # policies with which a layer's activations all exist again in backward
SCORE_BYTES = 4  # of a logit in float32
# An unfused loss holds for each logit also a half-precision copy, and softmax and gradient in float32. If tp
# splits the vocabulary, it holds one more float32.
EAGER_SCORE_BYTES = 10


def states(
    params: float, d: Count = 1, zero: Count = 0, weights: Any = 2, gradients: Any = 2, optimizer: Any = 12
) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state for `params` parameters on one of d ranks.

    zero 1 splits the optimizer state over d, zero 2 the gradients too, zero 3 the weights too.
    16·N bytes in all without ZeRO, 16·N/d with ZeRO-3. Takes arrays.
    """
    shares = lambda least: 1 + (zero >= least) * (d - 1)  # d from this ZeRO stage on
    return {
        "weights": weights * params / shares(3),
        "gradients": gradients * params / shares(2),
        "optimizer": optimizer * params / shares(1),
    }


def room(job: Job) -> float:
    """The most bytes on a GPU with which a layout fits: less than its memory, because PyTorch's allocator
    reserves more than is allocated. A layout that needs more, but not more than its memory, is tight.
    """
    return (job.cluster.device.memory - OVERHEAD) / job.framework.holds.reserves + OVERHEAD


def stage_params(model: ModelShape, layout: Layout, stage, split_vocabulary: bool = True):
    """Parameters on one GPU of pipeline rank `stage` (0 to p-1), without ZeRO. Takes arrays."""
    return sum(_params(model, layout, stage, split_vocabulary))


def _params(model: ModelShape, layout: Layout, stage, split_vocabulary: bool) -> tuple[float, float, float]:
    """Parameters on a GPU: (in layers without routed experts, in routed experts, outside the layers)."""
    kinds = kinds_on_rank(model, layout, stage)
    own = sum(many * layer_share(kind, layout.tp) for kind, many in kinds)
    ends = ends_share(model, layout, stage, split_vocabulary)
    return own, sum(many * expert_share(kind, layout) for kind, many in kinds), ends


def kept(ops: list[Op], recompute: str) -> dict[str, float]:
    """Operation -> bytes that a layer with the operations `ops` keeps for the backward of one microbatch.

    For a GPT without fused attention the sum is s·b·h·(10 + 24/t + 5·a·s/(h·t)), with sequence
    parallelism s·b·h·(34/t + 5·a·s/(h·t)): Korthikanti et al. 2022, Table 2. Dropout masks, of one byte a
    number, are counted except for gated models, which use no dropout.
    """
    if recompute == "full":
        return {"layer input": ops[0].keeps.nbytes}
    by_name: dict[str, float] = {}
    for op in ops:
        stays = op.keeps.under(recompute)
        if np.any(stays) and not (recompute == "selective" and op.name == SCORES):
            by_name[op.name] = by_name.get(op.name, 0.0) + stays
    return by_name


def saved(made: OperationLists, recompute: str) -> list[tuple[float, float]]:
    """For each kind of layer (bytes that it keeps of a microbatch, bytes more while its backward runs)."""
    pairs = []
    for ops in made.layers:
        stays = sum(kept(ops, recompute).values())
        whole = sum(op.keeps.nbytes for op in ops) if recompute in AGAIN else 0.0
        pair = stays, whole - stays * (recompute == "modules")
        pairs.append(tuple(spread(size, made.which) for size in pair))
    return pairs


def in_flight(layout: Layout, m: float, stage: int) -> float:
    """The most microbatches whose activations a stage holds at once; one on all its chunks counts 1."""
    return np.minimum(m, layout.pipeline.in_flight(layout.pp, layout.interleave, m, stage))


def stage_states(job: Job, layout: Layout, stage) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state on a GPU of the pipeline rank `stage`. Takes arrays."""
    model, holds = job.model, job.framework.holds
    buckets = holds.gradient_bytes * holds.buckets * (np.asarray(layout.replicas) > 1)
    own, routed, ends = _params(model, layout, stage, holds.split_vocabulary)
    bytes_ = holds.weight_bytes, holds.gradient_bytes + buckets, holds.state_bytes * (not holds.offload)
    if job.lora:
        parts = states(adapter_share(job, layout, stage), layout.shards, layout.zero, *bytes_)
        share = lambda size, d: size / np.where(np.asarray(layout.zero) >= 3, d, 1)
        frozen = share(job.lora.weight_bytes * own + 2.0 * ends, layout.shards)
        frozen = frozen + share(job.lora.weight_bytes * routed, layout.expert_shards)
        return parts | {"weights": parts["weights"] + frozen}
    parts = states(own + ends, layout.shards, layout.zero, *bytes_)
    if model.experts:
        of_experts = states(routed, layout.expert_shards, layout.zero, *bytes_)
        parts = {name: size + of_experts[name] for name, size in parts.items()}
    return parts


def stage_memory(
    job: Job, layout: Layout, stage, overhead: float = OVERHEAD, of_kinds: list | None = None
) -> dict[str, float]:
    """Bytes on one GPU of the pipeline rank `stage`, by part. Takes arrays. overhead: bytes of context and
    communicators. of_kinds: the result of `saved`, if it is computed already.
    """
    of_kinds = of_kinds or saved(lists(job, layout), layout.recompute)
    model, t, holds, runs = job.model, layout.tp, job.framework.holds, job.framework.runs
    parts = stage_states(job, layout, stage)
    if np.any(late := whole_until_last(job, layout)):
        whole = adapter_share(job, layout, stage) if job.lora else stage_params(model, layout, stage)
        parts["gradients"] = np.maximum(parts["gradients"], late * job.framework.sent_bytes * whole)
    sb, head_rank = layout.tokens(job.seq_len), layout.pipeline.head_rank(layout.pp)
    first, last = stage == 0, stage == head_rank
    kinds = kinds_on_rank(model, layout, stage)
    again = layout.share_recomputed(sum(many for _, many in kinds)) if layout.recompute == "full" else 1.0
    held = sum(n * (again * stays + (1 - again) * whole) for (_, n), (stays, whole) in zip(kinds, of_kinds))
    if not model.bare:  # the mask of the dropout after the embedding, a byte a number
        held = held + first * sb * model.hidden / np.where(layout.sequence_parallel, t, 1)
    parts["activations"] = held * in_flight(layout, job.microbatches(layout), stage)
    # The last stage holds these for one microbatch at a time: the inputs of norm and head, and the logits.
    eager = EAGER_SCORE_BYTES + SCORE_BYTES * holds.split_vocabulary * (np.asarray(t) > 1)
    scores: Any = SCORE_BYTES + eager * (not runs.fused_loss)
    scores = scores * model.vocab * (1 + model.mtp)
    inputs = (2.0 + (holds.norm_bytes if model.bare else 2)) * model.hidden
    logits = parts["logits"] = last * sb * (inputs + scores) / t
    # In a layer's backward all of its activations exist again; the logits are freed by then.
    whole = of_kinds[-1][1] if layout.recompute in AGAIN else 0.0
    parts["activations"] = parts["activations"] + np.maximum(0, whole - logits)
    in_loss, in_layer = _gathered(job, layout, stage)
    parts["gathered weights"] = np.maximum(logits + in_loss, whole + in_layer) - np.maximum(logits, whole)
    if holds.flat_bucket:
        parts |= _flat(job, layout, stage, parts["activations"] + logits, parts["gathered weights"])
    if job.precision in holds.narrow_copies:
        numbers = sum(many * layer_matrices(kind, layout) for kind, many in kinds)
        copies = 2 * (np.asarray(layout.zero) < 3)
        parts["narrow weights"] = copies * find_precision(job.precision).bytes * numbers
    if job.lora and job.lora.four_bit:  # one matrix at a time is made wide
        widest = max(model.q_width, model.experts.shared if model.experts else model.ffn)
        parts["widened weights"] = 2.0 * model.hidden * widest / t
    parts["overhead"] = overhead
    return parts


def _flat(job: Job, layout: Layout, stage, passing, gathered) -> dict[str, Any]:
    """Bytes that DeepSpeed's ZeRO holds besides: see `Holds.flat_bucket`. Its step copies gradients to
    float32, with ZeRO-1 and 2 also to a flat half-precision buffer, where `passing` bytes were freed before.
    gathered: bytes of gathered weights that are counted already.
    """
    holds, zero = job.framework.holds, np.asarray(layout.zero)
    params = stage_params(job.model, layout, stage, holds.split_vocabulary)
    trained = adapter_share(job, layout, stage) if job.lora else params
    buckets = np.where(zero == 3, 2.0, 2 * 4.5) * 2.0 * holds.flat_bucket
    live = (zero == 3) * 2.0 * np.minimum(holds.live, params)
    copied = np.minimum(trained / layout.shards, np.where(zero == 3, holds.live, np.inf))
    many = np.asarray(layout.shards) > 1
    return {
        "buckets": many * (zero > 0) * buckets,
        "live weights": many * np.maximum(0.0, live - gathered),
        "float32 gradients": (zero > 0) * np.maximum(0.0, np.where(zero == 3, 4.0, 6.0) * copied - passing),
    }


def _gathered(job: Job, layout: Layout, stage):
    """Bytes of gathered weights and whole gradients with ZeRO-3: (during the loss, in a layer's backward).

    PyTorch's FSDP keeps embedding and head gathered from the loss on, and the head's gradient until the end.
    A layer's backward holds its weights and those being gathered for the next layer, its gradients, and the
    copy of these that is reduced. In a pipeline all weights and gradients are whole all the time.
    """
    if not np.any(np.asarray(layout.zero) == 3):
        return 0.0, 0.0
    model, holds, frozen = job.model, job.framework.holds, job.lora is not None
    in_layer = job.lora.weight_bytes if job.lora else 2.0
    share = layer_share(model, layout.tp) + expert_share(model, layout)
    kept = 0.0 if job.framework.runs.fused_loss else 1.0
    ends = 2.0 * kept * ends_share(model, layout, stage, holds.split_vocabulary)
    head = 2.0 * kept * model.hidden * model.vocab / layout.tp
    params = stage_params(model, layout, stage, holds.split_vocabulary)
    whole = (in_layer + job.framework.sent_bytes * (not frozen)) * params
    gradients = 0.0 if frozen else head + (2.0 + job.framework.sent_bytes) * share
    sharded, piped = np.asarray(layout.zero) == 3, np.asarray(layout.pp) > 1
    at = ends, 2 * in_layer * share + ends + gradients
    return tuple(sharded * np.where(piped, np.maximum(whole, held), held) for held in at)


def stages_memory(job: Job, layout: Layout, overhead: float = OVERHEAD) -> list[dict[str, float]]:
    """The result of `stage_memory` on each pipeline rank, for one layout."""
    of_kinds = saved(lists(job, layout), layout.recompute)
    stages = (stage_memory(job, layout, k, overhead, of_kinds) for k in range(layout.pp))
    return [{name: float(size) for name, size in stage.items()} for stage in stages]


def fullest(stages: list[dict[str, float]]) -> int:
    """The number of the pipeline rank that holds most."""
    return max(range(len(stages)), key=lambda k: sum(stages[k].values()))


def largest_stage(job: Job, layout: Layout, overhead: float = OVERHEAD) -> tuple[int, dict[str, float]]:
    """(number, bytes by part) of the pipeline rank that holds most."""
    stages = stages_memory(job, layout, overhead)
    stage = fullest(stages)
    return stage, {name: size for name, size in stages[stage].items() if size}


def peak_memory(job: Job, layout: Layout, of_kinds: list | None = None):
    """Bytes on the fullest GPU, for arrays: of the first two or three pipeline ranks, and the last."""
    of_kinds = of_kinds or saved(lists(job, layout), layout.recompute)
    candidates = [0, np.minimum(1, layout.pp - 1), layout.pp - 1]
    if len(of_kinds) > 1:  # the first ranks may hold layers of another kind, and the third the usual kind
        candidates.append(np.minimum(2, layout.pp - 1))
    held = [sum(stage_memory(job, layout, k, of_kinds=of_kinds).values()) for k in candidates]
    return np.max(held, axis=0)
