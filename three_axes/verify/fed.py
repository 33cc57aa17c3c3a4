"""Compares the inputs and targets of the ranks with those of the twin, the whole model on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .causes import Cause, ranks_text


class Inputs(Protocol):
    """The fields of `record.Seen` that this module reads."""

    fed: list[torch.Tensor]
    targets: list[tuple[torch.Tensor, int]]


# Functions whose targets are recorded.
LOSSES = (
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
)  # fmt: skip


class Scored(TorchFunctionMode):
    """A block in which the targets of PyTorch's losses are recorded, as (target, its `ignore_index`)."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in LOSSES:
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            if type(target) is torch.Tensor:
                kept = target.detach().to("cpu", copy=True)
                self.targets.append((kept, kwargs.get("ignore_index", -100)))
        return func(*args, **kwargs)


def of_inputs(ranks: Mapping[int, Inputs], twin: Inputs) -> Cause | None:
    """Why the rows or targets of all ranks together are not the twin's; None if they are, or if they cannot
    be compared. ranks, twin: the steps, of which `fed` and `targets` are read.
    """
    whole = _rows(twin.fed)
    if whole is None or len({row.numpy().tobytes() for row in whole}) < len(whole):
        return _of_targets(ranks, twin)
    place = {row.numpy().tobytes(): i for i, row in enumerate(whole)}
    rows = {}
    for rank, seen in ranks.items():
        mine = _rows(seen.fed)
        if mine is not None and all(row.numpy().tobytes() in place for row in mine):
            rows[rank] = [place[row.numpy().tobytes()] for row in mine]
    if not rows:
        return _of_targets(ranks, twin)
    holders = {i: [rank for rank, mine in rows.items() if i in mine] for i in range(len(whole))}
    if cause := _of_holders(holders):
        return cause
    return _of_labels(rows, ranks, twin, len(whole)) or _of_targets(ranks, twin)


def _rows(fed: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """(rows, …): the inputs of all calls of a model, in order; None if shapes or types differ."""
    fed = [tensor for tensor in fed if tensor.dim() > 1]
    if not fed or len({(tensor.shape[1:], tensor.dtype) for tensor in fed}) > 1:
        return None
    return torch.cat(list(fed)).contiguous()


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


def _of_labels(
    rows: Mapping[int, list[int]], ranks: Mapping[int, Inputs], twin: Inputs, n: int
) -> Cause | None:
    """A cause if a row has other targets than in the twin. rows: rank -> the numbers of its rows. n: the rows
    of the whole batch.
    """
    whole = _labels(twin.targets, n)
    for rank, mine in rows.items():
        labels = _labels(ranks[rank].targets, len(mine))
        if whole is None or labels is None or labels.shape[1:] != whole.shape[1:]:
            continue
        wrong = [(i, row) for i, row in zip(mine, labels) if not torch.equal(row, whole[i])]
        if wrong:
            i, row = wrong[0]
            others = [j for j in range(n) if torch.equal(row, whole[j])]
            text = f"on rank {rank} {rows_text([i])} is scored by "
            if others:
                text += f"the targets of {rows_text(others[:1])}: labels are cut otherwise than the inputs"
            else:
                off = int((row != whole[i]).sum())
                text += f"targets that are not the twin's, {off} of {row.numel()}: cut, shifted or masked"
            return Cause("targets", text=text)
    return None


def _labels(targets: Sequence[tuple[torch.Tensor, int]], n: int) -> torch.Tensor | None:
    """(n, targets of a row), −1 for each target that the loss ignores; None if they do not fit n rows."""
    flat = [
        torch.where(t == ignored, -1, t).flatten() if not t.is_floating_point() else t.flatten()
        for t, ignored in targets
    ]
    if not flat or not n or sum(map(len, flat)) % n or len({each.dtype for each in flat}) > 1:
        return None
    return torch.cat(flat).view(n, -1)


def _of_targets(ranks: Mapping[int, Inputs], twin: Inputs) -> Cause | None:
    """A cause if the ranks together score targets that the twin does not, or score some more often."""
    whole = _counts(twin.targets)
    parts = [_counts(seen.targets) for seen in ranks.values()]
    total: Counter = sum(parts, Counter())
    if not whole or not total:
        return None
    if strange := [value for value in total if value not in whole]:
        often = sum(total[value] for value in strange)
        text = (
            f"{often} targets are scored that the twin leaves out or never has, such as {strange[0]}: padding"
            " that is counted, or labels of other rows?"
        )
        return Cause("targets", text=text)
    times = sum(total.values()) / sum(whole.values())
    if len(parts) % max(1, round(times)) == 0 and any(total[v] != times * whole[v] for v in whole):
        text = (
            f"the ranks score {sum(total.values())} targets and the twin {sum(whole.values())}, some of them"
            " more often than others: labels are cut or masked otherwise than the twin's"
        )
        return Cause("targets", text=text)
    return None


def _counts(targets: Sequence[tuple[torch.Tensor, int]]) -> Counter:
    """Target -> how often it is scored. Targets that are no integers are not counted."""
    counts: Counter = Counter()
    for target, ignored in targets:
        if not target.is_floating_point():
            counts.update(value for value in target.flatten().tolist() if value != ignored)
    return counts


def rows_text(rows: Sequence[int]) -> str:
    """'row 3', 'rows 1–2', 'rows 1, 3': counted from 1, for rows that are numbered from 0."""
    numbers = sorted(i + 1 for i in rows)
    if len(numbers) == 1:
        return f"row {numbers[0]}"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"rows {numbers[0]}–{numbers[-1]}"
    return f"rows {', '.join(map(str, numbers))}"
