"""What a rank does once a step, for data parallelism and the optimizer: more lines of `operations`.

Source: Rajbhandari et al. 2020, sections 5 and 7 (ZeRO).
"""

from __future__ import annotations

import numpy as np

from .job import Job
from .layout import Layout
from .op import Op, sending, tensor_parallel
from .shape import ModelShape
from .stages import kinds_on_rank, layers_on_rank


def layer_share(model: ModelShape, t):
    """Parameters of a layer on one of t ranks, but routed experts: norms, biases behind a split by rows, the
    router and the ways down of latent attention are on all.
    """
    own = model.layer_params - (model.experts.count * model.expert_params if model.experts else 0)
    return (own - model.whole_params) / t + model.whole_params


def expert_share(model: ModelShape, layout: Layout):
    """Parameters of a layer's routed experts on one rank."""
    return model.experts.count / layout.ep * model.expert_params / layout.etp if model.experts else 0


def layer_matrices(model: ModelShape, layout: Layout):
    """Of these, in matrices: what a microbatch makes gradients of."""
    own = (model.attention_params + model.shared_params) / layout.tp
    return own + (
        model.experts.count / layout.ep * model.matrices(model.experts.ffn) / layout.etp
        if model.experts
        else 0
    )


def ends_share(model: ModelShape, layout: Layout, stage, split: bool = True):
    """The same for what a pipeline rank holds beside its layers: embedding, last norm and head. A tied head
    on a stage of its own is a copy of the embedding.
    """
    t = layout.tp if split else 1
    first, last = stage == 0, stage == layout.pipeline.head_rank(layout.pp)
    vocabulary = model.vocab * model.hidden
    shared = model.tied * first * last
    norm = model.hidden * (1 if model.gated else 2)
    return (first * 1 + last * 1 - shared * 1) * vocabulary / t + (
        first * model.positions * model.hidden + last * norm
    )


def synchronisation(job: Job, layout: Layout, stage=0) -> list[Op]:
    """Data parallelism and the optimizer on a rank of a pipeline stage, for a whole step.

    Without ZeRO gradients are summed once; with ZeRO-1 each goes to its owner, and weights come back after
    the optimizer. ZeRO-2 has no room for sums and reduces in every microbatch. ZeRO-3 does too, gathers each
    layer for every forward and every backward, what is left (embedding, head) once for both, and copies all
    of it into and out of buffers. In a pipeline it gathers once and reduces once, as torchtitan does.
    Experts have replicas of their own (edp), along which the same is done for them.
    """
    model, framework = job.model, job.framework
    kinds = kinds_on_rank(model, layout, stage)
    count = layers_on_rank(model, layout, stage)
    layers = sum(many * layer_share(kind, layout.tp) for kind, many in kinds)
    rest = ends_share(model, layout, stage, framework.split_vocabulary)
    ops = _shared_out(job, layout, "dp", layers, rest, count)
    if model.experts:
        kind, many = kinds[-1]
        ops += _shared_out(job, layout, "edp", many * expert_share(kind, layout), 0, many)
    norms = (model.norms * count + (stage == layout.pipeline.head_rank(layout.pp))) * (
        1 if model.gated else 2
    )
    # FSDP sums them before it has cast them, but where it keeps a sum over microbatches, as in a pipeline.
    summed = (np.asarray(layout.pp) > 1) & (np.asarray(layout.zero) == 3)
    number = np.where(summed, framework.gradient_bytes, framework.number_bytes)
    return [
        *ops,
        # With sequence parallelism each rank has seen a part of the tokens only.
        tensor_parallel(
            "gradients of norms", "S", "all_reduce", layout.sequence_parallel * norms, number * model.hidden
        ),
    ]


def _shared_out(job: Job, layout: Layout, axis: str, layers, rest, count) -> list[Op]:
    """The same for parameters that the members of one axis hold: in `count` layers, and beside them."""
    framework, z = job.framework, np.asarray(layout.zero)
    n = framework.number_bytes
    m, g, piped = job.microbatches(layout), framework.gradient_bytes, np.asarray(layout.pp) > 1
    mine, own_call = layers + rest, (axis == "dp") * 1  # what is beside the layers goes in a call of its own
    reduced = np.where(framework.reduces_each & ((z == 2) | (z == 3) & ~piped), m, 1)  # times in a step
    whole = (z == 0) | (framework.reduces_whole & (z < 3))
    updated, sharded = (z == 1) | (z == 2), z == 3
    of_layer, of_rest = np.where(piped, 1, 2 * m), np.where(piped, 1, m)  # gathers
    # To and from the buffers that travel: in each gather a weight is read and written (2 bytes each), in each
    # reduction a gradient is read (2) and written (g).
    copies = sharded * mine * (of_layer * (2 + 2) + reduced * (2 + g))
    master = framework.weight_bytes if framework.weight_bytes == 4 else 0
    owned = mine / np.where(z >= 1, layout.members(axis), 1)
    # Tensors of one call: a layer's, in the mean.
    calls, gathers = count + own_call, np.maximum(of_layer * count + of_rest * own_call, 1)
    each = mine / np.maximum(calls, 1)
    sent = (
        ("gradients", "all_reduce", whole * reduced * calls, g * each),
        ("gradients", "reduce_scatter", ~whole * reduced * calls, g * each),
        ("updated weights", "all_gather", updated * calls, n * each),
        (
            "gathered weights",
            "all_gather",
            sharded * gathers,
            n * (of_layer * layers + of_rest * rest) / gathers,
        ),
    )
    return [
        *(
            sending(name, "data parallel", axis, "S", collective, times, size)
            for name, collective, times, size in sent
        ),
        Op("copies", "data parallel", "S", 0.0, copies, 0),
        # Gradients are read; master copy, m and v read and written, and weights written.
        Op(
            "optimizer",
            "optimizer",
            "S",
            0.0,
            owned * (g + 2 * framework.optimizer_bytes + framework.weight_bytes + master),
            0,
        ),
    ]
