"""All three axes at once: d·p·t ranks on a grid. Each rank is in one group along every axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .data import average_gradients, my_share, share_weights
from .model import ToyTransformer
from .pipeline import run_schedule, split_depth
from .tensor import split_width, sum_norm_gradients


def grid_groups(d: int, p: int, t: int, order: Sequence[str] = ("pp", "dp", "tp")) -> DeviceMesh:
    """The world as a grid. order: the axes from the outermost to the innermost. By default tp is innermost,
    so its groups are neighbouring ranks: rank = (j·d + i)·t + k for the coordinates j along pp, i along dp, k
    along tp.

    `grid["tp"].get_group()` is this rank's group along tp. Raises ValueError unless d·p·t is the number of
    ranks.
    """
    if d * p * t != dist.get_world_size():
        raise ValueError(f"d·p·t = {d}·{p}·{t} = {d * p * t}, but there are {dist.get_world_size()} ranks")
    sizes = {"dp": d, "pp": p, "tp": t}
    return init_device_mesh("cpu", tuple(sizes[axis] for axis in order), mesh_dim_names=tuple(order))


def on_grid(model: ToyTransformer, grid: DeviceMesh, sequence: bool = False) -> nn.Sequential:
    """This rank's part of the model: rank 0's weights, cut in width along tp, then in depth along pp."""
    share_weights(model)
    return split_depth(split_width(model, grid["tp"].get_group(), sequence), grid["pp"].get_group())


def grid_step(stage: nn.Sequential, tokens, targets, ops: Iterable, m: int, grid: DeviceMesh) -> float | None:
    """`twin_step` on the grid: the batch over dp, m microbatches down pp by `ops`, every matrix over tp.

    ops: this pipeline rank's operations in order. Returns, on the last stage, the loss of this rank's share
    of the batch; else None. Raises ValueError if the batch does not divide by d·m.
    """
    dp, pp = grid["dp"].get_group(), grid["pp"].get_group()
    d, p = dist.get_world_size(dp), dist.get_world_size(pp)
    if len(tokens) % (d * m):
        raise ValueError(
            f"a batch of {len(tokens)} does not divide by d·m = {d}·{m} = {d * m}; take a multiple of {d * m}"
        )
    mine = [my_share(whole, dist.get_rank(dp), d).chunk(m) for whole in (tokens, targets)]
    loss = run_schedule({dist.get_rank(pp): stage}, ops, list(range(p)), *mine, group=pp)
    if stage.token_parts > 1:
        sum_norm_gradients(stage, grid["tp"].get_group())
    average_gradients(stage, dp)
    return loss
