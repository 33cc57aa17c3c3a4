"""Pipeline parallelism: every rank holds some of the layers, and sends activations to the next rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from .backward import late_weights
from .model import ToyTransformer, loss_of


def stage_of(model: ToyTransformer, stage: int, stages: int) -> nn.Sequential:
    """Stage number `stage` of `stages`: its share of the blocks; the first stage also has the embedding, the
    last the head.

    Raises ValueError if `stages` does not divide the number of blocks.
    """
    blocks = model.blocks
    if len(blocks) % stages:
        raise ValueError(
            f"{len(blocks)} blocks do not divide by {stages} stages; "
            f"use a number of stages that divides {len(blocks)}"
        )
    per_stage = len(blocks) // stages
    part = nn.Sequential(*blocks[stage * per_stage : (stage + 1) * per_stage])
    if stage == 0:
        part.insert(0, model[0])
    if stage == stages - 1:
        part.append(model[-1])
    part.hidden, part.token_parts = model.hidden, model.token_parts
    # A tied matrix (the head's is the embedding's) is on two ranks now. Each computes a part of its gradient,
    # and they add up the parts.
    part.shared = model[0].token.weight if model.tied and stages > 1 and stage in (0, stages - 1) else None
    return part


def split_depth(model: ToyTransformer, group=None) -> nn.Sequential:
    """This rank's stage, when the model is split over the ranks of `group`."""
    return stage_of(model, dist.get_rank(group), dist.get_world_size(group))


def pipeline_step(stage: nn.Sequential, tokens, targets, group=None) -> float | None:
    """`twin_step` with the layers split: activations go to the next rank, gradients to the previous one.

    Returns the loss on the last rank, None on the others.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    if rank == 0:
        x = tokens
    else:
        x = torch.empty(*tokens.shape, stage.hidden, dtype=next(stage.parameters()).dtype)
        dist.recv(x, group_src=rank - 1, group=group)
        x.requires_grad_()  # so that backward computes a gradient to send
    y = stage(x)
    if rank == last:
        loss = loss_of(y, targets)
        loss.backward()
    else:
        dist.send(y.detach(), group_dst=rank + 1, group=group)
        dy = torch.empty_like(y)
        dist.recv(dy, group_src=rank + 1, group=group)
        y.backward(dy)
    if rank > 0:
        dist.send(x.grad, group_dst=rank - 1, group=group)
    sum_shared(stage, 0, last, group)
    return loss.item() if rank == last else None


def sum_shared(stage: nn.Sequential, first: int, last: int, group=None) -> None:
    """Add up the gradient of a tied matrix over the two ranks that hold it."""
    if stage.shared is None or first == last:
        return
    other = last if dist.get_rank(group) == first else first
    mine, theirs = stage.shared.grad, torch.empty_like(stage.shared.grad)
    sending = dist.isend(mine, group_dst=other, group=group)
    dist.recv(theirs, group_src=other, group=group)
    sending.wait()
    mine += theirs


# -- any schedule ----------------------------------------------------------------------------


def run_schedule(
    chunks: dict[int, nn.Module],
    ops: Iterable,
    rank_of: list[int],
    microbatches: list,
    targets: list,
    group=None,
    around: Callable[..., AbstractContextManager] = lambda op: nullcontext(),
) -> float | None:
    """One step of a pipeline by a list of operations, on the rank that holds `chunks`.

    chunks: stage number -> module. ops: this rank's operations in order, each with a kind (F forward, B
    backward, I the part of backward that finds the input's gradient, W the part that finds the weights'), a
    microbatch and a stage. rank_of[stage]: the rank of `group` that holds the stage. microbatches, targets:
    the batch cut into m equal pieces. around(op): a context in which each operation runs, to time it for
    example. Returns the mean loss on the rank of the last stage, None on the others. Gradients are those of
    the whole batch.
    """
    rank, last, m = dist.get_rank(group), len(rank_of) - 1, len(microbatches)
    kept, here, sending, later, losses = {}, {}, [], {}, []

    def pass_on(kind: str, i: int, stage: int, to: int, tensor) -> None:
        if rank_of[to] == rank:
            here[kind, i, stage] = tensor
        else:
            tag = _tag(kind, i, stage, last)
            sending.append(dist.isend(tensor, group_dst=rank_of[to], group=group, tag=tag))

    def fetch(kind: str, i: int, source: int, like) -> torch.Tensor:
        """The tensor that stage `source` made for this stage: on this rank, or received from another."""
        if rank_of[source] == rank:
            return here.pop((kind, i, source))
        buffer = torch.empty_like(like)
        dist.recv(buffer, group_src=rank_of[source], group=group, tag=_tag(kind, i, source, last))
        return buffer

    for op in ops:
        i, stage, module = op.microbatch, op.stage, chunks[op.stage]
        if op.kind == "F":
            x = microbatches[i]
            if stage > 0:
                b, s = x.shape
                like = next(module.parameters()).new_empty(b, s // module.token_parts, module.hidden)
                x = fetch("F", i, stage - 1, like).requires_grad_()
            with around(op):
                y = module(x)
                if stage == last:
                    y = loss_of(y, targets[i]) / m
                    losses.append(y.item())
            kept[i, stage] = x, y
            if stage < last:
                pass_on("F", i, stage, stage + 1, y.detach())
        elif op.kind == "W":
            with around(op):
                for job in later.pop((i, stage)):
                    job()
        else:
            x, y = kept.pop((i, stage))
            dy = fetch("B", i, stage + 1, y) if stage < last else None
            with around(op), late_weights(None if op.kind == "B" else later.setdefault((i, stage), [])):
                y.backward(dy)
                del y  # frees what autograd saved for this backward
            if stage > 0:
                pass_on("B", i, stage, stage - 1, x.grad)
    for work in sending:
        work.wait()
    for stage, module in chunks.items():
        if getattr(module, "shared", None) is not None:
            sum_shared(module, rank_of[0], rank_of[last], group)
    return sum(losses) if rank_of[last] == rank else None


def _tag(kind: str, i: int, stage: int, last: int) -> int:
    """A different tag for each message, so that none is received in place of another."""
    return (2 * i + (kind == "B")) * (last + 1) + stage
