"""Context parallelism: every rank holds some tokens of every sequence, in all layers, and the whole model.

Norms, MLPs and the head work on each token alone. In attention a query needs the keys of other ranks too:

              forward                                backward
    gather    all-gather of K and V                  reduce-scatter of their gradients
    ring      K and V go round, c-1 hops             K and V go round again, their gradients c hops
    exchange  all-to-all: tokens for heads, then     the same, mirrored
              heads for tokens

c is the size of context parallelism, g the number of key/value heads, each for a/g query heads. q is
(b, a, s/c, h/a), k and v are (b, g, s/c, h/a), and places[r], (s/c,), are the positions of rank r's tokens.
The gather is Llama 3's (Grattafiori et al. 2024), the ring is of Liu et al. 2023, the exchange of Jacobs et
al. 2023 (DeepSpeed-Ulysses).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .tensor import conjugate, gather_sequence


def contiguous(s: int, c: int) -> list[torch.Tensor]:
    """The positions of each rank's tokens, in order: rank 0 has the first s/c."""
    return list(torch.arange(s).chunk(c))


def zigzag(s: int, c: int) -> list[torch.Tensor]:
    """The positions of each rank's tokens: of 2c chunks, rank r has chunk r counted from the front and chunk
    r counted from the end.
    """
    chunks = torch.arange(s).chunk(2 * c)
    return [torch.cat([chunks[r], chunks[2 * c - 1 - r]]) for r in range(c)]


def sees(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The causal mask, (mine, theirs): whether a token at a position of mine may attend to one of theirs."""
    return mine[:, None] >= theirs


def attend(q, k, v, mask):
    """(y, lse): softmax(q·kᵀ / √(h/a)) · v over the keys that the mask allows, and the log of the softmax's
    sum, (b, a, s/c, 1). For a query that may attend to no key, y = 0 and lse = -∞.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse.nan_to_num(neginf=0)).exp() @ v, lse


def merge(y1, lse1, y2, lse2):
    """What `attend` would return for two sets of keys together. Of a query's lse at least one is finite."""
    lse = torch.logaddexp(lse1, lse2)
    return y1 * (lse1 - lse).exp() + y2 * (lse2 - lse).exp(), lse


def attend_backward(dy, y, q, k, v, mask, lse):
    """(dq, dk, dv) for one part of the keys. y and lse are the results of attention over all keys."""
    shared = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    p = ((q @ wide_k.mT * scale).masked_fill(~mask, -torch.inf) - lse).exp()
    ds = p * (dy @ wide_v.mT - (dy * y).sum(-1, keepdim=True)) * scale
    dk, dv = (x.unflatten(1, (-1, shared)).sum(2) for x in (ds.mT @ q, p.mT @ dy))
    return ds @ wide_k, dk, dv


def gather_attention(q, k, v, places, group=None, attend=attend):
    """Every rank gathers all of K and V. attend: computes attention; a caller may wrap it, to time it."""
    k, v = (gather_sequence(x.transpose(1, 2), group).transpose(1, 2) for x in (k, v))
    return attend(q, k, v, sees(places[dist.get_rank(group)], torch.cat(places)))[0]


def _pass_on(tensors, group):
    """Start to send to the next rank and to receive from the previous one. Returns a function that waits."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    going = torch.stack(tensors)
    coming = torch.empty_like(going)
    sent = dist.isend(going, group=group, group_dst=(rank + 1) % size)
    received = dist.irecv(coming, group=group, group_src=(rank - 1) % size)
    return lambda: (sent.wait(), received.wait(), coming.unbind())[-1]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, places, group, attend):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        held, y, lse = (k, v), None, None
        for hop in range(size):
            wait_kv = _pass_on(held, group) if hop < size - 1 else None  # sent while this rank computes
            mask = sees(places[rank], places[rank - hop])  # these keys belong to the rank `hop` places before
            if mask.any():
                part = attend(q, *held, mask)
                y, lse = part if y is None else merge(y, lse, *part)
            held = wait_kv() if wait_kv else None
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.places, ctx.group = places, group
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, lse = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        held, dq, wait_sums = (k, v), torch.zeros_like(q), lambda: (torch.zeros_like(k), torch.zeros_like(v))
        for hop in range(size):
            wait_kv = _pass_on(held, ctx.group) if hop < size - 1 else None
            sums = wait_sums()  # the gradients of these keys and values that the previous ranks have added up
            mask = sees(ctx.places[rank], ctx.places[rank - hop])
            if mask.any():
                more, *of_held = attend_backward(dy, y, q, *held, mask, lse)
                dq, sums = dq + more, [a + b for a, b in zip(sums, of_held)]
            wait_sums = _pass_on(sums, ctx.group)
            held = wait_kv() if wait_kv else None
        return dq, *wait_sums(), None, None, None


def ring_attention(q, k, v, places, group=None, attend=attend):
    """K and V go round the ring. At each hop a rank attends to the keys that it holds, and merges."""
    return _Ring.apply(q, k, v, places, group, attend)


def _swap(x, cut, join, group):
    going = torch.stack(x.chunk(dist.get_world_size(group), dim=cut))
    dist.all_to_all_single(coming := torch.empty_like(going), going, group=group)
    return torch.cat(coming.unbind(), dim=join)


# (b, a, s/c, h/a), all heads of my tokens <-> (b, a/c, s, h/a), all tokens, in the ranks' order, of my heads
exchange = conjugate(lambda x, group: _swap(x, 1, 2, group), lambda x, group: _swap(x, 2, 1, group))
exchange_back = conjugate(lambda x, group: _swap(x, 2, 1, group), lambda x, group: _swap(x, 1, 2, group))


def exchange_attention(q, k, v, places, group=None, attend=attend):
    """Every rank gets all tokens of its heads. If there are fewer heads of k and v than ranks, they are
    repeated. Raises ValueError if the ranks do not divide the heads of q.
    """
    c, order = dist.get_world_size(group), torch.cat(places)
    if q.shape[1] % c:
        raise ValueError(f"{q.shape[1]} heads do not divide by {c} ranks; gather, or go round")
    k, v = (x.repeat_interleave(max(1, c // x.shape[1]), 1) for x in (k, v))
    q, k, v = (exchange(x, group) for x in (q, k, v))
    return exchange_back(attend(q, k, v, sees(order, order))[0], group)


def context_block(block, x, mask, group=None):
    """A block on this rank's tokens, x (b, s/c, h), with the gather. mask: (s/c, s), the result of `sees`."""
    part, z = block.attention, block.norm1(x)
    heads = lambda y: y.unflatten(-1, (-1, part.head_size)).transpose(1, 2)  # (b, a, tokens, h/a)
    k, v = (gather_sequence(y, group) for y in (part.k(z), part.v(z)))
    y, _ = attend(heads(part.q(z)), heads(k), heads(v), mask)
    x = x + part.out(y.transpose(1, 2).flatten(2))
    return x + block.mlp(block.norm2(x))
