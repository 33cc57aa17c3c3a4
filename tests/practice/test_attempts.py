"""Attempts at exercises get the answers in `attempts.csv`. No wrong attempt passes or gets a wrong name, most
get a name, and right attempts that are written differently pass. No figure beside a wrong answer reaches its
target.

A row has an exercise, a change of its solution that is not among the edits the exercise knows, and the
answer. change: `text => other text`; several are separated by ` & `, and ⏎ ends a line; or a whole function.
told: the mistake's name; (observed) if the check describes what it observed, without a name; (crashed) if it
gives the ranks' own report; (right).
"""

import csv
import re
from pathlib import Path

import pytest
from edits import edited
from test_exercises import EXERCISES

from drops import b4
from helpers.practice.engine import Asked

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("judges_share_worlds")]

with open(Path(__file__).with_name("attempts.csv"), encoding="utf-8") as f:
    ROWS = [tuple(row.values()) for row in csv.DictReader(f)]
# A mistake's name that begins like this only describes what was observed.
OBSERVED = ("another ", "other ")
# Ranks measure the inputs of these exercises.
MEASURED = ("d01.fingerprints", "d10.cheapest", "d11.placing")
ON_PAPER = {
    name: [(change, expected) for of, change, expected in ROWS if of == name]
    for name, exercise in EXERCISES.items()
    if isinstance(exercise, Asked) and name not in MEASURED
}


def words_of(answer) -> str:
    """An answer in the words of the table's column `told`."""
    if answer is None or answer.kind == "right":
        return "(right)"
    if answer.misconception and not answer.misconception.startswith(OBSERVED):
        return answer.misconception
    return {"wrong": "(observed)"}.get(answer.kind, f"({answer.kind})")


def is_expected(answer, expected: str) -> bool:
    """Whether an answer is the expected one. A row may also have a name that only describes."""
    return expected in (words_of(answer), answer and answer.misconception)


def is_missed(reached: str, target: str) -> bool:
    """Whether a figure beside a wrong answer differs from its target, or is on the wrong side of it."""
    if bound := re.fullmatch(r"(at least|at most|below) ([\d.e-]+)( %)?", target):
        got, limit = float(reached.rstrip(" %")), float(bound[2])
        return got < limit if bound[1] == "at least" else got > limit or bound[1] == "below" and got == limit
    return target not in ("", reached)


def cases():
    """All rows, but only one in fifteen in `make test-all`: `make attempts` and the weekly workflow run all.
    The test below runs all rows of exercises that need no ranks.
    """
    for i, (name, change, expected) in enumerate(ROWS):
        mark = pytest.mark.exhaustive if i % 15 else pytest.mark.slow
        yield pytest.param(name, change, expected, marks=mark, id=f"{name}: {change}"[:80])


@pytest.mark.parametrize("name, change, expected", list(cases()))
def test_an_attempt_gets_the_answer_in_the_table(name, change, expected, monkeypatch):
    monkeypatch.setattr(b4.cells, "_deals", [0])  # after a wrong diagnosis the roles of the ranks change
    answer = EXERCISES[name].check(edited(EXERCISES[name].reference, change))
    assert (answer.kind == "right") == (expected == "(right)") and is_expected(answer, expected), answer
    assert answer.kind == "right" or all(is_missed(*figure[1:]) for figure in answer.figures), answer


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_PAPER)
def test_attempts_that_need_no_ranks_get_the_same_answer_without_ranks(name):
    """Attempts that crash, or call the course's own code, run on a rank."""
    exercise = EXERCISES[name]
    does, observe = next(exercise.worlds())
    for change, expected in ON_PAPER[name]:
        attempt = edited(exercise.reference, change)
        try:
            run = observe(attempt) if expected != "the course's code does the work" else None
        except Exception:  # noqa: BLE001  the attempt's own
            run = None
        answer = exercise.judged(run, does) if run else exercise.check(attempt)
        assert is_expected(answer, expected), (change, answer)
        assert not answer or all(is_missed(*figure[1:]) for figure in answer.figures), (change, answer)


def test_most_attempts_have_a_name_and_none_is_an_edit_that_an_exercise_knows():
    assert sum(not expected.startswith("(") for *_, expected in ROWS) >= 0.75 * len(ROWS)
    for name, exercise in EXERCISES.items():
        assert not {change for of, change, _ in ROWS if of == name} & set(getattr(exercise, "edits", ()))
