"""Drop 10's practice: name the cause, and the cheapest remedy."""

from __future__ import annotations

from ....table import human
from ...practice import Answer, Exercise, ask, right, wrong
from .shown import CAUSES, LADDER_BUDGET, REMEDIES, attempt, crash, load


def diagnose(tokens, peaks):
    """Why did the run end out of memory? One of "optimizer state", "leak", "long batch", "gather on rank 0".

    tokens[step]: the longest sequence of that step. peaks[step][rank]: the most bytes that the rank held in
    it; the last step failed.
    """
    last = peaks[-1]
    if max(last) > 1.1 * min(last):
        return "gather on rank 0"
    if tokens[-1] > tokens[0]:
        return "long batch"
    if len(peaks) <= 2:
        return "optimizer state"
    return "leak"


RECORDED = {1: "long batch", 2: "gather on rank 0", 3: "optimizer state", 4: "leak"}

SIGNATURES = {
    "optimizer state": (
        "All ranks rise together between the first step and the second, and there is no third. Adam makes its"
        " state in the first optimizer step."
    ),
    "leak": (
        "All ranks rise a little in every step, with batches of one size. Something is kept that nobody"
        " needs."
    ),
    "long batch": (
        "Level at first; then one step's sequences are longer, and all ranks rise with them."
        " Activations grow with s."
    ),
    "gather on rank 0": "Level, and then rank 0 alone rises. Something collects everybody's tensors on it.",
}


def _judge_diagnosis(attempted) -> Answer:
    recorded = {run: load(run) for run in (1, 2, 3, 4)}
    fresh = [crash(cause, at=2) for cause in CAUSES if cause != "leak"]  # a leak takes its time
    runs = [(f"incident {k}", run) for k, run in recorded.items()] + [
        ("a run just now", run) for run in fresh
    ]
    truth = [RECORDED[k] for k in (1, 2, 3, 4)] + [cause for cause in CAUSES if cause != "leak"]
    diagnoses = ask(attempted, [(run.tokens, run.peaks) for _, run in runs])
    for (where, run), mine, cause in zip(runs, diagnoses, truth):
        if mine not in CAUSES:
            return wrong(
                "no diagnosis",
                f"For {where} you return {mine!r}; the answers are {', '.join(map(repr, CAUSES))}.",
            )
        if mine == cause:
            continue
        name = {
            ("gather on rank 0", "long batch"): "one rank is not all ranks",
            ("gather on rank 0", "leak"): "one rank is not all ranks",
            ("long batch", "leak"): "a spike is not a slope",
            ("optimizer state", "leak"): "a step up is not a slope",
            ("leak", "long batch"): "a slope is not a spike",
        }.get((cause, mine), f"{mine} where it was {cause}")
        levels = " → ".join(
            human(max(p)) for p in ([*run.peaks[:2], *run.peaks[-2:]] if len(run.peaks) > 3 else run.peaks)
        )
        return wrong(
            name,
            f"{where.capitalize()}: you say {mine}, it was {cause}. {SIGNATURES[cause]} (Its fullest rank:"
            f" {levels}; sequences of {run.tokens[0]}, at the end {run.tokens[-1]}.)",
        )
    return right(
        "Four recorded runs and three that crashed just now, each told from its trace.",
        ("runs told apart", str(len(runs)), str(len(runs))),
    )


signature = Exercise(
    "diagnose four traces",
    diagnose,
    _judge_diagnosis,
    minutes=8,
    hints=[
        "Look at the last step first. Is it one rank, or all of them? max and min of peaks[-1].",
        "All of them: were the sequences of that step longer than before?",
        (
            "Neither: how long did it live? The optimizer's state comes in the second step. A leak takes its"
            " time."
        ),
    ],
)


def remedy():
    """The remedy that fits under the budget, computes nothing twice and moves nothing more: one of
    d10.REMEDIES.
    """
    return "4 microbatches"


def _judge_remedy(attempted) -> Answer:
    (name,) = ask(attempted)
    if name not in REMEDIES:
        return wrong("no remedy", f"You return {name!r}; the remedies are {', '.join(map(repr, REMEDIES))}.")
    tried = attempt(name)
    figures = [("peak of the fullest rank", human(tried["peak"]), f"at most {human(LADDER_BUDGET)}")]
    if not tried["fits"]:
        why = {
            "DP on 8 ranks": (
                "more DP fixes OOM",
                (
                    "Each rank still has the same share of a batch, and the whole model. More ranks make the"
                    " batch larger, not the rank's memory."
                ),
            ),
            "ZeRO-1": (
                "ZeRO shrinks activations",
                (
                    "ZeRO cuts states. Here the activations rose: they are the batch's, and no rank holds"
                    " another's."
                ),
            ),
            "ZeRO-3": (
                "ZeRO shrinks activations",
                "Even all of the states cut in four leave the activations as they are.",
            ),
        }
        title, text = why.get(name, ("nothing changed", "The same run ends the same way."))
        return wrong(title, f"Tried just now, and out of memory again: {tried['error']}. {text}", *figures)
    if name != remedy():
        price = {
            "recompute": "every block's forward runs twice: a third more compute",
            "TP + SP": "all-reduces in every layer, which drop 06 made you pay",
            "offload": "all that is kept travels to the host's memory and back",
        }[name]
        return wrong(
            "it fits, but costs more than it must",
            f"It fits. Its price: {price}. One remedy costs nearly nothing: the same work in smaller pieces.",
            *figures,
        )
    return right(
        "It fits, for the same work: gradients are added up over smaller pieces before the step.", *figures
    )


cheapest = Exercise(
    "the cheapest remedy",
    remedy,
    _judge_remedy,
    minutes=3,
    hints=[
        "What rose: states or activations? Read what the error says was held.",
        "Activations grow with the microbatch. Which remedies change that, and which change states only?",
        "Of those that fit: which one computes nothing twice and sends nothing more?",
    ],
)
