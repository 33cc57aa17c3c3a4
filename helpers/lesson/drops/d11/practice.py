"""Drop 11's practice: split a loss into its causes, and place the axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from ...practice import Answer, Exercise, Mistake, ask, proven, right, wrong
from .shown import Measured, measure


def causes(before, after):
    """Split the loss of a larger cluster into its causes: {"tp": share, "pp": share, "dp": share, "rest":
    share}, which sum to 1.

    before, after: {"ranks": n, "batch": sequences in a step, "parts": {"compute": seconds, "tp": ..., "pp":
    ..., "dp": ..., "rest": ...}}. Perfect scaling would make each part batch/ranks times what it was; what is
    beyond that is lost. A part that is shorter than that has gained: its share is negative.
    """
    ratio = (after["batch"] / after["ranks"]) / (before["batch"] / before["ranks"])
    beyond = {
        axis: after["parts"][axis] - ratio * before["parts"][axis] for axis in ("tp", "pp", "dp", "rest")
    }
    return {axis: seconds / sum(beyond.values()) for axis, seconds in beyond.items()}


def _case(ranks, batch, compute, tp, pp, dp, rest):
    return {
        "ranks": ranks,
        "batch": batch,
        "parts": {"compute": compute, "tp": tp, "pp": pp, "dp": dp, "rest": rest},
    }


EXAMPLES = [
    (_case(4, 8, 0.96, 0.2, 0.0, 0.0, 0.08), _case(8, 8, 0.48, 0.5, 0.0, 0.0, 0.1)),
    (_case(8, 64, 1.0, 0.1, 0.2, 0.0, 0.0), _case(64, 512, 1.0, 0.1, 0.2, 0.6, 0.0)),
    (_case(8, 64, 1.0, 0.0, 0.3, 0.0, 0.1), _case(16, 64, 0.5, 0.0, 0.4, 0.1, 0.1)),
    (_case(8, 64, 1.0, 0.3, 0.0, 0.0, 0.1), _case(16, 64, 0.5, 0.1, 0.0, 0.2, 0.1)),  # TP gains
]


AXES = ("tp", "pp", "dp", "rest")


def _compared(ratio: Callable, of: Sequence[str] = AXES, gain: Callable = lambda x: x) -> Callable:
    """The answer with another ratio(before, after), divided by the sum over `of` and not of the four, or with
    gain(seconds) for what is beyond perfect scaling.
    """

    def answers(before, after):
        lost = {x: gain(after["parts"][x] - ratio(before, after) * before["parts"][x]) for x in of}
        return {x: lost[x] / (sum(lost.values()) or 1) for x in AXES}

    return answers


_fair = lambda before, after: after["batch"] / after["ranks"] * before["ranks"] / before["batch"]
IN_ALL = ("compute", *AXES)
MISTAKES = (
    Mistake(
        "seconds compared as they are",
        "Each rank now has a smaller share of the work, so a part that stayed as long has lost: compare with"
        " what perfect scaling would make of it.",
        _compared(lambda before, after: 1.0),
    ),
    Mistake(
        "throughput compared at different batches",
        "One of the cases has a larger batch afterwards. Its steps may be longer without anything being lost:"
        " compare per sequence.",
        _compared(lambda before, after: before["ranks"] / after["ranks"]),
    ),
    Mistake(
        "the ratio upside down",
        "You scale by the work of a rank before over that after. Twice the ranks halve what is scaled.",
        _compared(lambda before, after: 1 / _fair(before, after)),
    ),
    Mistake(
        "the ratio upside down",
        "You scale by the ranks after over the ranks before. Twice the ranks halve what is scaled.",
        _compared(lambda before, after: after["ranks"] / before["ranks"]),
    ),
    Mistake(
        "the ratio of the batches alone",
        "You compare by the batch. A rank's work is batch / ranks.",
        _compared(lambda before, after: after["batch"] / before["batch"]),
    ),
    Mistake(
        "always half",
        "You scale each part by 1/2. That is right where the ranks double and the batch stays; one of the"
        " cases is another.",
        _compared(lambda before, after: 0.5),
    ),
    Mistake(
        "always half",
        "You scale each part by 1/2, and divide by a sum that has compute in it as well.",
        _compared(lambda before, after: 0.5, IN_ALL),
    ),
    Mistake(
        "what is large is not what was lost",
        "You look at the second run only. Some of it was there before, and scaled as it should.",
        _compared(lambda before, after: 0.0),
    ),
    Mistake(
        "what is large is not what was lost",
        "You look at the second run's whole step only. Some of it was there before, and scaled as it should.",
        _compared(lambda before, after: 0.0, IN_ALL),
    ),
    Mistake(
        "a gain taken for no loss",
        "In one of the cases a part became shorter than perfect scaling would make it. max(0, …) hides that"
        " gain, and the shares are then of more than was lost: its share is negative.",
        _compared(_fair, gain=lambda seconds: max(0.0, seconds)),
    ),
    Mistake(
        "a gain taken for a loss",
        "In one of the cases a part became shorter than perfect scaling would make it. abs() makes a loss of"
        " that gain: its share is negative.",
        _compared(_fair, gain=abs),
    ),
    Mistake(
        "the first run, not what was lost",
        "You divide up the first run. What was lost is in the second, beyond what perfect scaling makes of"
        " the first.",
        lambda before, after: _compared(lambda *_: 0.0)(after, before),
    ),
)


def _judge_causes(attempted) -> Answer:
    answers = ask(attempted, EXAMPLES)
    near = lambda a, b: all(abs(a[x] - b[x]) < 0.005 for x in AXES)
    for mine in answers:
        if not isinstance(mine, dict) or not set(AXES) <= set(mine):
            return wrong("no shares", f"You return {mine!r}; return a dictionary with tp, pp, dp and rest.")
        if not all(isinstance(mine[x], (int, float)) for x in AXES):
            return wrong("no shares", f"You return {mine!r}; each of tp, pp, dp and rest is a number.")
        if abs(sum(mine[x] for x in AXES) - 100) < 1:
            return wrong("percent where shares are asked for", "Yours sum to 100; shares sum to 1.")

    truth = [causes(*example) for example in EXAMPLES]
    show = lambda shares: ", ".join(f"{x} {shares[x]:.2f}" for x in AXES)
    off = next((i for i, (a, b) in enumerate(zip(answers, truth)) if not near(a, b)), None)
    if off is None:
        return right(
            "The shares of all four cases sum to one, and name the axis.",
            ("the case of this drop", show(answers[0]), show(truth[0])),
        )
    figures = [
        (
            (
                f"{EXAMPLES[off][0]['ranks']} to {EXAMPLES[off][1]['ranks']} ranks, batch"
                f" {EXAMPLES[off][0]['batch']} to {EXAMPLES[off][1]['batch']}"
            ),
            show(answers[off]),
            show(truth[off]),
        )
    ]
    if mistake := proven(answers, EXAMPLES, MISTAKES, near):
        return wrong(mistake.name, mistake.text, *figures)
    sums = [sum(mine[x] for x in AXES) for mine in answers]
    times = [
        a / b for mine, whole in zip(answers, truth) for a, b in ((mine[x], whole[x]) for x in AXES) if b
    ]
    if any(abs(total - 1) > 0.01 for total in sums):
        return wrong(
            "shares that do not sum to one",
            f"In the four cases yours sum to {', '.join(f'{total:.2f}' for total in sums)}; shares sum to 1."
            + (" Each is right but for that." if max(times) - min(times) < 0.01 else ""),
            *figures,
        )
    if all(sum(abs(mine[x]) > 0.005 for x in AXES) == 1 for mine in answers):
        return wrong(
            "all of it blamed on one cause",
            "In each case you give everything to one of the four. Which axes lost, and how much of the loss"
            " is each?",
            *figures,
        )
    return wrong(
        "other shares",
        "Lost is what is beyond perfect scaling: after - ratio · before, where ratio is the work of a rank"
        " after over the work of a rank before.",
        *figures,
    )


split = Exercise(
    "split the loss",
    causes,
    _judge_causes,
    minutes=7,
    hints=[
        (
            "What would perfect scaling make of a part? Work for one rank is batch / ranks. Everything should"
            " change in that ratio."
        ),
        (
            "ratio = (after batch / after ranks) / (before batch / before ranks). Beyond perfect is after -"
            " ratio · before, for each of tp, pp, dp, rest."
        ),
        "Divide each by the sum of the four.",
    ],
)


def place():
    """(d, t, p, m) for eight ranks in two nodes of four.

    A rank holds a quarter of the model at most, so t·p is at least 4.
    """
    return 2, 4, 1, 1


MARGIN = 1.25  # times the best known's seconds: what a slow machine adds is less


@cache
def _best() -> Measured:
    """The best known, measured once for all tries."""
    return measure(*place())


def _against_best(*layout: int) -> tuple[Measured, Measured]:
    """A layout and the best known, measured. One that seems slower is measured again beside it: the machine
    may have been busier now than it was then.
    """
    if layout == place():
        return _best(), _best()
    mine, best = measure(*layout), _best()
    if mine.seconds > MARGIN * best.seconds:
        best = measure(*place())
        mine = min(mine, measure(*layout), key=lambda one: one.seconds)
    return mine, best


def _judge_place(attempted) -> Answer:
    (answer,) = ask(attempted)
    try:
        d, t, p, m = (int(x) for x in answer)
    except (TypeError, ValueError):
        return wrong("no layout", f"You return {answer!r}; return four whole numbers d, t, p, m.")
    if min(d, t, p, m) < 1 or d * t * p != 8:
        return wrong(
            "d·t·p is not 8",
            f"{d}·{t}·{p} = {d * t * p}. The three sizes must multiply to the number of ranks.",
        )
    if t * p < 4:
        return wrong(
            "it does not fit",
            f"Each rank would hold 1/{t * p} of the model, and a quarter is the most that fits: t·p must be"
            " at least 4.",
        )
    try:
        mine, best = _against_best(d, t, p, m)
    except ValueError as e:
        return wrong("sizes that do not divide", str(e))
    figures = [
        (
            "seconds of a step, measured just now",
            f"{mine.seconds:.2f}",
            f"{best.seconds:.2f}, the best known",
        ),
        ("standing still for tp, pp, dp", ", ".join(f"{mine.parts[a]:.2f}" for a in ("tp", "pp", "dp")), ""),
    ]
    if t > 4:
        return wrong(
            "TP scaled with the cluster",
            "A node has four ranks, so a tp group of eight leaves it, and every layer waits for the slow"
            " ports. More ranks are no reason for a larger t.",
            *figures,
        )
    if mine.seconds <= MARGIN * best.seconds:
        return right("As good as the best known, within what such a measurement can tell.", *figures)
    if p == 1 and m > 1 and (d, t, p) == place()[:3]:
        return wrong(
            "microbatches without a pipeline",
            f"The axes are right. But with p = 1 there is no bubble to fill, and {m} microbatches start every"
            f" all-reduce {m} times.",
            *figures,
        )
    if p > 1 and m < 2 * p:
        return wrong(
            "a starved pipeline",
            f"{p} stages and {m} microbatches: the bubble alone is {(p - 1) / (m + p - 1):.0%}. More"
            " microbatches, or fewer stages.",
            *figures,
        )
    if m > 2 * p and t > 1:
        return wrong(
            "more microbatches than the pipeline needs",
            f"{m} microbatches start every all-reduce of a layer {m} times, and each time the ranks wait for"
            " the last of them. The bubble alone does not ask for so many.",
            *figures,
        )
    worst = max(("tp", "pp", "dp"), key=lambda a: mine.parts[a])
    return wrong(
        "slower than it could be",
        f"It fits. Observed: a step takes {mine.seconds / best.seconds:.2f} times the best known's, and a"
        f" rank stands still for {worst} {mine.parts[worst]:.2f} s of it. Which axis may cross the nodes most"
        " cheaply?",
        *figures,
    )


placing = Exercise(
    "win it back",
    place,
    _judge_place,
    minutes=8,
    hints=[
        "Which axis waits most, and why? tp in every layer: keep it inside a node of four.",
        "t·p must be at least 4, and t at most 4. What is left of 8?",
        "With t = 4 the rest is 2: two stages, or two copies. Which of them has a bubble?",
    ],
)
