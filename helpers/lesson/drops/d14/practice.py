"""Drop 14's practice: three of the reviewer's questions."""

from __future__ import annotations

from ....table import human
from ...practice import Answer, Exercise, ask, right, wrong


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


def _judge_meeting(attempted) -> Answer:
    said = ask(attempted, CASES)
    for case, mine in zip(CASES, said):
        n, d, t, p, m, node = case
        where = f"N = {n:.3g}, DP {d}, TP {t}, PP {p}, m = {m}"
        if (
            not isinstance(mine, tuple)
            or len(mine) != 3
            or not isinstance(mine[2], (set, frozenset))
            or not all(isinstance(x, (int, float)) for x in mine[:2])
        ):
            return wrong(
                "not three answers",
                f"{where}: you return {mine!r}; return bytes, a share, and a set of names such as {{'dp'}}.",
            )
        held, bubble, crossing = meeting(*case)
        close = lambda a, b: abs(a - b) <= 0.005 * max(abs(a), abs(b), 1e-9)
        figure = ("states on a GPU", human(mine[0]), human(held))
        if not close(mine[0], held):
            part, state = (
                n / (t * p),
                {
                    "ZeRO-1 divides everything": 16 * n / (t * p * d),
                    "gradients not divided by t·p": 2 * n + 2 * n / (t * p) + 12 * n / (t * p * d),
                    "nothing divided by d": 16 * n / (t * p),
                    "the model is not divided by t·p": 4 * n + 12 * n / d,
                    "the master copy is forgotten": 4 * n / (t * p) + 8 * n / (t * p * d),
                },
            )
            state["ZeRO-2, not ZeRO-1"] = 2 * part + 14 * part / d
            name = next((name for name, value in state.items() if close(mine[0], value)), "other bytes")
            return wrong(
                name,
                f"{where}: on a GPU lie N/(t·p) parameters with 2 bytes of weight and 2 of gradient each;"
                " only the 12 of master copy, m and v are divided by d.",
                figure,
            )
        if not close(mine[1], bubble) and not (mine[1] == bubble == 0):
            name = (
                "idle over ideal time"
                if p > 1 and close(mine[1], (p - 1) / m)
                else "p − 1 slots forgotten"
                if p > 1 and close(mine[1], p / (m + p))
                else "another bubble"
            )
            return wrong(
                name,
                f"{where}: of m + p − 1 slots p − 1 are idle.",
                ("bubble", f"{mine[1]:.3f}", f"{bubble:.3f}"),
            )
        if mine[2] != crossing:
            sizes = {"tp": t, "pp": p, "dp": d}
            alone = [axis for axis in mine[2] - crossing if sizes.get(axis) == 1]
            if alone:
                return wrong(
                    "an axis of size one", f"{where}: {alone[0]} has one rank to a group and sends nothing."
                )
            if mine[2] - crossing and mine[2] == {axis for axis, size in sizes.items() if size > 1}:
                return wrong(
                    "the whole job, not each group",
                    f"{where}: {d * t * p} ranks do not fit a node of {node}, but a group of one axis may."
                    " Ask it for each: how many ranks, how far apart?",
                )
            if crossing - mine[2] == {"pp"} and t * p <= node:
                return wrong(
                    "a replica smaller than a node keeps PP inside",
                    f"{where}: a replica takes {t * p} ranks, fewer than a node of {node} has. But PP is"
                    f" outermost: its stages are {t * d} ranks apart, and {p} of them reach over {d * t * p}"
                    " ranks.",
                )
            if "tp" in mine[2] - crossing:
                return wrong(
                    "TP outermost",
                    f"{where}: TP is innermost. Ranks 0 to {t - 1} are a group, on one node of {node}.",
                )
            return wrong(
                "groups misplaced",
                f"{where}: neighbours along tp are 1 apart, along dp t = {t}, along pp t·d = {t * d}. A group"
                f" of size k with stride s reaches over k·s ranks, and a node has {node}.",
                ("crossing", ", ".join(sorted(mine[2])) or "none", ", ".join(sorted(crossing)) or "none"),
            )
    return right(
        "Three answers for nine layouts. You can say them in a meeting, and the reviewer can redo them.",
        ("layouts", "9", "9"),
    )


defend = Exercise(
    "three of the reviewer's questions, for any layout",
    meeting,
    _judge_meeting,
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
