"""Data parallelism: every rank holds the model, and works on its share of the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .model import loss_of


def share_weights(model: nn.Module, group=None) -> None:
    """Give every rank the weights of rank 0."""
    for p in model.parameters():
        dist.broadcast(p.data, group_src=0, group=group or dist.group.WORLD)


def my_share(tensor, rank: int, size: int):
    """The rows of `tensor` for `rank` of `size` ranks. If the rows do not divide, some of the first ranks
    have one row more.
    """
    return torch.tensor_split(tensor, size)[rank]


def average_gradients(model: nn.Module, group=None) -> None:
    """Replace each gradient by the ranks' mean: one all-reduce of all of them end to end, then a division."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat, group=group)
    vector_to_parameters(flat / dist.get_world_size(group), gradients)


def data_parallel_step(model: nn.Module, tokens, targets, group=None, average=average_gradients) -> float:
    """`twin_step` of model.py, with the batch split over the ranks of `group`. Returns this rank's loss.

    average(model, group): is called after backward, to replace the gradients by the ranks' mean.
    The mean of the ranks' losses is the loss of `twin_step`. Raises ValueError if the batch does not divide
    by the ranks: with unequal shares the mean would be another loss.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if len(tokens) % size:
        raise ValueError(
            f"a batch of {len(tokens)} does not divide by {size} ranks; take a multiple of {size}"
        )
    loss = loss_of(model(my_share(tokens, rank, size)), my_share(targets, rank, size))
    loss.backward()
    average(model, group)
    return loss.item()


def overlap_gradients(model: nn.Module, bucket: float = 1e6, group=None) -> Callable[..., None]:
    """Send gradients while backward still runs: as soon as `bucket` bytes of them are computed, start their
    all-reduce.

    Backward computes the last layer's gradients first, so their all-reduce runs during the backward of the
    layers before it. Returns finish(), to be called after backward and before the optimizer: it sends the
    rest, waits for all, and writes the means into the gradients. All ranks run the same backward, so they
    start the same all-reduces in the same order.
    """
    size = dist.get_world_size(group)
    ready: list[nn.Parameter] = []
    under_way: list[tuple] = []

    def send() -> None:
        flat = parameters_to_vector([p.grad for p in ready])
        under_way.append((dist.all_reduce(flat, group=group, async_op=True), flat, list(ready)))
        ready.clear()

    def gradient_is_there(p: nn.Parameter) -> None:
        ready.append(p)
        if sum(q.grad.nbytes for q in ready) >= bucket:
            send()

    def finish(*_) -> None:
        if ready:
            send()
        for work, flat, parameters in under_way:
            work.wait()
            vector_to_parameters(flat / size, [p.grad for p in parameters])
        under_way.clear()

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(gradient_is_there)
    return finish
