"""The model that `trace` runs: a plain PyTorch transformer of any `ModelShape`, and its split by DTensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from ..plan.models import ModelShape
from .tensor_plan import merged_plan, usual_plan


class Fused(torch.autograd.Function):
    """Has the shapes of a fused attention, which keeps q, k, v, y and a float32 for each token and head,
    never the scores.

    A trace runs on the CPU, so that it needs no GPU. There PyTorch's own attention stores the scores if
    queries are grouped.
    """

    @staticmethod
    def forward(ctx, q, k, v):
        """q, k, v: (b, heads, s, head size); k and v may have fewer heads. Returns a tensor of q's shape."""
        y = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx, dy):
        """Tensors of the shapes of q, k and v."""
        q, k, v, *_ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class FusedNorm(torch.autograd.Function):
    """Has the shapes of RMSNorm in one kernel, which keeps its input. PyTorch's on a CPU keeps float32
    copies.
    """

    @staticmethod
    def forward(ctx, x, weight):
        """x: (b, s, h). weight: (h,)."""
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        """Gradients of the shapes of x and of the weight."""
        x, weight = ctx.saved_tensors
        return dy * weight, (dy * x).sum((0, 1))


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm, computed by `FusedNorm`."""

    def forward(self, x):
        """(b, s, h) -> the same."""
        return FusedNorm.apply(x, self.weight)


def _norm(shape: ModelShape) -> nn.Module:
    return RMSNorm(shape.hidden) if shape.gated else nn.LayerNorm(shape.hidden)


class TracedAttention(nn.Module):
    """Causal attention with grouped queries: g heads of keys and values for a heads of queries."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.size, qkv = shape.head_dim, shape.biases or shape.qkv_biases
        self.q = nn.Linear(shape.hidden, shape.q_width, bias=qkv)
        self.k = nn.Linear(shape.hidden, shape.kv_width, bias=qkv)
        self.v = nn.Linear(shape.hidden, shape.kv_width, bias=qkv)
        self.out = nn.Linear(shape.q_width, shape.hidden, bias=shape.biases)

    def forward(self, x, turn):
        """x: (b, s, h). turn: cosines and sines of rotary positions, each (s, head size / 2), or None."""
        q, k, v = (m(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if turn is not None:
            q, k = _rotate(q, *turn), _rotate(k, *turn)
        return self.out(Fused.apply(q, k, v).transpose(1, 2).flatten(2))


def _rotate(x, cos, sin):
    """Turn each pair of a head's numbers by an angle that grows with the position (rotary positions)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class FeedForward(nn.Module):
    """Two matrices around a GELU, or three, one of which gates (SwiGLU)."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.biases)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=shape.biases) if shape.gated else None
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.biases)

    def forward(self, x):
        """(b, s, h) -> the same."""
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class _Layer(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.norm1, self.attention = _norm(shape), TracedAttention(shape)
        self.norm2, self.mlp = _norm(shape), FeedForward(shape)

    def forward(self, x, turn):
        x = x + self.attention(self.norm1(x), turn=turn)  # by name: DTensor's plan is for x alone
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A transformer with exactly `shape.params` parameters, if `first` is None. recompute: whether to keep
    only each layer's input, and run the layer again in backward. first: have only the embedding and so many
    layers, as the first stage of a pipeline.
    """

    def __init__(self, shape: ModelShape, recompute: bool = False, first: int | None = None):
        super().__init__()
        self.token = nn.Embedding(shape.vocab, shape.hidden)
        self.position = nn.Embedding(shape.positions, shape.hidden) if shape.positions else None
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(first or shape.layers))
        self.norm, self.head = None, None
        if first is None:
            self.norm, self.head = _norm(shape), nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied and self.head is not None:
            self.head.weight = self.token.weight
        self.half_head, self.recompute = shape.head_dim // 2, recompute

    def forward(self, tokens):
        """Tokens (b, s) -> scores (b, s, V); on a first stage -> activations (b, s, h)."""
        x, turn = self.token(tokens), None
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1]))
        else:
            speed = 10000 ** (-torch.arange(self.half_head) / self.half_head)
            angle = torch.outer(torch.arange(tokens.shape[1]), speed)
            turn = angle.cos().bfloat16(), angle.sin().bfloat16()
        for layer in self.layers:
            x = checkpoint(layer, x, turn, use_reentrant=False) if self.recompute else layer(x, turn)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def parallelize(net: Transformer, mesh: DeviceMesh, sp: bool, plan: str) -> None:
    """Split a transformer over the ranks of `mesh`, in place. plan: see `run.trace`."""
    for layer in net.layers:
        parallelize_module(layer, mesh, usual_plan(layer) if plan == "usual" else merged_plan(layer, sp))
    if plan == "usual":
        return
    between = Shard(1) if sp else Replicate()
    ends = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sp:
        ends["norm"] = SequenceParallel()
        # The positions of this rank's tokens, of (s, h).
        ends["position"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    tied = net.head is not None and net.head.weight is net.token.weight
    here = {name: style for name, style in ends.items() if getattr(net, name) is not None}
    parallelize_module(net, mesh, here)
    if tied and net.head is not None:  # the split made two matrices; both are cut by rows, so one serves both
        net.head.weight = net.token.weight
