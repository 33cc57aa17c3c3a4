"""Drop 08's practice: who shares a group, and which groups leave a node, whatever the order of the axes."""

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
    found, stride = {}, 1
    for axis, size in reversed(sizes.items()):
        first = rank - rank // stride % size * stride
        found[axis] = [first + i * stride for i in range(size)]
        stride *= size
    return found


_axes = lambda text: dict(zip((part[:2] for part in text.split()), (int(part[2:]) for part in text.split())))
# Megatron-LM's order, Llama 3's, and sizes that are not alike.
GRIDS: list[Sizes] = [
    _axes(text)
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


def _judge_groups(attempt) -> Answer:
    said = ask(attempt, [(rank, dict(grid)) for grid in GRIDS for rank in range(8)])
    for i, grid in enumerate(GRIDS):
        if wrong_answer := _about(said[8 * i : 8 * i + 8], grid):
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
)


def crossing(sizes, node):
    """Which axes have groups that leave a node of `node` ranks: a list of names out of `sizes`.

    sizes: the outermost axis first, the innermost last. The sizes divide the node, or the node them.
    """
    found, span = [], 1
    for axis, size in reversed(sizes.items()):
        span *= size
        if size > 1 and span > node:
            found.append(axis)
    return found


CASES: list[tuple[Sizes, int]] = [
    (_axes(text), node)
    for text, node in (
        ("pp2 dp2 tp2", 4),
        ("pp2 dp1 tp4", 4),
        ("pp1 dp4 tp2", 4),
        ("dp2 pp4 tp1", 4),
        ("pp1 dp1 tp8", 4),
        ("pp1 dp2 tp4", 8),
        ("dp128 pp16 tp8", 8),
        ("pp2 dp4 tp8", 8),
        ("pp4 dp2 tp2", 8),
        ("dp4 pp2 tp2", 8),
        ("pp8 dp1 tp8", 8),
        ("pp1 dp8 tp1", 8),
    )
]


def _judge_crossing(attempt) -> Answer:
    said = ask(attempt, [(dict(sizes), node) for sizes, node in CASES])
    leave: Callable = lambda rule: (
        lambda sizes, node: [
            a for a, n in sizes.items() if n > 1 and rule(n, placement.stride(a, sizes), node)
        ]
    )
    inside_out: Callable = lambda sizes, node: crossing(dict(reversed(sizes.items())), node)
    alone: Callable = lambda sizes, node: [
        a for a, n in sizes.items() if n * placement.stride(a, sizes) > node
    ]
    for (sizes, node), a in zip(CASES, said):
        if not isinstance(a, (list, tuple, set)) or not set(a) <= set(sizes):
            return wrong(
                "no list of axes",
                f"crossing({sizes}, {node}) returned {a!r}; return a list of names out of `sizes`, which may"
                " be empty.",
            )
    as_sets = lambda answers: [sorted(a) for a in answers]
    truth = [crossing(*case) for case in CASES]
    if as_sets(said) == as_sets(truth):
        return right(
            "Also for 16,384 GPUs: TP 8 stays in its node, PP 16 and DP 128 leave it.",
            ("layouts", str(len(CASES)), str(len(CASES))),
        )
    (sizes, node), mine, target = next(
        (c, a, b) for c, a, b in zip(CASES, as_sets(said), as_sets(truth)) if a != b
    )
    described = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    figures = [(f"{described}, outermost first, nodes of {node}", str(mine), str(target))]
    for other, name, text in (
        (
            leave(lambda n, step, node: n > node),
            "size where reach was meant",
            (
                "You compare a group's size with the node. But its ranks may stand apart: along the"
                " outermost axis neighbours are all other sizes' product apart, and two of them can be on"
                " two nodes."
            ),
        ),
        (
            inside_out,
            "TP outermost",
            "You count from the first axis outwards. The last is innermost: its ranks are neighbours.",
        ),
        (
            lambda sizes, node: [a for a in sizes if a not in crossing(sizes, node)],
            "the axes that stay",
            "You name the axes whose groups stay inside a node. Which ones leave it?",
        ),
        (lambda sizes, node: list(sizes), "all axes", "You name all axes, whatever the node holds."),
        *(
            (
                lambda sizes, node, fixed=fixed: crossing({axis: sizes[axis] for axis in fixed}, node),
                "one order for all",
                f"You answer as if the order were {', '.join(fixed)}. It is in `sizes`: read the axes in the"
                " order they come.",
            )
            for fixed in (("pp", "dp", "tp"), ("dp", "pp", "tp"))
        ),
        (alone, "a group of one", "A group of one rank sends nothing, wherever it stands."),
        (
            leave(lambda n, step, node: n * step >= node),
            "a full node is not left",
            (
                "The reach is right. But a group that reaches over as many ranks as a node has fills it,"
                " and stays inside."
            ),
        ),
        (
            leave(lambda n, step, node: (n - 1) * step > node),
            "the far end is one rank further",
            (
                "First and last are (size − 1) · distance apart. They are on two nodes as soon as that is"
                " the node's size, not only when it is more."
            ),
        ),
        (
            leave(lambda n, step, node: step >= node),
            "neighbours only",
            (
                "You ask whether neighbours are on two nodes. They may share one while the ends of the"
                " group do not."
            ),
        ),
    ):
        if as_sets(said) == as_sets([other(*c) for c in CASES]):
            return wrong(name, text, *figures)
    return wrong(
        "other axes",
        "How far does a group reach? Its size times the distance of its neighbours: 1 for the innermost"
        " axis, the product of the sizes further in for any other.",
        *figures,
    )


across = Exercise(
    "which axes leave the node",
    crossing,
    _judge_crossing,
    hints=[
        "How far apart are neighbours along an axis? The product of the sizes that come after it in `sizes`.",
        (
            "A group reaches over its size times that distance. It leaves the node if that is more than the"
            " node holds."
        ),
        "A group of one rank sends nothing.",
    ],
)
