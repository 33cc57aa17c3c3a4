"""Drop 14's practice: three of the reviewer's questions."""

from __future__ import annotations

from collections.abc import Callable

from ....table import human
from ...practice import Answer, Exercise, Mistake, ask, proven, right, wrong


def meeting(n, d, t, p, m, node):
    """(bytes of states on a GPU with ZeRO-1, bubble as a share of wall time, the axes that cross nodes)."""
    held = n / (t * p)
    states_bytes = 4 * held + 12 * held / d
    bubble = (p - 1) / (m + p - 1)
    strides = {"tp": (t, 1), "dp": (d, t), "pp": (p, t * d)}
    crossing = {axis for axis, (size, stride) in strides.items() if size > 1 and size * stride > node}
    return states_bytes, bubble, crossing


CASES = (
    (70_553_706_496, 4, 8, 2, 32, 8),
    (70_553_706_496, 4, 4, 4, 32, 8),
    (30e9, 2, 2, 2, 16, 8),
    (70_553_706_496, 1, 8, 8, 128, 8),
    (70_553_706_496, 8, 8, 1, 16, 8),
    (1e9, 8, 1, 1, 4, 8),
    (175e9, 2, 16, 2, 16, 8),
    (30e9, 4, 2, 2, 16, 8),
    (8e9, 16, 4, 1, 16, 8),
)


LIE = (
    "On a GPU lie N/(t·p) parameters with 2 bytes of weight and 2 of gradient each; only the 12 of master"
    " copy, m and v are divided by d."
)
IDLE = "Of m + p − 1 slots p − 1 are idle."
STATES = (
    Mistake(
        "Megatron-LM's bytes, not 16",
        "6 + 12/d are Megatron-LM's, which sums gradients in float32. Here they take 2 bytes: 4 + 12/d.",
        lambda n, d, cut: (6 + 12 / d) * n / cut,
    ),
    Mistake(
        "gigabytes, not bytes",
        "Your numbers are 10⁹ times too small: the check asks for bytes.",
        lambda n, d, cut: (4 + 12 / d) * n / cut / 1e9,
    ),
) + tuple(
    Mistake(name, LIE, of)
    for name, of in (
        ("ZeRO-1 divides everything", lambda n, d, cut: 16 * n / (cut * d)),
        ("gradients not divided by t·p", lambda n, d, cut: 2 * n + 2 * n / cut + 12 * n / (cut * d)),
        ("nothing divided by d", lambda n, d, cut: 16 * n / cut),
        ("the model is not divided by t·p", lambda n, d, cut: 4 * n + 12 * n / d),
        ("the optimizer is not divided by t·p", lambda n, d, cut: 4 * n / cut + 12 * n / d),
        ("the master copy is forgotten", lambda n, d, cut: 4 * n / cut + 8 * n / (cut * d)),
        ("ZeRO-2, not ZeRO-1", lambda n, d, cut: 2 * n / cut + 14 * n / (cut * d)),
        ("the gradients are forgotten", lambda n, d, cut: 2 * n / cut + 12 * n / (cut * d)),
        ("weights and gradients divided by d, the optimizer not", lambda n, d, cut: (12 + 4 / d) * n / cut),
        ("nothing divided", lambda n, d, cut: 16 * n),
    )
)
BUBBLES = tuple(
    Mistake(name, IDLE, of)
    for name, of in (
        ("idle over ideal time", lambda p, m: (p - 1) / m),
        ("p where p − 1 was meant", lambda p, m: p / (m + p)),
        ("p where p − 1 was meant", lambda p, m: p / (m + p - 1)),
        ("p where p − 1 was meant", lambda p, m: (p - 1) / (m + p)),
        ("the busy share", lambda p, m: m / (m + p - 1)),
        ("percent instead of a share", lambda p, m: 100 * (p - 1) / (m + p - 1)),
        ("nothing but 0", lambda p, m: 0.0),
    )
)
_axes = lambda t, d, p: {"tp": t, "pp": p, "dp": d}


def _reaching(order: str, leaves: Callable = lambda size, step, node: size * step > node) -> Callable:
    """Axes whose groups leave the node, where the first axis in `order` is innermost."""

    def crossing(d, t, p, node):
        sizes, step, leaving = _axes(t, d, p), 1, set()
        for axis in order.split():
            if sizes[axis] > 1 and leaves(sizes[axis], step, node):
                leaving.add(axis)
            step *= sizes[axis]
        return leaving

    return crossing


CROSSING = (
    Mistake(
        "the whole job, not each group",
        "All ranks of the job do not fit a node, but a group of one axis may. Ask it for each: how many"
        " ranks, how far apart?",
        lambda d, t, p, node: (
            {axis for axis, size in _axes(t, d, p).items() if size > 1} if d * t * p > node else set()
        ),
    ),
    Mistake(
        "the whole job, not each group",
        "All ranks of the job do not fit a node, but a group of one axis may; and an axis of size 1 crosses"
        " nothing.",
        lambda d, t, p, node: {"tp", "pp", "dp"} if d * t * p > node else set(),
    ),
    Mistake(
        "TP outermost",
        "TP is innermost: ranks 0 to t − 1 are a group, neighbours on one node while it holds them.",
        _reaching("pp dp tp"),
    ),
    Mistake(
        "DP and PP changed places",
        "You count as if PP's stages were t ranks apart and DP's replicas t·p. Here PP is outermost: DP's"
        " replicas are t apart, PP's stages t·d.",
        _reaching("tp pp dp"),
    ),
    Mistake(
        "size where reach was meant",
        "You compare a group's size with the node. Its ranks stand apart: the reach is size times stride.",
        _reaching("tp dp pp", lambda size, step, node: size > node),
    ),
    Mistake(
        "a full node is not left",
        "A group that reaches over as many ranks as a node has fills it, and stays inside.",
        _reaching("tp dp pp", lambda size, step, node: size * step >= node),
    ),
    Mistake(
        "neighbours only",
        "You ask whether neighbours are on two nodes. They may share one while the ends of the group do not.",
        _reaching("tp dp pp", lambda size, step, node: step >= node),
    ),
    Mistake(
        "a replica smaller than a node keeps PP inside",
        "A replica's t·p ranks fit a node, but they are not neighbours: PP is outermost, its stages t·d ranks"
        " apart.",
        lambda d, t, p, node: _reaching("tp dp pp")(d, t, p, node) - ({"pp"} if t * p <= node else set()),
    ),
)


ALL = {"tp", "dp", "pp"}
STAYING = tuple(
    Mistake(
        "the axes that stay, not those that cross",
        "You name the axes whose groups stay inside a node. Asked are those that leave it.",
        of,
    )
    for of in (
        _reaching("tp dp pp", lambda size, step, node: size * step <= node),
        lambda d, t, p, node: {
            axis for axis, reach in (("tp", t), ("dp", t * d), ("pp", t * d * p)) if reach <= node
        },
        lambda d, t, p, node: ALL - _reaching("tp dp pp")(d, t, p, node),
    )
)


def _judge_meeting(attempted) -> Answer:
    replies = ask(attempted, CASES)
    for case, mine in zip(CASES, replies):
        if (
            not isinstance(mine, tuple)
            or len(mine) != 3
            or not isinstance(mine[2], (set, frozenset))
            or not mine[2] <= ALL
            or not all(isinstance(x, (int, float)) for x in mine[:2])
        ):
            return wrong(
                "not three answers",
                f"{_described(case)}: you return {mine!r}; return bytes, a share, and a set of 'tp', 'dp' and"
                " 'pp', such as {'dp'}.",
            )
    near = lambda a, b: abs(a - b) <= 0.005 * max(abs(a), abs(b)) + 1e-12
    names = lambda axes: ", ".join(sorted(map(str, axes))) or "none"
    questions = (
        (
            "states on a GPU",
            STATES,
            lambda n, d, t, p, m, node: (n, d, t * p),
            near,
            human,
            "other bytes",
            LIE,
        ),
        (
            "bubble",
            BUBBLES,
            lambda n, d, t, p, m, node: (p, m),
            near,
            "{:.3f}".format,
            "another bubble",
            IDLE,
        ),
        (
            "crossing",
            CROSSING + STAYING,
            lambda n, d, t, p, m, node: (d, t, p, node),
            lambda a, b: a == b,
            names,
            "groups misplaced",
            "Neighbours along tp are 1 apart, along dp t, along pp t·d. A group of size k with stride s"
            " reaches over k·s ranks.",
        ),
    )
    for i, (what, mistakes, of, alike, show, otherwise, text) in enumerate(questions):
        mine, truth = [answer[i] for answer in replies], [meeting(*case)[i] for case in CASES]
        off = next((k for k, pair in enumerate(zip(mine, truth)) if not alike(*pair)), None)
        if off is not None:
            mistake = proven(mine, [of(*case) for case in CASES], mistakes, alike)
            sizes = _axes(*(CASES[off][k] for k in (2, 1, 3)))
            alone = sorted(set(replies[off][2]) - meeting(*CASES[off])[2])
            if what == "crossing" and not mistake and {sizes.get(axis) for axis in alone} == {1}:
                return wrong(
                    "an axis of size one",
                    f"{_described(CASES[off])}: {alone[0]} has one rank to a group and sends nothing.",
                )
            return wrong(
                mistake.name if mistake else otherwise,
                f"{_described(CASES[off])}: {mistake.text if mistake else text}",
                (what, show(mine[off]), show(truth[off])),
            )
    return right(
        "Three answers for nine layouts. You can say them in a meeting, and the reviewer can redo them.",
        ("layouts", "9", "9"),
    )


def _described(case: tuple) -> str:
    n, d, t, p, m, node = case
    return f"N = {n / 1e9:.3g}·10⁹, DP {d}, TP {t}, PP {p}, m = {m}, nodes of {node}"


defend = Exercise(
    "three of the reviewer's questions, for any layout",
    meeting,
    _judge_meeting,
    minutes=8,
    hints=[
        (
            "N/(t·p) parameters are on a GPU before ZeRO. Weights and gradients take 2 bytes each and stay"
            " whole; ZeRO-1 cuts the other 12 over d."
        ),
        (
            "A pipeline of p stages and m microbatches has m + p − 1 slots, and each stage idles in p − 1 of"
            " them."
        ),
        (
            "TP is innermost: stride 1. DP: stride t. PP: stride t·d. A group of k ranks with stride s stays"
            " inside a node when k·s is at most the node's size. An axis of size 1 crosses nothing."
        ),
    ],
)
