"""Drop 08's practice: who shares a group, and which groups leave a node."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ....runtime.failure import RankError
from ....runtime.world import World
from ....theory import placement
from ...practice import Answer, Exercise, right, wrong


def groups(rank, d, t, p):
    """The ranks that `rank` shares a group with along each axis, itself among them, in rising order.

    tp is innermost: ranks 0 to t-1 share their matrices. Then pp, then dp. Return {"tp": [...], "pp": [...],
    "dp": [...]}.
    """
    k, j, i = rank % t, rank // t % p, rank // (t * p)
    return {
        "tp": [(i * p + j) * t + x for x in range(t)],
        "pp": [(i * p + x) * t + k for x in range(p)],
        "dp": [(x * p + j) * t + k for x in range(d)],
    }


GRIDS = [(2, 2, 2), (1, 4, 2), (4, 2, 1), (2, 1, 4), (1, 1, 8), (8, 1, 1)]  # d, t, p


def _judge_groups(attempt) -> Answer:
    with World(8, timeout=8) as world:
        said = world.run(lambda: [[attempt(rank, *grid) for rank in range(8)] for grid in GRIDS])[0]
        for (d, t, p), mine in zip(GRIDS, said):
            if wrong_answer := _about(mine, d, t, p):
                return wrong_answer

        def meet():
            """Make the groups for 2 × 2 × 2 as the attempt says, and sum a one in each."""
            everywhere = [attempt(rank, 2, 2, 2) for rank in range(8)]
            sums = {}
            for axis in ("tp", "pp", "dp"):
                for members in sorted({tuple(sorted(int(x) for x in g[axis])) for g in everywhere}):
                    made = dist.new_group(list(members))
                    if dist.get_rank() in members:
                        x = torch.ones(1)
                        dist.all_reduce(x, group=made)
                        sums[axis] = int(x.item())
            return sums

        met = world.run(meet)
    return right(
        "Every rank is in one group along each axis, and on eight real ranks every group of 2 × 2 × 2 met.",
        ("grids of eight ranks", str(len(GRIDS)), str(len(GRIDS))),
        ("ranks that met along tp, pp, dp", str(list(met[0].values())), "[2, 2, 2]"),
    )


def _about(mine: list, d: int, t: int, p: int) -> Answer | None:
    where = f"With d = {d}, t = {t}, p = {p}"
    sizes = {"tp": t, "pp": p, "dp": d}
    truth = [groups(rank, d, t, p) for rank in range(8)]
    try:
        mine = [{axis: sorted(int(x) for x in g[axis]) for axis in sizes} for g in mine]
    except Exception:
        return wrong(
            "no groups",
            f"{where} you return {str(mine[0])[:120]}; return a dictionary with tp, pp and dp, each a list of"
            " ranks.",
        )
    if mine == truth:
        return None
    ordered = lambda *order: (
        mine
        == [
            {axis: placement.group(rank, axis, {a: sizes[a] for a in order}) for axis in sizes}
            for rank in range(8)
        ]
    )
    if t > 1 and (ordered("dp", "tp", "pp") or ordered("pp", "tp", "dp")):
        return wrong(
            "TP not innermost",
            f"{where} rank 0 shares its matrices with {mine[0]['tp']}, which are not neighbours: another axis"
            " counts faster. TP talks most, so its ranks must be neighbours.",
        )
    if t > 1 and (ordered("tp", "pp", "dp") or ordered("tp", "dp", "pp")):
        return wrong(
            "TP outermost",
            f"{where} rank 0 shares its matrices with {mine[0]['tp']}, which are not neighbours. TP talks"
            " most, so its ranks must be: tp is innermost.",
        )
    if ordered("pp", "dp", "tp"):
        return wrong(
            "DP inside PP",
            f"{where} neighbouring stages of a pipeline end up further apart than copies of the model. tp"
            " innermost, then pp, then dp.",
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
                    f"{where} rank {rank} says its {axis} group is {g[axis]}, rank {other} of that group says"
                    f" {mine[other][axis]}. Every rank must be in exactly one group along each axis.",
                )
    rank, axis = next(
        (rank, axis) for rank in range(8) for axis in sizes if mine[rank][axis] != truth[rank][axis]
    )
    return wrong(
        "other groups",
        f"{where} rank {rank} is in the {axis} group {mine[rank][axis]}. It is at"
        f" {placement.coordinates(rank, {'dp': d, 'pp': p, 'tp': t})}: its {axis} group has the same other"
        f" two coordinates: {truth[rank][axis]}.",
    )


members = Exercise(
    "the groups of a rank",
    groups,
    _judge_groups,
    hints=[
        (
            "Coordinates first. tp changes fastest: k = rank % t. Then pp: j = rank // t % p. Then dp: i ="
            " rank // (t·p)."
        ),
        "And back: rank = (i·p + j)·t + k.",
        "Along an axis only its own coordinate moves: the tp group is (i·p + j)·t + x for all x below t.",
    ],
)


def crossing(d, t, p, node):
    """Which axes have groups that leave a node of `node` ranks: a list out of "tp", "pp", "dp". tp innermost,
    then pp, then dp.

    The sizes divide the node, or the node them.
    """
    reach = {"tp": (t, t), "pp": (p, t * p), "dp": (d, d * t * p)}
    return [axis for axis, (size, span) in reach.items() if size > 1 and span > node]


CASES = [
    (2, 2, 2, 4),
    (1, 4, 2, 4),
    (4, 2, 1, 4),
    (2, 1, 4, 4),
    (1, 8, 1, 4),
    (2, 4, 1, 8),
    (128, 8, 16, 8),
    (4, 8, 2, 8),
    (1, 8, 8, 8),
    (8, 1, 1, 8),
]


def _judge_crossing(attempt) -> Answer:
    with World(1, timeout=5) as world:
        try:
            said = world.run(lambda: [attempt(*case) for case in CASES])[0]
        except RankError as e:
            return Answer("crashed", e.report)
    outward: Callable = lambda d, t, p, node: [
        a for a, n, span in (("dp", d, d), ("pp", p, d * p), ("tp", t, d * t * p)) if n > 1 and span > node
    ]
    alone: Callable = lambda d, t, p, node: [
        a for a, span in (("tp", t), ("pp", t * p), ("dp", d * t * p)) if span > node
    ]
    leave: Callable = lambda rule: (
        lambda d, t, p, node: [
            a
            for a, n, step in (("tp", t, 1), ("pp", p, t), ("dp", d, t * p))
            if n > 1 and rule(n, step, node)
        ]
    )
    for case, a in zip(CASES, said):
        if not isinstance(a, (list, tuple, set)) or not set(a) <= {"tp", "pp", "dp"}:
            return wrong(
                "no list of axes",
                f'crossing{case} returned {a!r}; return a list out of "tp", "pp" and "dp", which may be'
                " empty.",
            )
    as_sets = lambda answers: [sorted(a) for a in answers]
    truth = [crossing(*case) for case in CASES]
    if as_sets(said) == as_sets(truth):
        return right(
            "Also for 16,384 GPUs: TP 8 stays in its node, PP 16 and DP 128 leave it.",
            ("layouts", str(len(CASES)), str(len(CASES))),
        )
    case, mine, target = next((c, a, b) for c, a, b in zip(CASES, as_sets(said), as_sets(truth)) if a != b)
    figures = [(f"d = {case[0]}, t = {case[1]}, p = {case[2]}, nodes of {case[3]}", str(mine), str(target))]
    for other, name, text in (
        (
            leave(lambda n, step, node: n > node),
            "size where reach was meant",
            (
                "You compare a group's size with the node. But its ranks may stand apart: dp neighbours are"
                " t·p ranks apart, and two of them can be on two nodes."
            ),
        ),
        (outward, "TP outermost", "You count from dp outwards. tp is innermost: its ranks are neighbours."),
        (alone, "a group of one", "A group of one rank sends nothing, wherever it stands."),
        (
            leave(lambda n, step, node: n * step >= node),
            "a full node is not left",
            (
                "The reach is right. But a group that reaches over as many ranks as a node has fills it, and"
                " stays inside."
            ),
        ),
        (
            leave(lambda n, step, node: (n - 1) * step > node),
            "the far end is one rank further",
            (
                "First and last are (size − 1) · distance apart. They are on two nodes as soon as that is the"
                " node's size, not only when it is more."
            ),
        ),
        (
            leave(lambda n, step, node: step >= node),
            "neighbours only",
            (
                "You ask whether neighbours are on two nodes. They may share one while the ends of the group"
                " do not."
            ),
        ),
    ):
        if as_sets(said) == as_sets([other(*c) for c in CASES]):
            return wrong(name, text, *figures)
    return wrong(
        "other axes",
        "How far does a group reach? Its size times the distance of its neighbours: 1 for tp, t for pp, t·p"
        " for dp.",
        *figures,
    )


across = Exercise(
    "which axes leave the node",
    crossing,
    _judge_crossing,
    hints=[
        "How far apart are neighbours along an axis? tp: 1. pp: t. dp: t·p.",
        (
            "A group reaches over its size times that distance: t, t·p, d·t·p ranks. It leaves the node if"
            " that is more than the node holds."
        ),
        "A group of one rank sends nothing.",
    ],
)
