"""How `helpers.train` splits the model, with PyTorch's own tools: a mesh, DTensor, FSDP2, and a stage of a
pipeline.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from three_axes.trace.tensor_plan import merged_plan

from .. import toy
from .config import Config


def mesh_of(config: Config, device: str) -> DeviceMesh:
    """The ranks as a box: tp innermost, where links are fastest, then the shards, the replicas, the
    stages.

    Shards and replicas are dp·cp ranks together, for these hold the same weights and see other tokens:
    torchtitan's mesh for FSDP has a dimension of dp_shard·cp ranks too. `context` has a group of cp alone.
    """
    mesh = init_device_mesh(
        device,
        (config.pp, config.replicas // config.shard, config.shard, config.tp),
        mesh_dim_names=("pp", "replicate", "shard", "tp"),
    )
    # A group that is made later does not take over the first one's timeout.
    for group in mesh.get_all_groups():
        group.set_timeout(timedelta(seconds=config.timeout))
    return mesh


def stage_of(config: Config, stage: int) -> nn.Sequential:
    """The parts of one pipeline stage, under the names they have in the whole model, so that checkpoints fit
    any layout.
    """
    blocks = config.layers // config.pp
    # 0 is the embedding, layers + 1 the head.
    first, last = (stage * blocks + (stage > 0), (stage + 1) * blocks + (stage == config.pp - 1))
    return nn.Sequential(
        OrderedDict(
            (name, part) for name, part in config.model().named_children() if first <= int(name) <= last
        )
    )


def tensor_parallel_plan(part: nn.Module, sp: bool) -> dict:
    """How DTensor splits one part of the model. Under sequence parallelism the embedding shares the tokens
    out, and the head fetches them.
    """
    if isinstance(part, toy.Block):
        return merged_plan(part, sp)
    if not sp:
        return {}
    if isinstance(part, toy.Embedding):
        return {"": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))}
    return {
        "": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
    }


def shard_model(stage: nn.Sequential, config: Config, mesh: DeviceMesh) -> nn.Module:
    """Split a stage over its tp ranks, then each of its blocks, and what is left, over its dp·cp ranks.

    Where each rank keeps all weights and there is nothing but data parallelism, DDP's buckets are faster
    than a group for each block. (In PyTorch 2.13 DDP takes no DTensor, it fails under a pipeline's schedules,
    and its mixed precision is not public.)
    """
    only_data = config.replicas > 1 and config.shard == config.tp == config.pp == 1
    if only_data and config.precision != "bfloat16":
        return DistributedDataParallel(stage, process_group=mesh.get_group("replicate"))
    if config.tp > 1:
        for part in stage:
            for name, how in tensor_parallel_plan(part, config.sp).items():
                parallelize_module(part.get_submodule(name), mesh["tp"], how)
    half = torch.bfloat16 if config.precision == "bfloat16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    over = mesh["replicate", "shard"] if config.shard < config.replicas else mesh["shard"]
    for part in stage:
        if isinstance(part, toy.Block):
            # In a pipeline what one microbatch has gathered stays for the others, as torchtitan has it.
            fully_shard(part, mesh=over, mp_policy=policy, reshard_after_forward=config.pp == 1)
    return fully_shard(stage, mesh=over, mp_policy=policy)


def splits_of(p: nn.Parameter) -> tuple[str, ...]:
    """The mesh dimensions that a parameter's copies and shards are spread over; () for a plain tensor."""
    return p.device_mesh.mesh_dim_names if isinstance(p, DTensor) else ()


def shards_of(p: nn.Parameter) -> int:
    """In how many parts a parameter is split."""
    if not isinstance(p, DTensor):
        return 1
    return math.prod(
        p.device_mesh.size(i) for i, place in enumerate(p.placements) if not place.is_replicate()
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def synchronizes(model: nn.Module, last: bool) -> AbstractContextManager:
    """Inside, gradients add up; they travel in the backward of the last microbatch."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return nullcontext()
