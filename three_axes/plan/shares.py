"""How many parameters a rank holds: of a layer, and of what stands beside the layers."""

from __future__ import annotations

from .layout import Layout
from .shape import ModelShape


def layer_share(model: ModelShape, t):
    """Parameters of a layer on one of t ranks, but routed experts: norms, biases behind a split by rows, the
    router and the ways down of latent attention are on all.
    """
    own = model.layer_params - (model.experts.count * model.expert_params if model.experts else 0)
    return (own - model.whole_params) / t + model.whole_params


def expert_share(model: ModelShape, layout: Layout):
    """Parameters of a layer's routed experts on one rank."""
    return model.experts.count / layout.ep * model.expert_params / layout.etp if model.experts else 0


def layer_matrices(model: ModelShape, layout: Layout):
    """Of these, in matrices: what a microbatch makes gradients of."""
    own = (model.attention_params + model.shared_params) / layout.tp
    return own + (
        model.experts.count / layout.ep * model.matrices(model.experts.ffn) / layout.etp
        if model.experts
        else 0
    )


def ends_share(model: ModelShape, layout: Layout, stage, split: bool = True):
    """The same for what a pipeline rank holds beside its layers: embedding, last norm and head. A tied head
    on a stage of its own is a copy of the embedding.
    """
    t = layout.tp if split else 1
    first, last = stage == 0, stage == layout.pipeline.head_rank(layout.pp)
    vocabulary = model.vocab * model.hidden
    shared = model.tied * first * last
    norm = model.hidden * (1 if model.gated else 2)
    # To predict further tokens the last stage has the embedding too, and projections.
    more = last * (model.mtp > 0) * (1 - first * 1) * vocabulary + last * model.mtp * 2 * model.hidden**2
    return ((first * 1 + last * 1 - shared * 1) * vocabulary + more) / t + (
        first * model.positions * model.hidden + last * norm
    )
