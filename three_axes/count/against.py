"""Compares the bytes counted in a step with those that the planner predicts: a table, and a sentence on each
difference.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..paper.axes import REPLICATING
from ..paper.collectives import algorithmic_bytes
from ..paper.placement import Placement
from ..plan.job import Job
from ..plan.layout import Layout
from ..plan.traffic import Calls, calls
from ..table import Table, human
from .report import CollectiveCount

NEAR = 0.05  # relative difference up to which bytes count as the same
MANY = 2.5  # from this ratio of predicted and counted bytes of a call on, FSDP's units are not layers
WEIGHTS = ("dp", "shard", "edp", "eshard")  # axes along which weights are gathered, gradients scattered
ACROSS = ("replicate", "ereplicate")  # axes along which gradients of HSDP are summed
SMALL = 1e-3  # a collective with less than this share of the largest one's bytes is ignored: losses, norms


def against(
    rows: Iterable[CollectiveCount], job: Job, layout: Layout, rank: int = 0
) -> tuple[Table, list[str]]:
    """A table of one step of a rank, counted and predicted, and sentences on the differences.

    rows: what the rank counted in this step. job, layout: what is trained, and how it is split.
    """
    place = Placement(layout.sizes)
    stage = place.group(rank, "pp").index(rank)
    groups = {axis: place.group(rank, axis) for axis, n in place.sizes.items() if n > 1}
    if layout.shard:
        groups |= _hybrid(layout, groups, rank)
    if job.model.experts:
        folded = Placement(layout.expert_sizes)
        groups |= {axis: folded.group(rank, axis) for axis, n in folded.sizes.items() if n > 1}
    predicted = {(c.op, c.axis): c for c in calls(job, layout, stage)}
    counted: dict[tuple[str, str], CollectiveCount] = {}
    for row in rows:
        if row.op not in ("recv", "barrier"):
            key = row.op, _axis_of(row, groups)
            counted[key] = counted.get(key, CollectiveCount(*key)).plus(row)
    table, words = [], []
    most = max([row.algorithmic for row in counted.values()], default=0.0)
    for key in sorted(predicted.keys() | counted.keys(), key=lambda key: key[::-1]):
        call, row = predicted.get(key, Calls(*key, 0, 0)), counted.get(key, CollectiveCount(*key))
        must = algorithmic_bytes(call.op, call.payload, layout.members(call.axis)) if call.payload else 0.0
        has, ratio = row.algorithmic, f"{row.algorithmic / must:.2f}" if must else ""
        table.append([*key[::-1], f"{call.calls:g}", f"{row.calls:g}", human(must), human(has), ratio])
        small = has < SMALL * most and must == 0
        wider = _wider(key, row, job) or 1
        differs = abs(has - must) > NEAR * max(has, must) or must and wider != 1
        units = _units(call, row, must, has, wider) if must and has else ""
        if differs and not small:
            words.append(_why(key, must, has, row, predicted, counted, job, layout))
            words[-1] += f"; {units}" * bool(units)
        elif units:
            words.append(f"{call.op} on {call.axis}: {units}")
    title = f"{job.model.name}, {job.framework.name}: {layout}. Sent by rank {rank} in a step"
    columns = ["axis", "collective", "calls predicted", "counted", "bytes predicted", "counted", "ratio"]
    return Table(columns, table, title=title), words or ["predicted and counted agree"]


def _hybrid(layout: Layout, groups: dict[str, list[int]], rank: int) -> dict[str, list[int]]:
    """The groups of HSDP for a rank. Of the ranks with the same weights (dp · cp), 'shard' has those among
    which one replica is cut, and 'replicate' those with the same shard.
    """
    alike = [rank]
    for axis in REPLICATING:
        alike = sorted(r + other - rank for r in alike for other in groups.get(axis, [rank]))
    place, size = alike.index(rank), layout.shard
    return {"shard": alike[place // size * size :][:size], "replicate": alike[place % size :: size]}


def _axis_of(row: CollectiveCount, groups: dict[str, list[int]]) -> str:
    """The layout's axis whose group has the row's ranks; if none has, or several, the row's own axis."""
    same = [axis for axis, members in groups.items() if tuple(members) == row.members]
    return same[0] if len(same) == 1 else row.axis


def _wider(key: tuple[str, str], row: CollectiveCount, job: Job) -> float | None:
    """The counted numbers' bytes, divided by those of the framework's numbers; None for several types."""
    bytes_of = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
    sizes = {bytes_of[t] for t in row.types if t in bytes_of}
    return sizes.pop() / _number(key, job) if len(sizes) == 1 else None


def _number(key: tuple[str, str], job: Job) -> int:
    """Bytes of a number that the framework sends: of a gradient, or of an activation or a weight."""
    op, axis = key
    gradients = op in ("all_reduce", "reduce_scatter") and axis in (*WEIGHTS, *ACROSS)
    return job.framework.sent_bytes if gradients else job.framework.holds.number_bytes


def _units(predicted: Calls, counted: CollectiveCount, must: float, has: float, wider: float) -> str:
    """A sentence if the bytes of a call show that weights are not gathered layer by layer, as the planner
    assumes; '' if they do not. must, has: bytes predicted and counted. wider: the result of `_wider`.
    """
    if predicted.op not in ("all_gather", "reduce_scatter") or predicted.axis not in WEIGHTS:
        return ""
    times = must / predicted.calls * wider / (has / counted.calls)
    start = f"in {counted.calls:g} calls, not {predicted.calls:g}: its units are"
    if times >= MANY:
        return f"{start} smaller than a layer, as where each linear is a unit of its own"
    return f"{start} larger than a layer" if MANY * times <= 1 else ""


def _why(key, must: float, has: float, row, predicted, counted, job: Job, layout: Layout) -> str:
    """A sentence on one difference, with its cause if known. key: (collective, axis). must, has: bytes."""
    op, axis = key
    name = f"{op} on {axis}"
    if not must:
        if op == "all_reduce" and axis == "dp" and ("reduce_scatter", "dp") in predicted:
            return f"{name}: gradients are summed whole on every rank, as without ZeRO (--zero 0)"
        known = [*layout.sizes, *(layout.expert_sizes if job.model.experts else ())]
        known += ["shard", "replicate"] * bool(layout.shard)
        if axis not in known:
            return f"{name}: no axis of this layout has these ranks; {human(has)} are sent beside it"
        return f"{name}: {human(has)} that are not predicted"
    if not has:
        if any(other == axis for _, other in counted):
            return f"{name}: predicted, and not called"
        return f"{name}: predicted, and nothing at all is sent along {axis}: is it split so?"
    ratio, call = has / must, predicted[key]
    wider = _wider(key, row, job) or 1
    of_numbers = (
        f"its numbers are {next(iter(row.types), '')}, and {job.framework.name} sends {_number(key, job)}"
        " bytes each"
    )
    if wider != 1 and abs(ratio - wider) < NEAR * ratio:
        return f"{name}: {ratio:.3g} times the bytes, since {of_numbers}"
    if wider == 1 and (of_calls := _of_calls(key, ratio, row, call, job, layout)):
        return f"{name}: {of_calls}"
    if _units(call, row, must, has, wider):
        return f"{name}: {ratio:.2f} times the predicted bytes"
    same_calls = abs(row.calls - call.calls) < 0.5
    how = "in as many calls" if same_calls else f"in {row.calls:g} calls, not {call.calls:g}"
    return f"{name}: {ratio:.2f} times the predicted bytes, {how}" + f"; {of_numbers}" * (wider != 1)


def _of_calls(
    key: tuple[str, str], ratio: float, row: CollectiveCount, call: Calls, job: Job, layout: Layout
) -> str:
    """What was called more or less often than predicted, if that explains the bytes; otherwise ''. ratio:
    bytes counted over predicted.
    """
    op, axis = key
    m = job.microbatches(layout)
    near = lambda wanted: abs(ratio - wanted) < NEAR * wanted
    if op == "all_gather" and axis in ("dp", "shard") and layout.zero == 3:
        if layout.pp > 1 and near(2):
            return "each weight is gathered twice: reshard_after_forward is on under a pipeline"
        # Embedding and head are gathered once in any case: so fewer than half of the calls are left out.
        once = row.calls in (call.calls / 2, (call.calls + m) / 2)
        each = ratio * call.calls / max(row.calls, 1)  # bytes of a call, counted over predicted
        if layout.pp == 1 and (near(0.5) or once and abs(each - 1) < NEAR):
            return "each weight is gathered once: reshard_after_forward is off"
    if axis == "dp" and m > 1 and near(m):
        return f"{m} times: it is done in each of {m} microbatches, and not once a step"
    if axis == "dp" and m > 1 and near(1 / m):
        return f"once a step, and not in each of {m} microbatches: gradients are summed first"
    return ""
