"""Drop 10: runs that ran out of memory, distinguished by their traces, and remedies under one budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
    if tokens[-1] > max(tokens[:-1]):
        return "long batch"
    if len(peaks) <= 2:
        return "optimizer state"
    return "leak"


RECORDED = {1: "long batch", 2: "gather on rank 0", 3: "optimizer state", 4: "leak"}  # incident: cause
SIGNATURES = {
    "optimizer state": "All ranks rise together between the first step and the second, and there is no third."
    " Adam makes its state in the first optimizer step.",
    "leak": "Of two steps with sequences of one length, all ranks hold more in the later one; with shorter"
    " sequences they may hold less. Something is kept that nobody needs.",
    "long batch": "In the last step, be it the second, the sequences are longer than in any step before, and"
    " all ranks rise with them. Activations grow with s.",
    "gather on rank 0": "Level, and then rank 0 alone rises. Something collects everybody's tensors on it.",
}
ONE, ALL = "rank 0 alone rose, not all ranks", "all ranks rose, not rank 0 alone"
TAKEN = {  # (the cause, the answer) -> the mistake's name
    ("optimizer state", "leak"): "a step up is not a slope",
    ("optimizer state", "long batch"): "memory rose, and the sequences were not longer",
    ("optimizer state", "gather on rank 0"): ALL,
    ("leak", "optimizer state"): "a slope is not a step up",
    ("leak", "long batch"): "a slope is not a spike",
    ("leak", "gather on rank 0"): ALL,
    ("long batch", "optimizer state"): "the sequences were longer, and Adam's states were not new",
    ("long batch", "leak"): "a spike is not a slope",
    ("long batch", "gather on rank 0"): ALL,
    ("gather on rank 0", "optimizer state"): ONE,
    ("gather on rank 0", "leak"): ONE,
    ("gather on rank 0", "long batch"): ONE,
}


LENGTHS = (40, 64, 52, 44, 56)  # tokens of a sequence, step by step, in runs with batches of several lengths
# What a run may have beside its cause -> whether it has it.
BESIDE: dict[str, Callable[[Run], bool]] = {
    "ended in their second step": lambda run: len(run.peaks) == 2,
    "ended in their third step": lambda run: len(run.peaks) == 3,
    "have uneven ranks from their first step": lambda run: len(set(run.peaks[0])) > 1,
    "have batches of several lengths": lambda run: len(set(run.tokens[:-1])) > 1,
    "ended in their second or third step": lambda run: len(run.peaks) <= 3,
    "have ranks that hold the same in their first step": lambda run: len(set(run.peaks[0])) == 1,
    "have batches of one length before the last": lambda run: len(set(run.tokens[:-1])) == 1,
}


@cache
def _ended() -> list[tuple[str, str, Run]]:
    """(name, cause, run) of each run: the recorded runs, runs of a smaller model that are made now, and the
    recorded runs changed so that ranks hold different amounts.
    """
    fresh = [
        ("optimizer state", crash("optimizer state", budget=4.65e6, hidden=48)),
        ("leak", crash("leak", budget=7e6, hidden=48, lengths=LENGTHS)),
        ("long batch", crash("long batch", budget=9e6, at=2, hidden=48, lengths=LENGTHS)),
        ("gather on rank 0", crash("gather on rank 0", budget=7e6, at=2, hidden=48, lengths=LENGTHS)),
        # With these the number of steps alone decides nothing.
        ("long batch", crash("long batch", budget=4.65e6, at=1, hidden=48)),
        ("leak", crash("leak", budget=4.45e6, hidden=48)),
    ]
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
    """(mistake, a text on a run) for the cause that is most often taken for one other; None if none is."""
    wrong = [(*ended, answer) for ended, answer in zip(_ended(), seen.values) if answer != ended[1]]
    if not wrong:
        return None
    (was, answer), _ = Counter((was, answer) for _, was, _, answer in wrong).most_common(1)[0]
    which, run = next((name, run) for name, cause, run, given in wrong if (cause, given) == (was, answer))
    steps = run.peaks if len(run.peaks) <= 3 else run.peaks[:2] + run.peaks[-2:]
    peaks = " → ".join(human(max(held)) for held in steps) + f"; its emptiest: {human(min(steps[-1]))}"
    name, missed = _missed(seen.values, was, answer)
    lengths = ", ".join(map(str, run.tokens))
    return name, (
        f"{which}: you say {answer}, it was {was}. {missed} {SIGNATURES[was]} (Its fullest rank: {peaks};"
        f" sequences of {lengths}.)"
    )


def _missed(answers: list[str], was: str, answer: str) -> tuple[str, str]:
    """(mistake, which runs with the cause `was` are taken for `answer`, and what only these have)."""
    same = [(run, given) for (_, cause, run), given in zip(_ended(), answers) if cause == was]
    taken, others = [run for run, a in same if a == answer], [run for run, a in same if a != answer]
    name, many = TAKEN[was, answer], f"{len(taken)} of the {len(same)} runs with this cause"
    if was not in answers:
        given = " and ".join(dict.fromkeys(answers))
        held = human(max(max(map(max, run.peaks)) for *_, run in _ended()))
        return name, f"Your function never answers {was}, only {given}; no rank holds more than {held}."
    only = (beside for beside, has in BESIDE.items() if all(map(has, taken)) and not any(map(has, others)))
    if others and (what := next(only, "")):
        return f"{name}, in runs that {what}", f"You say so of {many}: those that {what}."
    return name, f"You say so of {many}."


signature = engine.Asked(
    "diagnose four traces",
    diagnose,
    minutes=8,
    hints=[
        "Look at the last step first. Is it one rank, or all of them? max and min of peaks[-1]:"
        " 7.10 and 5.49 MB in incident 2.",
        "All of them: were the sequences of that step longer than in any step before?",
        "Neither: how long did it live? The optimizer's state comes in the second step. A leak takes its"
        " time.",
    ],
    cases=lambda: [(run.tokens, run.peaks) for _, _, run in _ended()],
    reads=lambda answer: CAUSES[CAUSES.index(answer.strip())],
    praise="Four recorded runs, also on uneven ranks, and six of a smaller model that crashed here, three of"
    " them with batches of several lengths.",
    figures=lambda seen, truth: [
        ("runs told apart", str(sum(map(eq, seen.values, truth.values))), str(len(truth.values)))
    ],
    finds=_taken,
)
