"""Counts the layers of each kind on a pipeline rank, and the parameters that one GPU of it holds."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .layout import Layout
from .shape import ModelShape


@lru_cache(maxsize=4096)
def can_be_spread(model: ModelShape, stages: int) -> bool:
    """Whether a model's layers can be distributed over so many stages: evenly, or with one less on the first
    and last stage, where the embedding and the head count as a layer (Llama 3 405B: 126 layers on 16 stages).
    If the number of layers is odd, each stage may also take its share, rounded up, and the last two the
    rest, as in Megatron-Bridge (DeepSeek-V3: 61 layers on 16 stages are 15 times 4, and 1). If dense layers
    lie between layers with experts, each stage must have the same number of each kind.
    """
    if model.mixed:
        return all(count % stages == 0 for _, count in model.kinds)
    layers = model.layers
    evenly = layers % stages == 0 or stages > 1 and (layers + 2) % stages == 0
    return evenly or bool(layers % 2) and layers > -(-layers // stages) * (stages - 2)


def layers_on_rank(model: ModelShape, layout: Layout, rank):
    """Layers in all the chunks of a pipeline rank, for a layout that `possible.check` accepts; on the head's
    rank also the layers of modules that predict further tokens. Takes arrays.
    """
    p, stages, layers = layout.pp, layout.pp * layout.chunks, model.layers
    more = (rank == layout.pipeline.head_rank(p)) * model.mtp
    one_less = (rank == 0) * 1 + (rank == p - 1) * 1
    even = np.where(layers % stages == 0, layers // p, (layers + 2) // p - one_less)
    if not layers % 2:
        return even + more
    # An odd number of layers: as many as full stages would hold, less what the last stages lack.
    share = -(-layers // stages)
    lacks = share * stages - layers
    last, before = np.minimum(lacks, share), np.maximum(lacks - share, 0)
    filled = share * layout.chunks - (rank == p - 1) * last - (rank == p - 2) * before
    return np.where((layers % stages == 0) | ((layers + 2) % stages == 0), even, filled) + more


def kinds_on_rank(model: ModelShape, layout: Layout, rank) -> list[tuple[ModelShape, int]]:
    """(kind, how many layers of it) on a pipeline rank. Takes arrays."""
    return kinds_among(model, layout, rank, layers_on_rank(model, layout, rank))


def kinds_among(model: ModelShape, layout: Layout, rank, many) -> list[tuple[ModelShape, int]]:
    """(kind, how many layers of it) among `many` layers of a pipeline rank. Mixed kinds are on all ranks in
    the same proportion; otherwise the model's first layers are of the first kind.
    """
    kinds = model.kinds
    if len(kinds) == 1:
        return [(model, many)]
    if model.mixed:
        return [(kind, many * count / model.layers) for kind, count in kinds]
    (first, count), (usual, _) = kinds
    chunk = np.where(np.asarray(layout.pp) > 1, -(-model.layers // (layout.pp * layout.chunks)), model.layers)
    early = np.clip(count - rank * chunk, 0, np.minimum(chunk, many))
    return [(first, early), (usual, many - early)]


# -- shares of a rank -----------------------------------------------------------------------------


def layer_share(model: ModelShape, t):
    """Parameters of a layer on one of t ranks, without routed experts. Norms, biases after a split by rows,
    the router and the projections to latent numbers are on all ranks.
    """
    own = model.layer_params - (model.experts.count * model.expert_params if model.experts else 0)
    return (own - model.whole_params) / t + model.whole_params


def expert_share(model: ModelShape, layout: Layout):
    """Parameters of a layer's routed experts on one rank."""
    return model.experts.count / layout.ep * model.expert_params / layout.etp if model.experts else 0


def layer_matrices(model: ModelShape, layout: Layout):
    """Parameters of a layer's matrices on one rank, with its share of the routed experts."""
    own, e = (model.attention_params + model.shared_params) / layout.tp, model.experts
    return own + (e.count / layout.ep * model.expert_matrices / layout.etp if e else 0)


def ends_share(model: ModelShape, layout: Layout, stage, split: bool):
    """Parameters that a pipeline rank holds besides its layers: embedding, last norm and head. A tied head on
    a stage of its own is a copy of the embedding.
    """
    t = layout.tp if split else 1
    first, last = stage == 0, stage == layout.pipeline.head_rank(layout.pp)
    vocabulary = model.vocab * model.hidden
    shared = model.tied * first * last
    norm = model.hidden * (1 if model.bare else 2)
    # To predict further tokens (mtp) the last stage also has the embedding, and projections.
    more = last * (model.mtp > 0) * (1 - first * 1) * vocabulary + last * model.mtp * 2 * model.hidden**2
    return ((first * 1 + last * 1 - shared * 1) * vocabulary + more) / t + (
        first * model.positions * model.hidden + last * norm
    )
