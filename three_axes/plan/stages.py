"""Which layers a pipeline stage holds: how many, and of which kind."""

from __future__ import annotations

import numpy as np

from .layout import Layout
from .shape import ModelShape


def layers_on_stage(layers: int, stages: int, stage: int) -> int | None:
    """Layers that `stage` of `stages` holds; None where they cannot be spread.

    Evenly, or with one less on the first and last stage, where the embedding and the head
    stand for a layer (as Llama 3 405B: 126 layers on 16 stages). An odd number of layers divides over no
    even number of stages: there each stage takes its share, rounded up, and the last has what is left (so
    Megatron-Bridge lays out DeepSeek-V3: 61 layers on 16 stages are 15 times 4, and 1).
    """
    if layers % stages == 0:
        return layers // stages
    if stages > 1 and (layers + 2) % stages == 0:
        return (layers + 2) // stages - (stage in (0, stages - 1))
    share = -(-layers // stages)
    if layers % 2 and layers > share * (stages - 2):
        return min(max(layers - share * stage, 0), share)
    return None


def layers_on_rank(model: ModelShape, layout: Layout, rank):
    """Layers in all the chunks of a pipeline rank, for a layout that `check` admits; beside the head also
    those of modules that predict further tokens. Takes arrays.

    Balanced: each rank in turn takes its share, rounded up, of the layers and the head, which counts for as
    many layers as have its parameters; what is left lies before the head (so Hugging Face's nanotron splits,
    also where a share rounded up leaves the last stages none).
    """
    p, stages, layers = layout.pp, layout.pp * layout.chunks, model.layers
    more = (rank == layout.pipeline.head_rank(p)) * model.mtp
    if layout.balanced:
        share = np.ceil((layers + (np.asarray(p) > 1) * model.vocab * model.hidden / model.layer_params) / p)
        return np.clip(layers - share * rank, 0, share) + more
    one_less = (rank == 0) * 1 + (rank == p - 1) * 1
    even = np.where(layers % stages == 0, layers // p, (layers + 2) // p - one_less)
    if not layers % 2:
        return even + more
    # An odd number: all that the stages would hold if they were full, less what the last of them lack.
    share = -(-layers // stages)
    lacks = share * stages - layers
    last, before = np.minimum(lacks, share), np.maximum(lacks - share, 0)
    filled = share * layout.chunks - (rank == p - 1) * last - (rank == p - 2) * before
    return np.where((layers % stages == 0) | ((layers + 2) % stages == 0), even, filled) + more


def kinds_on_rank(model: ModelShape, layout: Layout, rank) -> list[tuple[ModelShape, int]]:
    """(kind of layer, how many of it are on a pipeline rank). The first kind lies on the first stages, on
    their first chunk. Takes arrays.
    """
    many, kinds = layers_on_rank(model, layout, rank), model.kinds
    if len(kinds) == 1:
        return [(model, many)]
    (first, count), (usual, _) = kinds
    chunk = np.where(np.asarray(layout.pp) > 1, -(-model.layers // (layout.pp * layout.chunks)), model.layers)
    early = np.clip(count - rank * chunk, 0, np.minimum(chunk, many))
    return [(first, early), (usual, many - early)]
