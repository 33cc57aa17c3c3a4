"""Reads a schedule that a reader has written, names its mistake, and finds why each rank is idle."""

from __future__ import annotations

import re
from collections.abc import Sequence

from three_axes.paper import SCHEDULES, Op, Schedule, Stuck, Timeline, simulate


class Illegal(ValueError):
    """A list of operations is no valid schedule. `misconception` is the mistake's name."""

    def __init__(self, text: str, misconception: str):
        super().__init__(text)
        self.misconception = misconception


def read(orders: Sequence[Sequence[str]], m: int) -> Schedule:
    """A schedule from each rank's list of operations such as 'F0' and 'B0', one stage to a rank.

    m: number of microbatches. Raises Illegal, with the reason, for a text that is no operation, for a
    microbatch that does not exist, and for an operation that is missing, repeated, or before another
    operation of its rank that it needs.
    """
    ops = []
    for rank, order in enumerate(orders):
        if isinstance(order, str) or not isinstance(order, Sequence):
            why = " (append and extend change a list, and return None)" if order is None else ""
            raise Illegal(
                f"rank {rank}: give a list of operations such as ['F0', 'B0'], not {order!r}{why}",
                "no list of operations",
            )
        ops.append([_operation(rank, text, order, m) for text in order])
        _check_rank(rank, ops[-1], m)
    return Schedule(recognise(ops, m), m, ops, list(range(len(ops))))


def _operation(rank: int, text, order: Sequence, m: int) -> Op:
    """The operation that a text of `order` names."""
    if isinstance(text, list):
        raise Illegal(
            f"rank {rank}: you give a list of lists. Give the operations of this rank alone.",
            "a list of lists",
        )
    parsed = re.fullmatch(r"([FBIW])(\d+)", text) if isinstance(text, str) else None
    if not parsed:
        raise Illegal(
            f"rank {rank}: {text!r} is no operation; write the text 'F0' for the forward of"
            " microbatch 0, 'B0' for its backward",
            "no list of operations",
        )
    if int(parsed[2]) < m:
        return Op(parsed[1], int(parsed[2]), rank)
    sentence = f"rank {rank}: {text} is of microbatch {int(parsed[2])}, but there are {m}, from 0 to {m - 1}."
    if not any(isinstance(t, str) and t[1:] == "0" for t in order):
        raise Illegal(sentence, "microbatches counted from 1")
    raise Illegal(
        f"{sentence} A warm-up has at most m forwards, and after it only the rest of the m is left.",
        "a forward too many",
    )


def _check_rank(rank: int, ops: list[Op], m: int) -> None:
    done: dict[str, set[int]] = {kind: set() for kind in "FBIW"}
    for op in ops:
        if op.microbatch in done[op.kind]:
            raise Illegal(f"rank {rank}: {op.kind}{op.microbatch} is in the list twice", "an operation twice")
        if op.kind in "BI" and op.microbatch not in done["F"]:
            raise Illegal(
                f"rank {rank}: {op.kind}{op.microbatch} stands before F{op.microbatch}. A backward needs what"
                " its own forward has kept.",
                "a backward before its forward",
            )
        if op.kind == "W" and op.microbatch not in done["I"]:
            raise Illegal(
                f"rank {rank}: W{op.microbatch} stands before I{op.microbatch}, which finds the gradient that"
                " it needs",
                "a W before its I",
            )
        done[op.kind].add(op.microbatch)
    if missing := sorted(set(range(m)) - done["F"]):
        raise Illegal(f"rank {rank}: the forward of {_some(missing)} is missing", "a forward is missing")
    if missing := sorted(set(range(m)) - done["B"] - done["I"]):
        last = missing == list(range(m - len(missing), m))
        raise Illegal(
            f"rank {rank}: {_some(missing)} {'goes' if len(missing) == 1 else 'go'} forward and never"
            " backward."
            + (" When the forwards have run out, the backwards that are left must drain." if last else ""),
            "a missing drain" if last else "a backward is missing",
        )
    if missing := sorted(done["I"] - done["W"]):
        raise Illegal(f"rank {rank}: W of {_some(missing)} is missing", "a W is missing")


def _some(numbers: list[int]) -> str:
    listed = ", ".join(map(str, numbers[:4])) + ", …" * (len(numbers) > 4)
    return f"microbatch{'es' * (len(numbers) > 1)} {listed}"


def recognise(ops: list[list[Op]], m: int) -> str:
    """The name of the known schedule with these operations, or 'your own'."""
    known = {name: SCHEDULES[name].make(len(ops), m).ops for name in ("GPipe", "1F1B", "ZB-H1", "ZB-H2")}
    for name, known_ops in known.items():
        if known_ops == ops:
            return name
    if [mine[:m] + mine[m:][::-1] for mine in known["GPipe"]] == ops:
        return "GPipe, backwards in reverse order"
    return "your own"


def run(schedule: Schedule) -> Timeline:
    """The timeline of a schedule (`simulate`). Raises Illegal if it cannot finish; the message says before
    which operation each rank waits, and for which other operation.
    """
    try:
        return simulate(schedule)
    except Stuck as e:
        waits = "; ".join(
            f"rank {rank} waits to run {_name(op)}, which needs {_name(need)} of rank"
            f" {schedule.rank_of[need.stage]}"
            for rank, op, need in e.waits
        )
        raise Illegal(
            f"The ranks end up waiting for each other: {waits}.", "ranks that wait for each other"
        ) from None


def _name(op: Op) -> str:
    return f"{'B' if op.kind == 'I' else op.kind}{op.microbatch}"


def idle(timeline: Timeline) -> list[tuple[int, float, float, str]]:
    """Every idle interval: (rank, start, end, the reason, which names operations as the picture does)."""
    bubbles = []
    for rank, runs in enumerate(timeline.runs):
        free = 0.0
        for op, start, end, after in runs:
            if start > free:
                why = f"{_name(op)} has not come"
                if after:
                    source = timeline.schedule.rank_of[after.stage]
                    why = f"{_name(op)} waits for {_name(after)} on rank {source}"
                bubbles.append((rank, free, start, why))
            free = end
        if free < timeline.makespan:
            bubbles.append((rank, free, timeline.makespan, "it is done, the others are not"))
    return bubbles
