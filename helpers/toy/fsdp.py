"""FSDP in time: ZeRO-3 as a list that says when each layer's weights are gathered, used and freed.

    gather i    begin an all-gather of layer i's weights
    F i, B i    wait for the weights; run the layer forward, backward
    free i      free the whole weights; this rank's shard stays
    reduce i    begin a reduce-scatter of layer i's gradients; at its end the whole gradients are freed

A step is a list of these, an *order*, the same on every rank: `fsdp_order` makes PyTorch's order, `run_order`
runs any order. Weights are cut over the group `shard`. With a second group, `replicate`, whose ranks hold the
same shard, the gradients' shards are also all-reduced over it (HSDP, hybrid sharding). After Zhao et al.
2023; PyTorch's `fully_shard` runs such an order from hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .model import loss_of
from .names import all_gather, reduce_scatter
from .zero import Unit, trainable


class Layer(Unit):
    """A module whose shard stays, and whose whole weights are in memory from `gather` to `free`; they can be
    used after `arrive`. Every method but `gather` may wait for a transfer.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], shard=None, replicate=None):
        super().__init__(parameters, shard)
        self.module, self.replicate = module, replicate
        self.copies = dist.get_world_size(replicate) if replicate else 1  # number of ranks with this shard
        self.arriving = self.reducing = None  # a Work: of the all-gather, of the reduction
        self.gradients = self.mine = None  # a tensor: whole gradients, and this rank's shard of their sum
        # From here on the parameters are views of `whole`, which is empty until the first `gather`.
        self.whole = self.shard.data.new_empty(self.shard_size * self.size)
        vector_to_parameters(self.whole[: self.n], parameters)
        self.free()

    @property
    def bytes_whole(self) -> int:
        """Bytes that are allocated for the whole weights: 0 after `free`."""
        return self.whole.untyped_storage().nbytes()

    def gather(self) -> None:
        """Start the all-gather of the shards, unless the whole weights are in memory."""
        if not self.bytes_whole:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            self.arriving = all_gather(self.whole, self.shard.data, group=self.group, async_op=True)

    def arrive(self) -> None:
        """Wait for the all-gather. Raises RuntimeError if `gather` was not called since the last `free`."""
        if not self.bytes_whole:
            raise RuntimeError(
                "weights are not gathered: gather them before F and before B, and after each free"
            )
        self.arriving.wait()

    def free(self) -> None:
        """Free the memory of the whole weights. Tensors that autograd saved are in the same memory, and valid
        again after the next `gather`.
        """
        if self.arriving:
            self.arriving.wait()
        self.whole.untyped_storage().resize_(0)

    def reduce(self) -> None:
        """Begin a reduce-scatter of the whole gradients, and remove them from the parameters."""
        self.finish()  # the reduce-scatter of the microbatch before
        self.gradients = self._fill(parameters_to_vector([p.grad for p in self.parameters]))
        self.module.zero_grad()
        self.mine = torch.empty_like(self.shard.data)
        self.reducing = reduce_scatter(self.mine, self.gradients, group=self.group, async_op=True)

    def replicas(self) -> None:
        """Wait for the reduce-scatter, if one runs; with `replicate` begin an all-reduce of the result."""
        if self.gradients is not None:
            self.reducing.wait()
            self.gradients = None
            if self.replicate:
                self.reducing = dist.all_reduce(self.mine, group=self.replicate, async_op=True)

    def finish(self) -> None:
        """Wait for the transfers of gradients, and add the ranks' mean to shard.grad."""
        self.replicas()
        if self.mine is not None:
            self.reducing.wait()
            mean = self.mine / (self.size * self.copies)
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        self.mine = None


def shard_layers(model: nn.Sequential, shard=None, replicate=None) -> list[Layer]:
    """The model's parts as layers, cut over the group `shard`. Raises ValueError if two share weights."""
    return [Layer(*part, shard, replicate) for part in zip(model, trainable(model))]


def fsdp_order(n: int, m: int = 1, prefetch: int = 1, reshard: bool = True, hold: bool = False):
    """One step of n layers and m microbatches, as a list of (what, layer, microbatch). prefetch: how many
    layers after the running one are gathered already. reshard: whether weights are freed after forward and
    gathered again for backward (`reshard_after_forward`). hold: whether weights stay whole from a
    microbatch's backward to the next forward, and gradients until the last microbatch, where each layer's
    are reduced once (`set_reshard_after_backward`, `set_requires_gradient_sync`: both False).
    """
    order, whole = [], set()

    def gather(layers: range, k: int) -> None:
        order.extend(("gather", i, k) for i in layers if i not in whole)
        whole.update(layers)

    for k in range(m):
        for i in range(n):
            gather(range(i, min(i + prefetch + 1, n)), k)
            order.append(("F", i, k))
            if reshard:
                order += [("free", i, k)]
                whole.remove(i)
        for i in reversed(range(n)):
            gather(range(i, max(i - prefetch, 0) - 1, -1), k)
            order.append(("B", i, k))
            if k == m - 1 or not hold:
                order += [("free", i, k), ("reduce", i, k)]
                whole.remove(i)
    return order


def run_order(layers: list[Layer], order, tokens, targets, around: Callable = lambda *_: nullcontext()):
    """The forward and backward of `model.twin_step` on sharded layers, for this rank's tokens (b, s). Returns
    their loss; the ranks' mean gradients are in each shard.grad. around(what, number of the layer,
    microbatch): a context in which each line of the order runs without the waits before it, to time it or to
    slow it down. Raises RuntimeError for weights that are not gathered, ValueError if the
    microbatches do not divide the sequences.
    """
    if len(tokens) % (m := 1 + max(k for *_, k in order)):
        raise ValueError(f"{len(tokens)} sequences do not divide by {m} microbatches")
    parts, kept, upstream = list(zip(tokens.chunk(m), targets.chunk(m))), {}, {}
    loss, last = 0.0, None  # last: the layer of the latest reduce
    for what, i, k in order:
        layer = layers[i]
        if what in "FB":
            layer.arrive()
        if what == "reduce" and last:
            last.replicas()  # one reduce-scatter at a time, as in PyTorch
        with around(what, i, k):
            if what == "F":  # each layer has a graph of its own
                x = kept[i - 1, k][1].detach().requires_grad_() if i else parts[k][0]
                kept[i, k] = x, layer.module(x)
            elif what == "B":
                x, y = kept.pop((i, k))
                if i == len(layers) - 1:
                    y = loss_of(y, parts[k][1]) / m
                    loss += y.item()
                y.backward(upstream.pop((i, k), None))
                upstream[i - 1, k] = x.grad
            else:
                getattr(layer, what)()
            last = layer if what == "reduce" else last
    for layer in layers:
        layer.finish()
    return loss
