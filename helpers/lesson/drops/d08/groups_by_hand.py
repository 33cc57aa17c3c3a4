"""Drop 08's first practice: who shares a group, whatever the order of the axes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from ....runtime.world import World
from ....theory import placement
from ....theory.placement import Sizes
from ...practice import Answer, Exercise, ask, right, wrong


def groups(rank, sizes):
    """The ranks that `rank` shares a group with along each axis, itself among them, in rising order.

    sizes: axis -> size from the outermost axis to the innermost, such as {"pp": 2, "dp": 2, "tp": 2}. Return
    a list of ranks for each axis, {"pp": [...], "dp": [...], "tp": [...]}.
    """
    ranks, stride = {}, 1
    for axis, size in reversed(sizes.items()):
        first = rank - rank // stride % size * stride
        ranks[axis] = [first + i * stride for i in range(size)]
        stride *= size
    return ranks


def axes_of(text: str) -> Sizes:
    """'pp2 tp4' -> {"pp": 2, "tp": 4}"""
    return {part[:2]: int(part[2:]) for part in text.split()}


# Megatron-LM's order, Llama 3's, and sizes that are not alike.
GRIDS: list[Sizes] = [
    axes_of(text)
    for text in (
        "pp2 dp2 tp2",
        "dp2 pp2 tp2",
        "pp2 dp1 tp4",
        "pp1 dp4 tp2",
        "dp2 pp4 tp1",
        "pp1 dp1 tp8",
        "pp4 dp2 tp1",
    )
]


def _by_steps(sizes: Sizes, steps: Callable) -> list[dict]:
    """All ranks' groups where steps(size, stride) -> (the stride of the coordinate, of the way to the group's
    first rank, and between its ranks).
    """
    made: list[dict] = [{} for _ in range(math.prod(sizes.values()))]
    for axis, size in sizes.items():
        of_coordinate, to_first, between = steps(size, placement.stride(axis, sizes))
        for rank, groups_ in enumerate(made):
            first = rank - rank // of_coordinate % size * to_first
            groups_[axis] = [first + i * between for i in range(size)]
    return made


# What it is called, what to do, and steps as `_by_steps` takes them.
MISTAKES = (
    (
        "a stride that has its own size in it",
        "You multiply the stride by an axis's size before you use it. Neighbours along an axis are as far"
        " apart as the product of the sizes further in: 1 for the last axis.",
        lambda size, stride: (stride * size,) * 3,
    ),
    (
        "a coordinate taken for a distance",
        "You take the coordinate from the rank to find the group's first rank. Each step along an axis is"
        " `stride` ranks: take coordinate · stride.",
        lambda size, stride: (stride, 1, stride),
    ),
)


def _judge_groups(attempt) -> Answer:
    given = ask(attempt, [(rank, dict(grid)) for grid in GRIDS for rank in range(8)])
    for name, text, steps in MISTAKES:
        if given == [answer for grid in GRIDS for answer in _by_steps(grid, steps)]:
            return wrong(name, text)
    for i, grid in enumerate(GRIDS):
        if wrong_answer := _about(given[8 * i : 8 * i + 8], grid):
            return wrong_answer
    with World(8, timeout=8) as world:

        def meet():
            """Make the groups for 2 × 2 × 2 as the attempt says, and sum a one in each."""
            everywhere = [attempt(rank, dict(GRIDS[0])) for rank in range(8)]
            sums = {}
            for axis in GRIDS[0]:
                for members in sorted({tuple(sorted(int(x) for x in g[axis])) for g in everywhere}):
                    made = dist.new_group(list(members))
                    if dist.get_rank() in members:
                        x = torch.ones(1)
                        dist.all_reduce(x, group=made)
                        sums[axis] = int(x.item())
            return sums

        met = world.run(meet)
    return right(
        "Every rank is in one group along each axis, whatever the order, and on eight real ranks every"
        " group of 2 × 2 × 2 met.",
        ("grids of eight ranks", str(len(GRIDS)), str(len(GRIDS))),
        (f"ranks that met along {', '.join(GRIDS[0])}", str(list(met[0].values())), "[2, 2, 2]"),
    )


def _about(mine: list, sizes: Sizes) -> Answer | None:
    where = "With " + ", ".join(f"{axis} {size}" for axis, size in sizes.items()) + ", outermost first,"
    in_order = lambda order: [
        {axis: placement.group(rank, axis, order) for axis in sizes}
        for rank in range(math.prod(sizes.values()))
    ]
    truth = in_order(sizes)
    try:
        mine = [{axis: sorted(int(x) for x in g[axis]) for axis in sizes} for g in mine]
    except Exception:
        return wrong(
            "no groups",
            f"{where} you return {str(mine[0])[:120]}; return a dictionary with pp, dp and tp, each a list"
            " of ranks.",
        )
    if mine == truth:
        return None
    if mine == in_order(dict(reversed(sizes.items()))):
        return wrong(
            "TP outermost",
            f"{where} rank 0 shares its matrices with {mine[0]['tp']}, which are not neighbours: you let the"
            " first axis change fastest. The last one does, and TP, which talks most, is last.",
        )
    for fixed in (("pp", "dp", "tp"), ("dp", "pp", "tp")):
        if mine == in_order({axis: sizes[axis] for axis in fixed}):
            return wrong(
                "one order for all",
                f"{where} you answer as if the order were {', '.join(fixed)}. It is in `sizes`, and"
                " frameworks differ: read the axes in the order they come.",
            )
    off = [axis for axis in sizes if any(g[axis] != t[axis] for g, t in zip(mine, truth))]
    apart = {b - a for g in mine for a, b in zip(g[off[0]], g[off[0]][1:])}
    whole = all(len(g[off[0]]) == sizes[off[0]] and set(g[off[0]]) <= set(range(8)) for g in mine)
    if whole and len(off) == len(apart) == 1 and apart != {placement.stride(off[0], sizes)}:
        return wrong(
            "a wrong stride",
            f"{where} the ranks of your {off[0]} groups are {min(apart)} apart, and should be"
            f" {placement.stride(off[0], sizes)}: the product of the sizes further in. The other axes are"
            " right.",
        )
    if sizes["tp"] > 1 and any(g["tp"][-1] - g["tp"][0] >= sizes["tp"] for g in mine):
        return wrong(
            "TP's ranks are no neighbours",
            f"{where} rank 0 shares its matrices with {mine[0]['tp']}, which are not neighbours. TP talks"
            " most, so its ranks must be: it is the last axis in `sizes`.",
        )
    for axis, size in sizes.items():
        for rank, g in enumerate(mine):
            if rank not in g[axis]:
                return wrong(
                    "a rank outside its own group",
                    f"{where} rank {rank} is not in its own {axis} group {g[axis]}.",
                )
            if len(set(g[axis])) != size:
                return wrong(
                    "groups of another size",
                    f"{where} rank {rank} is in a {axis} group of {len(set(g[axis]))} ranks; it should be"
                    f" {size}.",
                )
            if any(not 0 <= r < 8 for r in g[axis]):
                return wrong(
                    "ranks that do not exist",
                    f"{where} the {axis} group of rank {rank} is {g[axis]}; the ranks are 0 to 7.",
                )
            if (other := next((r for r in g[axis] if set(mine[r][axis]) != set(g[axis])), None)) is not None:
                return wrong(
                    "groups that do not partition the ranks",
                    f"{where} rank {rank} says its {axis} group is {g[axis]}, rank {other} of that group"
                    f" says {mine[other][axis]}. Every rank must be in exactly one group along each axis.",
                )
    rank, axis = next(
        (rank, axis) for rank in range(8) for axis in sizes if mine[rank][axis] != truth[rank][axis]
    )
    return wrong(
        "other groups",
        f"{where} rank {rank} is in the {axis} group {mine[rank][axis]}. It is at"
        f" {placement.coordinates(rank, sizes)}: its {axis} group has the same other two coordinates:"
        f" {truth[rank][axis]}.",
    )


members = Exercise(
    "the groups of a rank",
    groups,
    _judge_groups,
    minutes=9,
    hints=[
        (
            "Begin with the innermost axis, the last in `sizes`: its neighbours are 1 rank apart. How far"
            " apart are the next one's?"
        ),
        (
            "Neighbours along an axis are `stride` apart, the product of the sizes further in. The"
            " coordinate is rank // stride % size."
        ),
        "The group's first rank is rank − coordinate · stride; the others follow, one stride apart.",
    ],
    without=("placement",),
)
