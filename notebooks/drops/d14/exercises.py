"""Drop 14: a layout for 70B on 64 GPUs defended, the real model traced, and the real 4-layer model trained on
whatever is there.
"""

from __future__ import annotations

from helpers.practice import Asked, Run, number
from three_axes.table import human

# -- practice: three of the reviewer's questions --------------------------------------------------


def meeting(n, d, t, p, m, node):
    """(bytes of states on a GPU with ZeRO-1, bubble as a share of wall time, the axes that cross nodes)."""
    # TP and PP cut all states, ZeRO-1 the optimizer's 12 bytes over d too.
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
QUESTIONS = {
    "states on a GPU": human,
    "bubble": lambda percent: f"{percent / 100:.3f}",
    "axes that cross nodes": lambda axes: ", ".join(sorted(axes)) or "none",
}


def _three_answers(answer) -> tuple[float, float, set]:
    """Bytes, percent, axes."""
    states_bytes, bubble, axes = answer
    if isinstance(axes, (str, dict)) and axes != {} or not set(axes) <= {"tp", "dp", "pp"}:
        raise ValueError(axes)
    return number(states_bytes), 100 * number(bubble), set(axes)


def _wrong(run: Run, truth: Run) -> tuple[int, int] | None:
    """(question, case) of the first wrong answer to the first question that has one."""
    places = ((i, k) for i in range(3) for k in range(len(CASES)))
    parts = lambda i, k: not defend.alike(run.values[k][i], truth.values[k][i])
    return next((place for place in places if parts(*place)), None)


class _OneByOne(Asked):
    """The first question with a wrong answer is judged, as if the others were answered right."""

    def _form(self, mine: Run, truth: Run):
        said = super()._form(mine, truth)
        if not said and (place := _wrong(mine, truth)):
            i = place[0]
            both = zip(mine.values, truth.values)
            mine.ranks[0]["values"] = [(*right[:i], got[i], *right[i + 1 :]) for got, right in both]
        return said


def _unnamed(run: Run, truth: Run) -> str:
    """The row of what no edit does."""
    question, case = _wrong(run, truth) or (None, None)
    if question != 2:
        return {0: "other bytes", 1: "another bubble"}.get(question, "")
    _, d, t, p, *_ = CASES[case]
    more = run.values[case][2] - truth.values[case][2]
    alone = more and all({"tp": t, "dp": d, "pp": p}[axis] == 1 for axis in more)
    return "an axis of size one" if alone else "groups misplaced"


def _where(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    if not (place := _wrong(run, truth)):
        return [("layouts", str(len(run.values)), str(len(CASES)))]
    (i, k), (n, d, t, p, m, node) = place, CASES[place[1]]
    what, show = list(QUESTIONS.items())[i]
    at = f"N = {n / 1e9:.3g}·10⁹, DP {d}, TP {t}, PP {p}, m = {m}, nodes of {node}"
    return [(f"{what}, {at}", show(run.values[k][i]), show(truth.values[k][i]))]


defend = _OneByOne(
    "three of the reviewer's questions, for any layout",
    meeting,
    minutes=8,
    hints=[
        "N/(t·p) parameters are on a GPU before ZeRO. Weights and gradients take 2 bytes each and stay"
        " whole; ZeRO-1 cuts the other 12 over d.",
        "A pipeline of p stages and m microbatches has m + p − 1 slots, and each stage idles in p − 1 of"
        " them.",
        "TP is innermost: stride 1. DP: stride t. PP: stride t·d. A group of k ranks with stride s stays"
        " inside a node when k·s is at most the node's size. An axis of size 1 crosses nothing.",
    ],
    cases=CASES,
    reads=_three_answers,
    tolerance=0.005,
    praise="Three answers for nine layouts. You can say them in a meeting, and the reviewer can redo them.",
    figures=_where,
    finds=_unnamed,
)
