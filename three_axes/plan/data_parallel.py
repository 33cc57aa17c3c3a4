"""Operations of a rank for data parallelism and for the optimizer. `operations` has all others.

Source: Rajbhandari et al. 2020, sections 5 and 7 (ZeRO).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .frameworks import Holds
from .job import Job
from .layout import Layout
from .op import Op, sending
from .operations import layer
from .stages import ends_share, expert_share, kinds_on_rank, layer_share, layers_on_rank


def adapter_share(job: Job, layout: Layout, stage=0):
    """Number of parameters in LoRA's adapters on one rank of a pipeline stage; 0 without LoRA."""
    if not job.lora:
        return 0.0
    kinds = kinds_on_rank(job.model, layout, stage)
    return sum(many * sum(op.adapters for op in layer(job, layout, kind)) for kind, many in kinds)


def whole_until_last(job: Job, layout: Layout):
    """Whether FSDP leaves gradients whole on each rank until the last microbatch, and reduces them once: then
    it sends less and holds more (`frameworks.Sends.reduces_each`). In a pipeline FSDP always does so, which
    is counted elsewhere. Takes arrays.
    """
    sends, several = job.framework.sends, job.microbatches(layout) > 1
    late = sends.fsdp and not sends.reduces_each
    alone = np.asarray(layout.pp) == 1
    return late & several & alone & (np.asarray(layout.zero) >= 2) & (np.asarray(layout.shards) > 1)


def synchronisation(job: Job, layout: Layout, stage=0) -> list[Op]:
    """Data parallelism and the optimizer on a rank of a pipeline stage, for a whole step.

    Without ZeRO, gradients are all-reduced once. With ZeRO-1 they are reduce-scattered, and weights are
    gathered after the optimizer. With ZeRO-2 a rank keeps only its part of the sums, so every microbatch's
    gradients are reduced. So are they with ZeRO-3, which gathers each layer for every forward and every
    backward, embedding and head once for both, and copies weights and gradients into and out of buffers; in a
    pipeline it gathers and reduces once, as torchtitan does. The same is done for experts along their own
    replicas (edp). Frozen weights are only gathered. `frameworks.Sends` has what some frameworks do instead.
    """
    model, holds = job.model, job.framework.holds
    kinds = kinds_on_rank(model, layout, stage)
    count = layers_on_rank(model, layout, stage)
    layers = sum(many * layer_share(kind, layout.tp) for kind, many in kinds)
    rest = ends_share(model, layout, stage, holds.split_vocabulary)
    adapters = adapter_share(job, layout, stage)
    ops = _along(job, layout, "dp", layers + adapters, rest, count, adapters)
    if model.experts:
        many = sum(many for kind, many in kinds if kind.experts)
        routed = sum(many * expert_share(kind, layout) for kind, many in kinds)
        ops += _along(job, layout, "edp", routed, 0, many, 0.0)
    if job.lora:
        # One of an adapter's two matrices, of W parameters, is whole on each tensor-parallel rank, which
        # computes a part of its gradient. The other, of S, is split: `adapters` is W + S/t, `alone` W + S.
        t = np.asarray(layout.tp)
        alone = adapter_share(job, replace(layout, tp=1), stage)
        whole = (t * adapters - alone) / np.maximum(t - 1, 1)
        size = holds.number_bytes * whole
        return [*ops, sending("gradients of adapters", "tp", "S", "all_reduce", t > 1, size)]
    head = layout.pipeline.head_rank(layout.pp)
    last = stage == head
    # A tied head on a stage of its own is a copy: the two gradients are summed (Megatron-Core's
    # finalize_model_grads.py). Each of the two ranks sends its own gradient.
    two = model.tied * (head != 0) * ((stage == 0) | last)
    both = holds.gradient_bytes * model.vocab * model.hidden / np.asarray(layout.tp)
    ops.append(sending("gradient of a tied head", "pp", "S", "send", two, both))
    norms = (model.norms * count + last) * (1 if model.bare else 2)
    # Norms' gradients are summed over tp before FSDP casts them to the type of its sums, in a pipeline after.
    summed = (np.asarray(layout.pp) > 1) & (np.asarray(layout.zero) == 3)
    number = np.where(summed, holds.gradient_bytes, holds.number_bytes)
    # With sequence parallelism each rank has computed them with a part of the tokens only.
    calls, size = layout.sequence_parallel * norms, number * model.hidden
    return [*ops, sending("gradients of norms", "tp", "S", "all_reduce", calls, size)]


def _along(job: Job, layout: Layout, axis: str, layers, rest, count, adapters) -> list[Op]:
    """What a rank does for the parameters that ranks along an axis have in common. layers, rest: how many are
    in `count` layers, and outside the layers. adapters: how many are trained, if the others are frozen.

    With a shard smaller than dp, ZeRO's state is sharded over so many ranks (axis shard; eshard for experts),
    and gradients are then summed over the groups (replicate, ereplicate), as in HSDP.
    """
    holds, sends, z = job.framework.holds, job.framework.sends, np.asarray(layout.zero)
    n, g = holds.number_bytes, job.framework.sent_bytes
    m, piped = job.microbatches(layout), np.asarray(layout.pp) > 1
    own_call = (axis == "dp") * 1  # parameters outside the layers have a call of their own
    frozen = job.lora is not None
    held, trained = layers + rest, adapters if frozen else layers + rest
    in_layer = job.lora.weight_bytes if job.lora else n  # bytes of a gathered weight
    over, across = {"dp": ("shard", "replicate"), "edp": ("eshard", "ereplicate")}[axis]
    over = over if layout.hybrid else axis
    reduced = np.where(sends.reduces_each & ((z == 2) | (z == 3) & ~piped), m, 1)  # times in a step
    whole = (z == 0) | (sends.reduces_whole & (z < 3))
    updated, sharded = (z == 1) | (z == 2), z == 3
    of_layer, of_rest = np.where(piped, 1, 2 * m), np.where(piped, 1, m)  # gathers in a step
    # Bytes of copies into and out of communication buffers: a gather reads and writes a weight, 2 each; a
    # reduction reads a gradient, 2, and writes it, g.
    weight = job.lora.weight_bytes if job.lora else 2
    copies = sharded * (held * of_layer * 2 * weight + trained * reduced * (2 + g))
    # Each microbatch after the first reads a gradient and the whole sum, and writes it.
    copies = copies + whole_until_last(job, layout) * (m - 1) * (2 + 2 * g) * trained
    if holds.weight_bytes == 4 and not frozen:
        # Before each gather a rank casts its float32 part, a single rank all of it (PyTorch 2.13's
        # FSDPParam.all_gather_inputs and FSDPParamGroup.wait_for_unshard): 4 bytes read, 2 written.
        copies = copies + sharded * of_layer * (4 + n) * held / layout.members(over)
    owned = trained / np.where(z >= 1, layout.members(over), 1)
    summed = np.where(z >= 2, owned, trained) * ~sharded  # sums of gradients that are set to 0 in each step
    # One call has the tensors of a layer; all calls have the same size, the mean.
    calls, gathers = count + own_call, np.maximum(of_layer * count + of_rest * own_call, 1)
    of_call = trained / np.maximum(calls, 1)
    gathered = (of_layer * in_layer * layers + of_rest * n * rest) / gathers
    sent = [
        sending("gradients", axis, "S", "all_reduce", whole * reduced * calls, g * of_call),
        sending("gradients", over, "S", "reduce_scatter", ~whole * reduced * calls, g * of_call),
        sending("updated weights", over, "S", "all_gather", updated * calls, n * of_call),
        sending("gathered weights", over, "S", "all_gather", sharded * gathers, gathered),
    ]
    if over != axis:
        part = g * of_call / layout.members(over)
        sent.append(sending("gradients", across, "S", "all_reduce", ~whole * reduced * calls, part))
    moved = Op("copies", "data parallel", "S", 0.0, copies, 0)
    return [*sent, moved, *_optimizer(holds, owned, summed)]


def unhidden(job: Job, layout: Layout) -> list[Op]:
    """What FSDP sends while nothing is computed. In each microbatch the embedding and the first layer are
    gathered first (PyTorch's notes on FSDP: "the 1st all-gather will not be able to overlap with anything").
    Where gradients are reduced, theirs are the last. The list of `synchronisation` contains these too.
    """
    holds, (first, _) = job.framework.holds, job.model.kinds[0]
    embedding = job.model.vocab * job.model.hidden / (layout.tp if holds.split_vocabulary else 1)
    in_layer = job.lora.weight_bytes if job.lora else holds.number_bytes
    experts = [("eshard" if layout.hybrid else "edp", expert_share(first, layout), 0)] * bool(first.experts)
    held = [("shard" if layout.hybrid else "dp", layer_share(first, layout.tp), embedding), *experts]
    ops = []
    for over, layer_, beside in held:
        gathered = in_layer * layer_ + holds.number_bytes * beside
        reduced = job.framework.sent_bytes * (layer_ + beside) * (job.lora is None)
        ops += [
            sending("first gather", over, "F", "all_gather", 1, gathered),
            sending("last scatter", over, "I", "reduce_scatter", 1, reduced),
        ]
    return ops


def _optimizer(holds: Holds, owned, summed) -> list[Op]:
    """The optimizer's step for `owned` parameters, in bytes through memory. Gradients are in float32, or
    copied to it. They are read for their norm, read and written for clipping, and read by Adam, which reads
    and writes master copy, m and v. Weights are copied from the master copy, if there is one. The gradients
    of `summed` parameters are set to 0. (Megatron-Core's distrib_optimizer.py, clip_grads.py and
    zero_grad_buffer; PyTorch's clip_grad_norm_.)

    With offload, gradients and weights pass the link to the host. In the host's memory Adam reads gradients,
    reads and writes master copy, m and v, and writes weights.
    """
    g, w, state = holds.gradient_bytes, holds.weight_bytes, holds.state_bytes
    weights = 2 * 4 if w == 4 else 4 + w
    if holds.offload:
        step = Op("optimizer", "optimizer", "S", 0.0, owned * (g + 2 * state + w), 0, memory="host")
        return [step, step._replace(streamed=owned * (g + 2), memory="link")]
    moved = owned * ((g < 4) * (g + 4) + 4 + 8 + 4 + 2 * state + weights) + g * summed
    return [Op("optimizer", "optimizer", "S", 0.0, moved, 0)]
