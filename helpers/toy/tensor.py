"""Tensor parallelism cuts every matrix of a block over the ranks: in attention and in the MLP a column cut
and the row cut after it are a pair. Sequence parallelism cuts the activations between the pairs.

Each row is a function. Two rows belong together: the forward of the first is the backward of the second.

                      forward         backward
    copy_to_tp        nothing         all-reduce      called f in Megatron-LM's paper (Shoeybi et al. 2019)
    reduce_from_tp    all-reduce      nothing         called g there
    gather_sequence   all-gather      reduce-scatter  called g by Korthikanti et al. 2022
    scatter_sequence  reduce-scatter  all-gather      called ḡ there
    share_sequence    take my part    all-gather      where sequence parallelism begins
    whole_sequence    all-gather      take my part    where sequence parallelism ends
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .model import Block, ToyTransformer, twin_step
from .names import reduce_scatter


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group):
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def copy_to_tp(x, group=None):
    """Before a column cut. Forward: x unchanged, of any shape. Backward: the sum of dx over the ranks of the
    group. In Megatron-LM it is f (Shoeybi et al. 2019, figure 3), copy_to_tensor_model_parallel_region in the
    code.
    """
    return _CopyToTP.apply(x, group)


def reduce_from_tp(y, group=None):
    """After a row cut. Forward: the sum of the partial y over the ranks of the group, of the same shape.
    Backward: dy unchanged. In Megatron-LM it is g, reduce_from_tensor_model_parallel_region in the code.
    """
    return _ReduceFromTP.apply(y, group)


# -- sequence parallelism: between the pairs a rank holds b·(s/t)·h numbers, not b·s·h ---------


def gather_tokens(x, group=None):
    """(b, s/t, h) of each rank -> (b, s, h) on all."""
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def sum_tokens(y, group=None):
    """(b, s, h), a partial sum on each rank -> (b, s/t, h), this rank's tokens of the sum."""
    parts = torch.stack(y.chunk(dist.get_world_size(group), dim=1))  # (t, b, s/t, h)
    mine = torch.empty_like(parts[0])
    reduce_scatter(mine, parts.flatten(0, 1), group=group)
    return mine


def my_tokens(x, group=None):
    """(b, s, h) -> (b, s/t, h): this rank's tokens."""
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def conjugate(forward, backward):
    """A function (x, group) -> y for autograd, from a function for its forward and one for its backward, both
    (x, group) -> y.
    """

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, dy):
            return backward(dy, ctx.group), None

    return lambda x, group=None: Pair.apply(x, group)


gather_sequence = conjugate(gather_tokens, sum_tokens)  # before a pair: every rank needs all tokens
scatter_sequence = conjugate(sum_tokens, gather_tokens)  # after a pair: add the partial sums, keep my tokens
share_sequence = conjugate(my_tokens, gather_tokens)  # where all ranks hold the same x: keep my tokens
# At the end of sequence parallelism, where all ranks continue with the same x: fetch all tokens.
whole_sequence = conjugate(gather_tokens, my_tokens)


# -- the split model -------------------------------------------------------------------------


def split_width(model: ToyTransformer, group=None, sequence: bool = False) -> ToyTransformer:
    """Keep this rank's columns of q, k, v, up and rows of out, down. The model is changed in place and
    returned.

    With a column cut, each rank's output is a part of the vector, and the row cut that follows needs only
    that part as input. So a pair of matrices needs one sum over ranks in forward, at its end, and one in
    backward, at its start. sequence: whether each rank holds only its tokens between the pairs (s must divide
    by the ranks); then call `sum_norm_gradients` after backward. Raises ValueError if the group's size does
    not divide the heads.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if model.heads % size:
        raise ValueError(
            f"{model.heads} heads do not divide by {size} ranks; "
            f"use a number of ranks that divides {model.heads}, or more heads"
        )
    before, after = (gather_sequence, scatter_sequence) if sequence else (copy_to_tp, reduce_from_tp)
    for block in model.blocks:
        for part, columns, rows in (
            (block.attention, ("q", "k", "v"), ("out",)),
            (block.mlp, ("up",), ("down",)),
        ):
            for name in columns:
                _keep(getattr(part, name), rank, size, dim=0)  # nn.Linear stores its matrix transposed
            for name in rows:
                _keep(getattr(part, name), rank, size, dim=1)
            part.register_forward_pre_hook(lambda _, args: (before(args[0], group),))
            part.register_forward_hook(lambda _, args, y: after(y, group))
    if sequence:
        model.token_parts = size
        model.blocks[0].register_forward_pre_hook(lambda _, args: (share_sequence(args[0], group),))
        model.blocks[-1].register_forward_hook(lambda _, args, y: whole_sequence(y, group))
    return model


def _keep(linear: nn.Linear, rank: int, size: int, dim: int) -> None:
    linear.weight = nn.Parameter(
        linear.weight.data.chunk(size, dim)[rank].clone(), requires_grad=linear.weight.requires_grad
    )


tensor_parallel_step = twin_step  # every rank sees the whole batch and ends with the whole loss


def sum_norm_gradients(model: nn.Module, group=None) -> None:
    """Sum the gradients of the blocks' norms over the ranks, once a step: under sequence parallelism each
    rank applies these norms to its own tokens only.
    """
    norms = [
        norm for block in model.modules() if isinstance(block, Block) for norm in (block.norm1, block.norm2)
    ]
    gradients = [p.grad for norm in norms for p in norm.parameters() if p.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat, group=group)
    vector_to_parameters(flat, gradients)
