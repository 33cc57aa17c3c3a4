"""b3's second practice: two meshes over the same ranks, and whose gradients are reduced over whom."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ....runtime.world import World
from ...practice import Answer, Exercise, right, wrong


def groups_of(rank, ranks, tp, ep):
    """Whom `rank` of `ranks` meets: {"tp": [...], "dp": [...], "ep": [...], "edp": [...]}, rising lists.

    Attention: tp is innermost, dp the rest. Experts: ep is innermost, over the same ranks, edp the rest.
    tp: the ranks that share attention's matrices. dp: those whose gradients of attention are averaged with
    this rank's. ep: those that this rank exchanges tokens with. edp: those that hold the same experts, whose
    gradients are summed.
    """
    inner = lambda size: list(range(rank // size * size, rank // size * size + size))
    outer = lambda size: list(range(rank % size, ranks, size))
    return {"tp": inner(tp), "dp": outer(tp), "ep": inner(ep), "edp": outer(ep)}


CASES = [(8, 2, 4), (8, 4, 2), (8, 2, 8), (8, 1, 4), (16, 4, 8), (16, 8, 4), (8, 2, 2)]


def _unfolded(rank: int, ranks: int, tp: int, ep: int) -> dict:
    """Experts inside dp: ep and edp cut the ranks of dp, as frameworks did before."""
    dp = list(range(rank % tp, ranks, tp))
    at, ep = dp.index(rank), min(ep, len(dp))
    return groups_of(rank, ranks, tp, ep) | {"ep": dp[at // ep * ep :][:ep], "edp": dp[at % ep :: ep]}


MISTAKES: dict[str, tuple[Callable, str]] = {
    "experts' gradients averaged over all of dp": (
        lambda rank, ranks, tp, ep: (g := groups_of(rank, ranks, tp, ep)) | {"edp": g["dp"]},
        "The ranks of dp hold the same attention, but other experts: you would average expert 0 with"
        " expert 1."
        " An expert's gradient is summed over the ranks that hold that expert, edp. (Tokens of the others"
        " have come to it already.)",
    ),
    "experts' gradients summed over all ranks": (
        lambda rank, ranks, tp, ep: groups_of(rank, ranks, tp, ep) | {"edp": list(range(ranks))},
        "Most of these ranks hold other experts. An expert's gradient is summed over the ranks that hold it.",
    ),
    "experts inside dp, not folded": (
        _unfolded,
        "You let tokens go to ranks of dp alone, which are tp apart. Folded, the experts' mesh does not know"
        " attention's: ep is innermost there, so that its ranks are neighbours in a node.",
    ),
    "ep and edp exchanged": (
        lambda rank, ranks, tp, ep: (g := groups_of(rank, ranks, tp, ep)) | {"ep": g["edp"], "edp": g["ep"]},
        "Tokens go where other experts are: ep. Gradients are summed where the same experts are: edp.",
    ),
    "tp and dp exchanged": (
        lambda rank, ranks, tp, ep: (g := groups_of(rank, ranks, tp, ep)) | {"tp": g["dp"], "dp": g["tp"]},
        "tp is innermost: its ranks are neighbours.",
    ),
}


def _judge(attempt) -> Answer:
    asked = [(rank, *case) for case in CASES for rank in range(case[0])]
    with World(8, timeout=8) as world:
        answers = world.run(lambda: [attempt(*one) for one in asked])[0]
        try:
            mine = [
                {axis: sorted(int(r) for r in g[axis]) for axis in ("tp", "dp", "ep", "edp")} for g in answers
            ]
        except (TypeError, KeyError, ValueError):
            return wrong("no groups", "Return a dictionary with tp, dp, ep and edp, each a list of ranks.")
        truth = [groups_of(*one) for one in asked]
        if mine != truth:
            one, is_, target = next((a, b, c) for a, b, c in zip(asked, mine, truth) if b != c)
            axis = next(axis for axis in target if is_[axis] != target[axis])
            figure = (
                f"rank {one[0]} of {one[1]}, tp {one[2]}, ep {one[3]}: its {axis}",
                str(is_[axis]),
                str(target[axis]),
            )
            for name, (other, why) in MISTAKES.items():
                if mine == [other(*one) for one in asked]:
                    return wrong(name, why, figure)
            groups = [
                (rank, ranks, members) for (rank, ranks, *_), g in zip(asked, mine) for members in g.values()
            ]
            if any(not set(members) <= set(range(ranks)) for _, ranks, members in groups):
                return wrong("ranks that do not exist", "Ranks are 0 to ranks − 1.", figure)
            if any(rank not in members for rank, _, members in groups):
                return wrong(
                    "a rank outside its own group",
                    "Every rank is a member of its four groups. Where does the group of rank r begin?",
                    figure,
                )
            if any(len(b[axis]) != len(c[axis]) for b, c in zip(mine, truth) for axis in c):
                return wrong(
                    "a group of another size",
                    "tp and ep say how many ranks their groups have. dp has ranks / tp, edp ranks / ep.",
                    figure,
                )
            return wrong(
                "other groups",
                "tp and ep are innermost in their meshes: neighbours. dp and edp are the rest: ranks one"
                " tp, or"
                " one ep, apart.",
                figure,
            )

        def meet():
            """Sum a one in each group of 8 ranks, tp 2, ep 4, as the attempt says."""
            everywhere = [attempt(rank, 8, 2, 4) for rank in range(8)]
            sums = {}
            for axis in ("tp", "dp", "ep", "edp"):
                for members in sorted({tuple(g[axis]) for g in everywhere}):
                    made = dist.new_group(list(members))
                    if dist.get_rank() in members:
                        dist.all_reduce(x := torch.ones(1), group=made)
                        sums[axis] = int(x.item())
            return sums

        met = world.run(meet)[0]
    return right(
        "Two meshes over the same ranks, and on eight real ranks every group met.",
        ("ranks that met along " + ", ".join(met), str(list(met.values())), "[2, 4, 4, 2]"),
    )


fold = Exercise(
    "the groups of a folded layout",
    groups_of,
    _judge,
    minutes=8,
    hints=[
        "Take the two meshes one by one. In attention's, the ranks of tp are neighbours, those of dp are tp"
        " apart.",
        "The experts' mesh is over the same ranks and asks nothing of tp: ep are neighbours, edp are ep"
        " apart.",
        "A group of neighbours begins at rank // size · size; one of ranks `size` apart at rank % size.",
    ],
)
