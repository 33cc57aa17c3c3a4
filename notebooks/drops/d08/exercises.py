"""Drop 08: three axes on eight ranks; who shares a group, which groups leave a node, and bytes by axis."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist

from helpers.practice import Answer, Asked, Run, right
from helpers.ranks import World
from three_axes.paper import Placement

from .cells import AXES, in_words, layouts

# -- practice: the groups of a rank ---------------------------------------------------------------


def groups(rank, sizes):
    """The ranks that `rank` shares a group with along each axis, itself among them, in rising order.

    sizes: axis -> size from the outermost axis to the innermost, such as {"pp": 2, "dp": 2, "tp": 2}. Return
    a list of ranks for each axis, {"pp": [...], "dp": [...], "tp": [...]}.
    """
    # From the innermost axis outwards: the stride of an axis is the product of all inner sizes.
    ranks, stride = {}, 1
    for axis, size in reversed(sizes.items()):
        first = rank - rank // stride % size * stride
        ranks[axis] = [first + i * stride for i in range(size)]
        stride *= size
    return ranks


# Megatron-LM's order, Llama 3's, and sizes that are not alike.
GRIDS = layouts("pp2 dp2 tp2, dp2 pp2 tp2, pp2 dp1 tp4, pp1 dp4 tp2, dp2 pp4 tp1, pp1 dp1 tp8, pp4 dp2 tp1")


def _first_wrong(run: Run, truth: Run) -> tuple[str, str] | None:
    """(mistake, a text that shows it) in the first grid that has one; None if none has."""
    off = [i for i, answer in enumerate(run.values) if answer != truth.values[i]]
    if not off:
        return None
    sizes, first = GRIDS[off[0] // 8], off[0] // 8 * 8
    mine, wanted = run.values[first : first + 8], truth.values[first : first + 8]
    says = lambda rank, axis: (
        f"With {in_words(sizes)} you put rank {rank} into the {axis} group {mine[rank][axis]}."
    )
    at = lambda rank: Placement(sizes).coordinates(rank)
    apart = lambda a, b: " and ".join(axis for axis in sizes if at(a)[axis] != at(b)[axis])
    for axis, size in sizes.items():
        for rank, g in enumerate(mine):
            if len(g[axis]) == size:
                continue
            text = f"{says(rank, axis)} It needs {size} ranks."
            if strange := [r for r in g[axis] if 0 <= r < 8 and r not in wanted[rank][axis]]:
                text += f" Rank {strange[0]} differs from it along {apart(rank, strange[0])}."
            elif missing := [r for r in wanted[rank][axis] if r not in g[axis]]:
                text += f" Rank {missing[0]}, which differs from it along {axis} alone, is missing."
            return "groups of another size", text
    for axis in sizes:
        for rank, ranks in enumerate(g[axis] for g in mine):
            if ranks != wanted[rank][axis] and (why := _no_part(rank, ranks, [g[axis] for g in mine])):
                return "groups that do not partition the ranks", f"{says(rank, axis)} {why}"
    for rank, g in enumerate(mine):
        if any(b - a != 1 for a, b in itertools.pairwise(g["tp"])):
            return "TP's ranks are no neighbours", says(rank, "tp")
    rank = off[0] - first
    axis = next(axis for axis in sizes if mine[rank][axis] != wanted[rank][axis])
    stranger = next(r for r in mine[rank][axis] if r not in wanted[rank][axis])
    both = " and ".join(
        ", ".join(f"{name} {place}" for name, place in at(r).items()) for r in (rank, stranger)
    )
    return "other groups", f"{says(rank, axis)} Ranks {rank} and {stranger} stand at {both}."


def no_group(rank: int, group: list[int], ranks: int) -> str:
    """Why this cannot be a group of the rank, a sentence; '' if the rank is in it, and all of them exist.
    ranks: their number.
    """
    if strange := [r for r in group if r not in range(ranks)]:
        return f"There is no rank {strange[0]}."
    return "" if rank in group else f"Rank {rank} is not in it."


def _no_part(rank: int, group: list[int], of_all: list[list[int]]) -> str:
    """Why a rank's group along an axis cannot be one, a sentence; '' if all of its members have it too."""
    if why := no_group(rank, group, len(of_all)):
        return why
    other = next((r for r in group if of_all[r] != group), None)
    return "" if other is None else f"Rank {other}, which is in it, you put into {of_all[other]}."


def met(groups_of: list[dict[str, list[int]]]) -> list[int]:
    """Make the groups of all ranks on real ranks, and all-reduce a 1 in each. Returns the number of ranks
    that rank 0 met along each axis.
    """

    def meet():
        sums = []
        for axis in groups_of[0]:
            groups = sorted({tuple(mine[axis]) for mine in groups_of})
            mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups])
            ones = torch.ones(1)
            dist.all_reduce(ones, group=mine)
            sums.append(int(ones))
        return sums

    with World(len(groups_of), timeout=8) as world:
        return world.run(meet)[0]


def _praised(run: Run) -> Answer:
    return right(
        "Every rank is in one group along each axis, whatever the order, and on eight real ranks every"
        " group of 2 × 2 × 2 met.",
        ("grids of eight ranks", str(len(GRIDS)), str(len(GRIDS))),
        (f"ranks that met along {', '.join(GRIDS[0])}", str(met(run.values[:8])), "[2, 2, 2]"),
    )


members = Asked(
    "the groups of a rank",
    groups,
    minutes=9,
    hints=[
        "Begin with the innermost axis, the last in `sizes`: its neighbours are 1 rank apart. How far apart"
        " are the next one's?",
        "Neighbours along an axis are `stride` apart, the product of the sizes further in. The coordinate is"
        " rank // stride % size.",
        "The group's first rank is rank − coordinate · stride; the others follow, one stride apart.",
    ],
    without=("Placement", "placement"),
    cases=[(rank, dict(grid)) for grid in GRIDS for rank in range(8)],
    reads=lambda answer: {axis: sorted(int(r) for r in answer[axis]) for axis in AXES},
    praise=_praised,
    finds=_first_wrong,
)


# -- practice: which axes leave the node ----------------------------------------------------------


def crossing(sizes, node):
    """Which axes have groups that leave a node of `node` ranks: a list of names out of `sizes`.

    sizes: the outermost axis first, the innermost last. All sizes and `node` are powers of two.
    """
    # A group spans its own size times all sizes inside it.
    axes, span = [], 1
    for axis, size in reversed(sizes.items()):
        span *= size
        if size > 1 and span > node:
            axes.append(axis)
    return axes


CASES: list[tuple[dict[str, int], int]] = [
    (sizes, node)
    for node, texts in (
        (4, "pp2 dp2 tp2, pp2 dp1 tp4, pp1 dp4 tp2, dp2 pp4 tp1, pp1 dp1 tp8"),
        (8, "pp1 dp2 tp4, dp16 pp4 tp8, pp2 dp4 tp8, pp4 dp2 tp2, dp4 pp2 tp2, pp8 dp1 tp8, pp1 dp8 tp1"),
    )
    for sizes in layouts(texts)
]


def _axes(answer) -> list[str]:
    if not isinstance(answer, (list, tuple, set)) or not set(answer) <= set(AXES):
        raise TypeError
    return sorted(answer)


def _first_off(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    """The first layout with another answer than the solution's; if there is none, the number of layouts."""
    for (sizes, node), mine, wanted in zip(CASES, run.values, truth.values):
        if mine != wanted:
            return [(f"{in_words(sizes)} nodes of {node}", str(mine), str(wanted))]
    return [("layouts", str(len(CASES)), str(len(CASES)))]


def _same(run: Run, truth: Run) -> tuple[str, str] | None:
    """The mistake if each axis is named always, or never, where it has more than one rank. An axis is taken
    by its name, or by its place in `sizes`.
    """
    if not any(run.values):
        return _reach(run, truth)
    answers = [(list(sizes), sizes, mine) for (sizes, _), mine in zip(CASES, run.values)]
    by_name = [{axis in mine for _, sizes, mine in answers if sizes[axis] > 1} for axis in AXES]
    by_place = [{a[i] in mine for a, sizes, mine in answers if sizes[a[i]] > 1} for i in range(len(AXES))]
    same = any(all(len(named) == 1 for named in by) for by in (by_name, by_place))
    return ("the same axes for every layout", "") if same else _reach(run, truth)


def _reach(run: Run, truth: Run) -> tuple[str, str] | None:
    """(mistake, how far its group reaches) for the first axis that is named wrongly, or left out."""
    for (sizes, node), mine, wanted in zip(CASES, run.values, truth.values):
        if off := set(mine) ^ set(wanted):
            axis = next(axis for axis in reversed(sizes) if axis in off)
            factors = list(sizes.values())[list(sizes).index(axis) :]
            reach = f"{' · '.join(map(str, factors))} = {math.prod(factors)} ranks"
            name = "an axis that leaves is left out" if axis in wanted else "an axis that stays is named"
            return name, f"With {in_words(sizes)} on nodes of {node}: a group of {axis} reaches over {reach}."
    return None


across = Asked(
    "which axes leave the node",
    crossing,
    minutes=6,
    hints=[
        "How far apart are neighbours along an axis? The product of the sizes that come after it in `sizes`.",
        "A group reaches over its size times that distance. It leaves the node if that is more than the node"
        " holds.",
        "A group of one rank sends nothing.",
    ],
    without=("Placement", "placement"),
    cases=CASES,
    reads=_axes,
    praise="Also for 512 GPUs: TP 8 stays in its node, PP 4 and DP 16 leave it.",
    figures=_first_off,
    finds=_same,
)
