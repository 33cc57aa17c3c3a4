"""Context parallelism: a rank has some tokens of every sequence, and its attention gathers the keys and
values of all, as Llama 3's does (Grattafiori et al. 2024, section 3.3.2).

Zig-zag: of 2·cp chunks a rank has one from the front and one from the end. A token looks at those before it,
so ranks with chunks in order would wait for the last one (see beyond, b2).
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .. import toy
from .config import Config


def places_of(config: Config) -> list[torch.Tensor]:
    """For each rank of cp the positions, (s/cp,), of its tokens."""
    if config.cp == 1:
        return [torch.arange(config.seq_len)]
    return toy.zigzag(config.seq_len, config.cp)


def context_group(config: Config) -> dist.ProcessGroup:
    """The cp ranks that share each sequence with this one: next to tp, outside it."""
    box = torch.arange(dist.get_world_size()).view(-1, config.cp, config.tp)
    mine, _ = dist.new_subgroups_by_enumeration(
        box.mT.reshape(-1, config.cp).tolist(), timedelta(seconds=config.timeout), group_desc="cp"
    )
    return mine


def split_sequence(stage: nn.Sequential, config: Config) -> None:
    """From now on a stage gets this rank's tokens, and knows where they stand. Weights stay as they are."""
    if config.cp == 1:
        return
    places, group = places_of(config), context_group(config)
    for part in stage:
        if isinstance(part, toy.Embedding):
            part.places = places[dist.get_rank(group)]
        elif isinstance(part, toy.Block):
            part.attention.attend = partial(attend, places=places, group=group)


def attend(q, k, v, places: list[torch.Tensor], group: dist.ProcessGroup):
    """Causal attention of my tokens to all: (b, a, s/cp, h/a) of q, of k and of v -> the same.

    Backward a reduce-scatter brings the gradients of keys and values home. In the text's order, each of my
    two chunks needs the keys up to its own end, so all ranks compute as many pairs.
    """
    in_order = torch.cat(places).argsort()
    k, v = (toy.gather_sequence(x.transpose(1, 2), group).transpose(1, 2)[:, :, in_order] for x in (k, v))
    parts = []
    for at, mine in zip(places[dist.get_rank(group)].chunk(2), q.chunk(2, dim=2)):
        seen = torch.arange(int(at[-1]) + 1)
        mask = toy.context.sees(at, seen).to(q.device)
        parts.append(
            F.scaled_dot_product_attention(mine, k[:, :, : len(seen)], v[:, :, : len(seen)], attn_mask=mask)
        )
    return torch.cat(parts, dim=2)
