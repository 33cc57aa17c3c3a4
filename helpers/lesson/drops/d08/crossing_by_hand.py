"""Drop 08's second practice: which groups leave a node."""

from __future__ import annotations

from collections.abc import Callable

from ....theory import placement
from ....theory.placement import Sizes
from ...practice import Answer, Exercise, ask, right, wrong
from .groups_by_hand import axes_of


def crossing(sizes, node):
    """Which axes have groups that leave a node of `node` ranks: a list of names out of `sizes`.

    sizes: the outermost axis first, the innermost last. The sizes divide the node, or the node them.
    """
    axes, span = [], 1
    for axis, size in reversed(sizes.items()):
        span *= size
        if size > 1 and span > node:
            axes.append(axis)
    return axes


CASES: list[tuple[Sizes, int]] = [
    (axes_of(text), node)
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


# Of a layout, the axes of more than one rank that have these names, or stand in these places.
_FIXED: list[Callable] = [
    *(
        lambda sizes, names=names: [a for a, n in sizes.items() if n > 1 and a in names]
        for names in ("pp", "dp", "tp", "pp dp", "pp tp", "dp tp")
    ),
    *(lambda sizes, first=first: [a for a in list(sizes)[:first] if sizes[a] > 1] for first in (1, 2)),
]


def _judge_crossing(attempt) -> Answer:
    given = ask(attempt, [(dict(sizes), node) for sizes, node in CASES])
    leave: Callable = lambda rule: (
        lambda sizes, node: [
            a for a, n in sizes.items() if n > 1 and rule(n, placement.stride(a, sizes), node)
        ]
    )
    inside_out: Callable = lambda sizes, node: crossing(dict(reversed(sizes.items())), node)
    alone: Callable = lambda sizes, node: [
        a for a, n in sizes.items() if n * placement.stride(a, sizes) > node
    ]
    for (sizes, node), a in zip(CASES, given):
        if not isinstance(a, (list, tuple, set)) or not set(a) <= set(sizes):
            return wrong(
                "no list of axes",
                f"crossing({sizes}, {node}) returned {a!r}; return a list of names out of `sizes`, which may"
                " be empty.",
            )
    as_sets = lambda answers: [sorted(a) for a in answers]
    without_ones = [[a for a in axes if sizes[a] > 1] for (sizes, _), axes in zip(CASES, given)]
    truth = [crossing(*case) for case in CASES]
    if as_sets(given) == as_sets(truth):
        return right(
            "Also for 16,384 GPUs: TP 8 stays in its node, PP 16 and DP 128 leave it.",
            ("layouts", str(len(CASES)), str(len(CASES))),
        )
    (sizes, node), mine, target = next(
        (c, a, b) for c, a, b in zip(CASES, as_sets(given), as_sets(truth)) if a != b
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
        (
            leave(lambda n, step, node: step > node),
            "neighbours only",
            (
                "You ask whether neighbours are on two nodes. They may share one while the ends of the"
                " group do not."
            ),
        ),
    ):
        named = as_sets([other(*c) for c in CASES])
        if as_sets(given) == named:
            return wrong(name, text, *figures)
        if as_sets(without_ones) == named:
            return wrong(name, f"{text} (And a group of one rank sends nothing.)", *figures)
    for kept in _FIXED:
        if as_sets(without_ones) == [sorted(kept(sizes)) for sizes, _ in CASES]:
            return wrong(
                "the same axes for every layout",
                "You name the axes by their names or places alone. Whether a group leaves the node depends on"
                " the sizes, and on the node.",
                *figures,
            )
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
    minutes=6,
    hints=[
        "How far apart are neighbours along an axis? The product of the sizes that come after it in `sizes`.",
        (
            "A group reaches over its size times that distance. It leaves the node if that is more than the"
            " node holds."
        ),
        "A group of one rank sends nothing.",
    ],
    without=("placement",),
)
