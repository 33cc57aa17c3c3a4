"""What a rank does once a step for data parallelism and the optimizer: further lines of `operations`.

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
    """Parameters of the adapters on one rank of a pipeline stage; 0 if nothing is frozen."""
    if not job.lora:
        return 0.0
    kinds = kinds_on_rank(job.model, layout, stage)
    return sum(many * sum(op.adapters for op in layer(job, layout, kind)) for kind, many in kinds)


def synchronisation(job: Job, layout: Layout, stage=0) -> list[Op]:
    """Data parallelism and the optimizer on a rank of a pipeline stage, for a whole step.

    Without ZeRO, gradients are all-reduced once. With ZeRO-1 each gradient is sent to its owner, and weights
    are gathered after the optimizer. ZeRO-2 has no memory for sums and reduces in every microbatch. So does
    ZeRO-3; it gathers each layer for every forward and every backward, the rest (embedding, head) once for
    both, and copies all of it into and out of buffers. In a pipeline it gathers once and reduces once, as
    torchtitan does. For experts the same is done along their own replicas (edp). Frozen weights are only
    gathered.
    """
    model, holds = job.model, job.framework.holds
    kinds = kinds_on_rank(model, layout, stage)
    count = layers_on_rank(model, layout, stage)
    layers = sum(many * layer_share(kind, layout.tp) for kind, many in kinds)
    rest = ends_share(model, layout, stage, holds.split_vocabulary)
    adapters = adapter_share(job, layout, stage)
    ops = _shared_out(job, layout, "dp", layers + adapters, rest, count, adapters)
    if model.experts:
        many = sum(many for kind, many in kinds if kind.experts)
        routed = sum(many * expert_share(kind, layout) for kind, many in kinds)
        ops += _shared_out(job, layout, "edp", routed, 0, many, 0.0)
    if job.lora:
        # One of an adapter's two matrices is whole on each tensor-parallel rank, and each rank computes a
        # part of its gradient: W + S/t parameters on t ranks, W + S on one.
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
    # FSDP sums them before the cast, unless it keeps a sum over microbatches, as in a pipeline.
    summed = (np.asarray(layout.pp) > 1) & (np.asarray(layout.zero) == 3)
    number = np.where(summed, holds.gradient_bytes, holds.number_bytes)
    # With sequence parallelism each rank has computed with a part of the tokens only.
    calls, size = layout.sequence_parallel * norms, number * model.hidden
    return [*ops, sending("gradients of norms", "tp", "S", "all_reduce", calls, size)]


def _shared_out(job: Job, layout: Layout, axis: str, layers, rest, count, adapters) -> list[Op]:
    """What is sent for the parameters that the members of one axis hold: in `count` layers, and outside them.
    adapters: the trained ones among them, if the rest is frozen.

    With a shard smaller than dp, ZeRO's state is sharded over so many ranks (axis shard; eshard for experts),
    and gradients are then summed over the groups (replicate, ereplicate), as in HSDP.
    """
    holds, sends, z = job.framework.holds, job.framework.sends, np.asarray(layout.zero)
    n, g = holds.number_bytes, holds.gradient_bytes
    m, piped = job.microbatches(layout), np.asarray(layout.pp) > 1
    own_call = (axis == "dp") * 1  # parameters outside the layers have a call of their own
    frozen = job.lora is not None
    held, mine = layers + rest, adapters if frozen else layers + rest
    in_layer = job.lora.weight_bytes if job.lora else n  # bytes of a gathered weight
    over, across = {"dp": ("shard", "replicate"), "edp": ("eshard", "ereplicate")}[axis]
    over = over if layout.hybrid else axis
    reduced = np.where(sends.reduces_each & ((z == 2) | (z == 3) & ~piped), m, 1)  # times in a step
    whole = (z == 0) | (sends.reduces_whole & (z < 3))
    updated, sharded = (z == 1) | (z == 2), z == 3
    of_layer, of_rest = np.where(piped, 1, 2 * m), np.where(piped, 1, m)  # gathers
    # Bytes of copies into and out of communication buffers: a gather reads and writes a weight, 2 each; a
    # reduction reads a gradient, 2, and writes it, g.
    weight = job.lora.weight_bytes if job.lora else 2
    copies = sharded * (held * of_layer * 2 * weight + mine * reduced * (2 + g))
    if holds.weight_bytes == 4 and not frozen:
        # Before each gather a rank casts its own float32 part, and on one rank all of it (PyTorch 2.13's
        # FSDPParam.all_gather_inputs and FSDPParamGroup.wait_for_unshard): 4 bytes read, 2 written.
        copies = copies + sharded * of_layer * (4 + n) * held / layout.members(over)
    owned = mine / np.where(z >= 1, layout.members(over), 1)
    summed = np.where(z >= 2, owned, mine) * ~sharded  # gradients that are kept from step to step
    # Tensors in one call: those of a layer, as the mean over the layers.
    calls, gathers = count + own_call, np.maximum(of_layer * count + of_rest * own_call, 1)
    of_call = mine / np.maximum(calls, 1)
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
    return [*sent, Op("copies", "data parallel", "S", 0.0, copies, 0), *_optimizer(holds, owned, summed)]


def unhidden(job: Job, layout: Layout) -> list[Op]:
    """What FSDP sends in each microbatch before anything is computed, and after all is: the embedding and
    the first layer are gathered, and their gradients reduced (PyTorch's notes on FSDP: "the 1st all-gather
    will not be able to overlap with anything"). They are a part of what `synchronisation` lists.
    """
    holds, (first, _) = job.framework.holds, job.model.kinds[0]
    embedding = job.model.vocab * job.model.hidden / (layout.tp if holds.split_vocabulary else 1)
    in_layer = job.lora.weight_bytes if job.lora else holds.number_bytes
    experts = [("eshard" if layout.hybrid else "edp", expert_share(first, layout), 0)] * bool(first.experts)
    held = [("shard" if layout.hybrid else "dp", layer_share(first, layout.tp), embedding), *experts]
    ops = []
    for over, layer_, beside in held:
        gathered = in_layer * layer_ + holds.number_bytes * beside
        reduced = holds.gradient_bytes * (layer_ + beside) * (job.lora is None)
        ops += [
            sending("first gather", over, "F", "all_gather", 1, gathered),
            sending("last scatter", over, "I", "reduce_scatter", 1, reduced),
        ]
    return ops


def _optimizer(holds: Holds, owned, held) -> list[Op]:
    """What is done with the gradients of `owned` parameters, in bytes through memory. In float32 (in a copy
    if they have another type) they are read for their norm, read and written for clipping, and read by Adam,
    which reads and writes master copy, m and v. Weights are copied from the master copy, if there is one. The
    sums of `held` parameters are set to 0. (Megatron-Core's distrib_optimizer.py, clip_grads.py and
    zero_grad_buffer; PyTorch's clip_grad_norm_.)

    With offload to the host: gradients are copied there, Adam reads them as above, and weights are copied
    back.
    """
    g, w, state = holds.gradient_bytes, holds.weight_bytes, holds.state_bytes
    weights = 2 * 4 if w == 4 else 4 + w
    if holds.offload:
        step = Op("optimizer", "optimizer", "S", 0.0, owned * (g + 2 * state + w), 0, memory="host")
        return [step, step._replace(streamed=owned * (g + 2), memory="link")]
    moved = owned * ((g < 4) * (g + 4) + 4 + 8 + 4 + 2 * state + weights) + g * held
    return [Op("optimizer", "optimizer", "S", 0.0, moved, 0)]
