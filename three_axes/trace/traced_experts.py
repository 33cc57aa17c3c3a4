"""Layers of experts and latent attention for `trace`, made of PyTorch's own parts: its all-to-all with a
backward, its grouped product, FSDP2 over dp and, for experts, over their replicas (edp).

Fake tensors have no numbers, by which a router could choose experts or count their rows. So every expert gets
the same number of rows. DTensor has no plan for a grouped product under tensor parallelism, so tp is 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..plan import shape as shapes
from ..plan.shape import ModelShape
from ..pytorch_private import all_to_all_single_autograd, grouped_product
from .traced_model import FeedForward, RMSNorm, Transformer


class TracedExperts(nn.Module):
    """This rank's E/ep experts of E, with three matrices each. One kernel multiplies for all of them."""

    def __init__(self, hidden: int, e: shapes.Experts, ep: int):
        super().__init__()
        many, h, f = e.count // ep, hidden, e.ffn
        self.gate = nn.Parameter(torch.empty(many, h, f))
        self.up = nn.Parameter(torch.empty(many, h, f))
        self.down = nn.Parameter(torch.empty(many, f, h))

    def forward(self, rows):
        """rows: (rows, h), sorted by expert, with the same number for each. Returns the same shape."""
        each = rows.shape[0] // self.gate.shape[0]
        ends = torch.arange(1, self.gate.shape[0] + 1, dtype=torch.int32) * each
        inside = F.silu(grouped_product(rows, self.gate, offs=ends))
        inside = inside * grouped_product(rows, self.up, offs=ends)
        return grouped_product(inside, self.down, offs=ends)


class Routed(nn.Module):
    """A router, experts on the ranks of a group, and experts that every token passes (shared experts)."""

    def __init__(self, shape: ModelShape, e: shapes.Experts, group: ProcessGroup):
        super().__init__()
        self.router, self.k, self.group = nn.Linear(shape.hidden, e.count, bias=False), e.per_token, group
        self.experts = TracedExperts(shape.hidden, e, group.size())
        self.shared = FeedForward(replace(shape, experts=None, ffn=e.shared)) if e.shared else None

    def forward(self, x):
        """(b, s, h) -> the same. All-to-alls send rows to their experts' ranks, and back."""
        tokens = x.flatten(0, 1)
        weight, choice = self.router(tokens).softmax(-1).topk(self.k)
        order = choice.flatten().argsort(stable=True)
        part = [len(order) // self.group.size()] * self.group.size()
        rows = all_to_all_single_autograd(tokens[order // self.k], part, part, self.group)
        back = all_to_all_single_autograd(self.experts(rows).contiguous(), part, part, self.group)
        copies = torch.empty_like(back).index_copy(0, order, back).unflatten(0, (-1, self.k))
        y = (copies * weight.unsqueeze(-1)).sum(1)
        return (y if self.shared is None else y + self.shared(tokens)).view_as(x)


class Latent(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, section 2.1). Its attention has only the right shapes."""

    def __init__(self, shape: ModelShape, at: shapes.Latent):
        super().__init__()
        h, self.at, self.heads = shape.hidden, at, shape.heads
        linear = lambda k, n: nn.Linear(k, n, bias=False)
        self.q_down = linear(h, at.q_rank) if at.q_rank else None
        self.q_norm = RMSNorm(at.q_rank) if at.q_rank else None
        self.q_up = linear(at.q_rank or h, shape.q_width)
        self.kv_down, self.kv_norm = linear(h, at.kv_rank + at.rope), RMSNorm(at.kv_rank)
        self.kv_up = linear(at.kv_rank, shape.heads * (at.nope + at.values))
        self.out = linear(shape.out_width, h)

    def forward(self, x, turn):
        """(b, s, h) -> the same. turn: unused, since rotations change no shape."""
        q = self.q_up(x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x)))
        short, rope = self.kv_down(x).split([self.at.kv_rank, self.at.rope], dim=-1)
        k, v = (
            self.kv_up(self.kv_norm(short))
            .unflatten(-1, (self.heads, -1))
            .split([self.at.nope, self.at.values], dim=-1)
        )
        # The result depends on every input, as an attention's does.
        scores = q.unflatten(-1, (self.heads, -1)).sum(-1) + k.sum(-1) + rope.sum(-1, keepdim=True)
        return self.out((v * scores.unsqueeze(-1)).flatten(-2))


def with_experts(net: Transformer, shape: ModelShape, group: ProcessGroup) -> None:
    """Give a transformer its experts, spread over a group, and its latent attention, in place."""
    if e := shape.experts:  # in all layers after the dense ones, or in evenly spaced ones of these
        many, behind = shape.kinds[-1][1], shape.layers - e.dense_layers
        for k in range(1, many + 1):
            net.layers[e.dense_layers + k * behind // many - 1].mlp = Routed(shape, e, group)
    for layer in net.layers:
        if shape.latent:
            layer.attention = Latent(shape, shape.latent)


def shard_experts(net: Transformer, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP2 to the experts, over their own replicas. To be called before FSDP2 is applied to layers."""
    for layer in net.layers:
        if isinstance(layer.mlp, Routed):
            fully_shard(layer.mlp.experts, mesh=mesh, mp_policy=policy)
