"""Drop 11: throughput lost on a larger cluster: where a step's time goes, by axis, measured and by theory."""

from __future__ import annotations

from functools import cache

from drops.d11.cluster import AXES, Measured, measure, undivided
from helpers.practice import Asked, Run, alike, first, number

# -- practice: split a loss into its causes -------------------------------------------------------


def causes(before, after):
    """Split the loss of a larger cluster into its causes: {"tp": share, "pp": share, "dp": share, "rest":
    share}, which sum to 1.

    before, after: {"ranks": n, "batch": sequences in a step, "parts": {"compute": seconds, "tp": ..., "pp":
    ..., "dp": ..., "rest": ...}}. Perfect scaling would make each part batch/ranks times what it was; what is
    beyond that is lost. A part that is shorter than that has gained: its share is negative. The loss of
    compute is left out.
    """
    # Perfect scaling multiplies the seconds of each part by `ratio`.
    ratio = (after["batch"] / after["ranks"]) / (before["batch"] / before["ranks"])
    beyond = {
        axis: after["parts"][axis] - ratio * before["parts"][axis] for axis in ("tp", "pp", "dp", "rest")
    }
    return {axis: seconds / sum(beyond.values()) for axis, seconds in beyond.items()}


def _case(ranks, batch, *seconds):
    return {"ranks": ranks, "batch": batch, "parts": dict(zip(("compute", *AXES, "rest"), seconds))}


EXAMPLES = [
    (_case(4, 8, 0.96, 0.2, 0.0, 0.0, 0.08), _case(8, 8, 0.48, 0.5, 0.0, 0.0, 0.1)),
    (_case(8, 64, 1.0, 0.1, 0.2, 0.0, 0.0), _case(64, 512, 1.0, 0.1, 0.2, 0.6, 0.0)),
    (_case(8, 64, 1.0, 0.0, 0.3, 0.0, 0.1), _case(16, 64, 0.6, 0.0, 0.4, 0.1, 0.1)),  # compute loses too
    (_case(8, 64, 1.0, 0.3, 0.0, 0.0, 0.1), _case(16, 64, 0.5, 0.1, 0.0, 0.2, 0.1)),  # TP gains
]


def _shared_out(run: Run, _) -> tuple[str, str] | None:
    totals = [sum(shares.values()) for shares in run.values]
    yours = ", ".join(f"{total:.2f}" for total in totals)
    off = any(abs(total - 1) > 0.01 for total in totals)
    only_last = all(abs(total - 1) <= 0.01 for total in totals[:-1])
    gained = " In the last TP has gained: its share is negative." * only_last
    one = all(sum(abs(x) > 0.005 for x in mine.values()) == 1 for mine in run.values)
    return first(
        {
            "shares that do not sum to one": off and f"In the four cases yours sum to {yours}.{gained}",
            "all of it blamed on one cause": one,
        }
    )


def _first_that_differs(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    pairs = list(zip(EXAMPLES, run.values, truth.values))
    at, *shares = next((pair for pair in pairs if not alike(*pair[1:], split.tolerance)), pairs[0])
    ranks, batch = (f"{at[0][what]} to {at[1][what]}" for what in ("ranks", "batch"))
    shown = [", ".join(f"{x} {share:.2f}" for x, share in case.items()) for case in shares]
    return [(f"{ranks} ranks, batch {batch}", *shown)]


split = Asked(
    "split the loss",
    causes,
    minutes=7,
    hints=[
        "What would perfect scaling make of a part? Work for one rank is batch / ranks. Everything should"
        " change in that ratio.",
        "ratio = (after batch / after ranks) / (before batch / before ranks). Beyond perfect is after -"
        " ratio · before, for each of tp, pp, dp, rest.",
        "Divide each by the sum of the four.",
    ],
    cases=EXAMPLES,
    reads=lambda shares: {axis: round(number(shares[axis]), 3) for axis in (*AXES, "rest")},
    tolerance=0.006,  # two digits are enough
    praise="The shares of all four cases sum to one, and name the axis.",
    figures=_first_that_differs,
    finds=_shared_out,
)


# -- practice: place the axes ---------------------------------------------------------------------


def place():
    """(d, t, p, m) for eight ranks in two nodes of four.

    A rank holds a quarter of the model at most, so t·p is at least 4.
    """
    # TP fills the node, as it did before; only DP's all-reduce crosses, once a step and under backward.
    return 2, 4, 1, 1


MARGIN = 1.25  # of the best known layout's seconds; a slow machine adds less than that


@cache
def _best() -> Measured:
    """The step of the best known layout, measured once for all tries."""
    return measure(*place())


def _four(answer) -> tuple[int, ...]:
    d, t, p, m = map(int, answer)
    if m < 1:
        raise ValueError(m)
    return d, t, p, m


def _steps(run: Run) -> tuple[Measured, Measured] | None:
    """The steps of the answer's layout and of the best known one, measured once for an answer; None if the
    layout is impossible. An answer that seems slower is measured again beside the best: the machine may have
    been busier.
    """
    layout, facts = run.values[0], run.ranks[0]
    d, t, p, _ = layout
    if min(d, t, p) < 1 or d * t * p != 8 or t * p < 4 or undivided(*layout):
        return None
    if "steps" not in facts:
        mine, best = _best() if layout == place() else measure(*layout), _best()
        if mine.seconds > MARGIN * best.seconds:
            best = measure(*place())
            mine = min(mine, measure(*layout), key=lambda step: step.seconds)
        facts["steps"] = mine, best
    return facts["steps"]


def _placed(run: Run, _) -> tuple[str, str] | None:
    d, t, p, m = run.values[0]
    if min(d, t, p) < 1 or d * t * p != 8:
        return "d·t·p is not 8", f"{d}·{t}·{p} = {d * t * p}."
    if t * p < 4:
        return "it does not fit", f"Each rank would hold 1/{t * p} of the model."
    if reason := undivided(d, t, p, m):
        return "sizes that do not divide", reason
    mine, best = _steps(run)
    if t > 4:
        return "TP scaled with the cluster", ""
    if mine.seconds <= MARGIN * best.seconds:
        return None
    if (d, t, p) == (2, 4, 1):
        return "microbatches without a pipeline", ""
    if p > 1 and m < 2 * p:
        bubble = (p - 1) / (m + p - 1)
        return "a starved pipeline", f"{p} stages and {m} microbatches: the bubble alone is {bubble:.0%}."
    if m > 2 * p and t > 1:
        return "more microbatches than the pipeline needs", ""
    return "slower than it could be", ""


def _seconds(run: Run, _) -> list[tuple[str, str, str]]:
    if not (steps := _steps(run)):
        return []
    mine, best = (f"{one.seconds:.2f}" for one in steps)
    still = ", ".join(f"{steps[0].parts[axis]:.2f}" for axis in AXES)
    return [
        ("seconds of a step, measured just now; the target is the best known", mine, best),
        ("standing still for tp, pp, dp", still, ""),
    ]


placing = Asked(
    "win it back",
    place,
    minutes=8,
    hints=[
        "Which axis waits most, and why? tp in every layer: keep it inside a node of four.",
        "t·p must be at least 4, and t at most 4. What is left of 8?",
        "With t = 4 the rest is 2: two stages, or two copies. Which of them has a bubble?",
    ],
    reads=_four,
    compares=False,
    praise="As good as the best known, within what such a measurement can tell.",
    figures=_seconds,
    finds=_placed,
)
