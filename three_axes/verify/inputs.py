"""Compares the inputs of the ranks with those of the twin, the whole model on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .causes import Cause, ranks_text, rows_text
from .record import Step


def of_inputs(ranks: Mapping[int, Step], twin: Step) -> Cause | None:
    """Why the rows of all ranks together are not the twin's; None if they are, or if they cannot be compared.
    ranks, twin: the steps, of which `inputs` are read.
    """
    whole = _rows(twin.inputs)
    if whole is None or len({row.numpy().tobytes() for row in whole}) < len(whole):
        return None
    place = {row.numpy().tobytes(): i for i, row in enumerate(whole)}
    rows = {}
    for rank, seen in ranks.items():
        mine = _rows(seen.inputs)
        if mine is not None and all(row.numpy().tobytes() in place for row in mine):
            rows[rank] = [place[row.numpy().tobytes()] for row in mine]
    if not rows:
        return None
    holders = {i: [rank for rank, mine in rows.items() if i in mine] for i in range(len(whole))}
    return _of_holders(holders)


def _rows(inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """(rows, …): the inputs of all calls of a model, in order; None if shapes or types differ."""
    inputs = [tensor for tensor in inputs if tensor.dim() > 1]
    if not inputs or len({(tensor.shape[1:], tensor.dtype) for tensor in inputs}) > 1:
        return None
    return torch.cat(inputs).contiguous()


def _of_holders(holders: Mapping[int, list[int]]) -> Cause | None:
    """A cause if some rows went into no rank, or into more ranks than others. holders: row -> its ranks."""
    if missing := [i for i, ranks in holders.items() if not ranks]:
        read = sorted({rank for ranks in holders.values() for rank in ranks})
        text = f"{rows_text(missing)} of {len(holders)} went into no rank ({ranks_text(read)} were compared)"
        if alike := [ranks for ranks in holders.values() if len(ranks) > 1]:
            text += f"; {ranks_text(alike[0])} saw equal rows"
        return Cause("rows missing", text=text)
    fewest = min(len(ranks) for ranks in holders.values())
    if several := [i for i, ranks in holders.items() if len(ranks) > fewest]:
        words = f"{rows_text(several)} went into {ranks_text(holders[several[0]])}, others into {fewest} rank"
        return Cause("rows repeated", text=words + "s" * (fewest > 1) + ": the ranks' parts overlap")
    return None
