"""Drop 10: runs that ran out of memory, distinguished by their traces, and remedies under one budget."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from operator import eq

from drops.d10.runs import CAUSES, Run, crash, load
from helpers.practice import engine
from three_axes.table import human

# -- practice: name the cause ---------------------------------------------------------------------


def diagnose(tokens, peaks):
    """Why did the run end out of memory? One of "optimizer state", "leak", "long batch", "gather on rank 0".

    tokens[step]: the longest sequence of that step. peaks[step][rank]: the most bytes that the rank held in
    it; the last step failed.
    """
    # Ranks first: only a gather fills one of them. Then tokens. Then time: Adam's states come early.
    last = peaks[-1]
    if max(last) > 1.1 * min(last):
        return "gather on rank 0"
    if tokens[-1] > tokens[0]:
        return "long batch"
    if len(peaks) <= 2:
        return "optimizer state"
    return "leak"


RECORDED = {1: "long batch", 2: "gather on rank 0", 3: "optimizer state", 4: "leak"}  # incident: cause
SIGNATURES = {
    "optimizer state": "All ranks rise together between the first step and the second, and there is no third."
    " Adam makes its state in the first optimizer step.",
    "leak": "All ranks rise a little in every step, with batches of one size. Something is kept that nobody"
    " needs.",
    "long batch": "In one step, be it the second, the sequences are longer, and all ranks rise with them."
    " Activations grow with s.",
    "gather on rank 0": "Level, and then rank 0 alone rises. Something collects everybody's tensors on it.",
}
# (the cause, the answer) -> the mistake's name
TAKEN = {
    (was, answer): f"{answer} where it was {was}" for was, answer in itertools.permutations(CAUSES, 2)
} | {
    ("gather on rank 0", "long batch"): "one rank is not all ranks",
    ("long batch", "leak"): "a spike is not a slope",
    ("optimizer state", "leak"): "a step up is not a slope",
    ("leak", "long batch"): "a slope is not a spike",
}


@cache
def _ended() -> list[tuple[str, str, Run]]:
    """(name, cause, run) of each run: the recorded runs, runs of a smaller model that are made now, and the
    recorded runs changed so that ranks hold different amounts.
    """
    fresh = [(cause, crash(cause, budget=4.65e6, at=2, hidden=48)) for cause in CAUSES]
    # With these the number of steps alone decides nothing: a long batch in the second step, a leak that ends
    # in the third.
    fresh.append(("long batch", crash("long batch", budget=4.65e6, at=1, hidden=48)))
    fresh.append(("leak", crash("leak", budget=4.45e6, hidden=48)))
    recorded = [(f"Incident {k}", cause, load(k)) for k, cause in RECORDED.items()]
    uneven = [
        (f"{which}, its ranks 300 bytes apart", cause, _uneven(run, more))
        for which, cause, run in recorded
        for more in (300, -300)
    ]
    return recorded + [("A run of a smaller model, just now", *ended) for ended in fresh] + uneven


def _uneven(run: Run, more: int) -> Run:
    """The run with uneven ranks: each holds `more` bytes more than the rank before it. In a run of more than
    three steps the second step is repeated.
    """
    peaks = [[held + more * rank for rank, held in enumerate(step)] for step in run.peaks]
    level = 1 if len(peaks) > 3 else len(peaks)
    again = lambda steps: steps[: level + 1] + steps[level:]
    return replace(run, peaks=again(peaks), tokens=again(run.tokens))


def _taken(seen: engine.Run, _) -> tuple[str, str] | None:
    """(mistake, a text on the run) for the first run with a wrong answer; None if there is none."""
    wrong = ((*ended, answer) for ended, answer in zip(_ended(), seen.values) if answer != ended[1])
    which, was, run, answer = next(wrong, [None] * 4)
    if not run:
        return None
    steps = run.peaks if len(run.peaks) <= 3 else run.peaks[:2] + run.peaks[-2:]
    peaks = " → ".join(human(max(held)) for held in steps) + f"; its emptiest: {human(min(steps[-1]))}"
    return TAKEN[was, answer], (
        f"{which}: you say {answer}, it was {was}. {SIGNATURES[was]} (Its fullest rank: {peaks}; sequences of"
        f" {run.tokens[0]}, at the end {run.tokens[-1]}.)"
    )


signature = engine.Asked(
    "diagnose four traces",
    diagnose,
    minutes=8,
    hints=[
        "Look at the last step first. Is it one rank, or all of them? max and min of peaks[-1]:"
        " 7.10 and 5.49 MB in incident 2.",
        "All of them: were the sequences of that step longer than before?",
        "Neither: how long did it live? The optimizer's state comes in the second step. A leak takes its"
        " time.",
    ],
    cases=lambda: [(run.tokens, run.peaks) for _, _, run in _ended()],
    reads=lambda answer: CAUSES[CAUSES.index(answer.strip())],
    praise="Four recorded runs, also on uneven ranks, and six of a smaller model that crashed here.",
    figures=lambda seen, truth: [
        ("runs told apart", str(sum(map(eq, seen.values, truth.values))), str(len(truth.values)))
    ],
    finds=_taken,
)
