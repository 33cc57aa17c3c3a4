"""What a reader is told of natural mistakes: `attempts.csv` has, for each exercise, some twenty changes to
its solution and what the check says. None passes, none is given a name that is not its own, most have one.

change: `text => other text`; several are parted by ` & `, and ⏎ ends a line. told: the mistake's name;
(observed) where the check says what it saw, and no name; (crashed) where it gives the ranks' own report.
"""

import csv
import importlib
from pathlib import Path

import pytest
from attempts import edited

from helpers.lesson import practice
from helpers.lesson.drops import d01, d12, d13
from helpers.lesson.drops.b1 import when
from helpers.lesson.drops.b2 import balance, softmax
from helpers.lesson.drops.b3 import held
from helpers.lesson.drops.b4 import diagnosing, never_came
from helpers.lesson.drops.d07 import practice as d07
from helpers.lesson.drops.d08 import crossing_by_hand, groups_by_hand
from helpers.lesson.drops.d09 import fullest_gpu as d09
from helpers.lesson.drops.d10 import practice as d10
from helpers.lesson.drops.d11 import practice as d11
from helpers.lesson.drops.d14 import practice as d14

with open(Path(__file__).with_name("attempts.csv"), encoding="utf-8") as f:
    ROWS = [tuple(row.values()) for row in csv.DictReader(f)]
ON_RANKS = {
    *("d02.average", "d02.ring", "d03.mlp", "d04.loop", "d05.overlapped", "d06.plan", "d06.sequence"),
    *("d07.one_f_one_b", "d09.ring", "d10.cheapest", "d10.signature", "d11.placing", "d12.choice"),
    *("b1.one_layer", "b1.mesh", "b2.step", "b3.layer", "b3.fold", "b4.never", "b4.clinic", "b4.mended"),
}
# Names for what is seen and not recognised.
OBSERVED = ("another ", "other ")


def changes(text: str) -> list[tuple[str, str]]:
    """The changes of a row."""
    return [tuple(part.replace("⏎", "\n").split(" => ")) for part in text.split(" & ")]


def exercise(name: str):
    """'d02.ring' -> the exercise."""
    drop, attribute = name.split(".")
    return getattr(importlib.import_module(f"helpers.lesson.drops.{drop}"), attribute)


def told(answer) -> str:
    """What a row says of an answer."""
    if answer.misconception and not answer.misconception.startswith(OBSERVED):
        return answer.misconception
    return {"wrong": "(observed)", "crashed": "(crashed)"}.get(answer.kind, f"({answer.kind})")


def ask_here(attempt, cases=((),), timeout: float = 5) -> list:
    """`practice.ask` without a rank; with one where the attempt raises, for the rank's report."""
    try:
        return [attempt(*case) for case in cases]
    except Exception:
        return practice.ask(attempt, cases, timeout)


@pytest.fixture
def formulas_cost_nothing(monkeypatch):
    drops = (d01, d07, groups_by_hand, crossing_by_hand, d10, d11, d12, d13, d14)
    for module in (*drops, when, softmax, balance, held, never_came):
        monkeypatch.setattr(module, "ask", ask_here)
    monkeypatch.setattr(diagnosing, "_deals", [0])  # a wrong diagnosis deals the ranks anew


def cases():
    """All rows. Of those that start ranks one in fifteen: `make attempts` and the weekly workflow run all."""
    for i, (name, change, expected) in enumerate(ROWS):
        marks = [pytest.mark.slow] if name not in ON_RANKS or i % 15 == 0 else [pytest.mark.exhaustive]
        yield pytest.param(name, change, expected, marks=marks, id=f"{name}: {change}"[:80])


@pytest.mark.usefixtures("formulas_cost_nothing")
@pytest.mark.parametrize("name, change, expected", list(cases()))
def test_an_attempt_is_told_what_the_table_says(name, change, expected):
    answer = exercise(name).check(edited(exercise(name), *changes(change)))
    assert answer.kind in ("wrong", "crashed") and told(answer) == expected, answer


def test_most_attempts_have_a_name():
    named = [expected for _, _, expected in ROWS if not expected.startswith("(")]
    assert len(named) >= 0.8 * len(ROWS) and len(ROWS) >= 350


@pytest.mark.parametrize(
    "mistakes, cases, alike",
    [
        (d07.MISTAKES, d07.BUBBLES, lambda a, b: abs(a - b) < 5e-4),
        (d09.MISTAKES, d09.CASES, lambda a, b: a == pytest.approx(b)),
        (d11.MISTAKES, d11.EXAMPLES, lambda a, b: a == pytest.approx(b, abs=0.005)),
        (d14.STATES, [(n, d, t * p) for n, d, t, p, *_ in d14.CASES], lambda a, b: a == pytest.approx(b)),
        (d14.BUBBLES, [(p, m) for *_, p, m, _ in d14.CASES], lambda a, b: a == pytest.approx(b, abs=1e-6)),
        (d14.CROSSING, [(d, t, p, node) for _, d, t, p, _, node in d14.CASES], lambda a, b: a == b),
    ],
    ids=["d07.share", "d09.states", "d11.split", "d14 states", "d14 bubbles", "d14 crossing"],
)
def test_the_cases_tell_all_named_mistakes_apart(mistakes, cases, alike):
    given = [[mistake.answers(*case) for case in cases] for mistake in mistakes]
    for i, mine in enumerate(given):
        for mistake, other in zip(mistakes[:i], given):
            same = all(map(alike, mine, other))
            assert not same or mistake.name == mistakes[i].name, (mistake.name, mistakes[i].name)
