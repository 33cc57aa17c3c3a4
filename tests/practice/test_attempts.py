"""What a reader is told of natural mistakes: `attempts.csv` has, for each exercise, changes to its solution
that are none of its own edits, and what the check says. None passes, none is given a name that is not its
own, most have one.

change: as an edit of an exercise, `text => other text`; several are parted by ` & `, and ⏎ ends a line.
told: the mistake's name; (observed) where the check says what it saw, and no name; (crashed) where it gives
the ranks' own report.
"""

import csv
from pathlib import Path

import pytest
from exercise_tests import EXERCISES, judges_share_worlds  # noqa: F401

from drops import b4
from helpers.practice.engine import Asked, edited

with open(Path(__file__).with_name("attempts.csv"), encoding="utf-8") as f:
    ROWS = [tuple(row.values()) for row in csv.DictReader(f)]
# Names for what is seen and not recognised.
OBSERVED = ("another ", "other ")


def told(answer) -> str:
    """What a row says of an answer."""
    if answer.misconception and not answer.misconception.startswith(OBSERVED):
        return answer.misconception
    return {"wrong": "(observed)", "crashed": "(crashed)"}.get(answer.kind, f"({answer.kind})")


def cases():
    """All rows. Of those that start ranks one in fifteen: `make attempts` and the weekly workflow run all."""
    for i, (name, change, expected) in enumerate(ROWS):
        quick = isinstance(EXERCISES[name], Asked) and EXERCISES[name].edits
        marks = [pytest.mark.slow] if quick or i % 15 == 0 else [pytest.mark.exhaustive]
        yield pytest.param(name, change, expected, marks=marks, id=f"{name}: {change}"[:80])


@pytest.mark.parametrize("name, change, expected", list(cases()))
def test_an_attempt_is_told_what_the_table_says(name, change, expected, monkeypatch):
    monkeypatch.setattr(b4, "_deals", [0])  # a wrong diagnosis deals the ranks anew
    answer = EXERCISES[name].check(edited(EXERCISES[name].reference, change))
    assert answer.kind in ("wrong", "crashed") and told(answer) == expected, answer


def test_most_attempts_have_a_name_and_none_is_an_edit_that_an_exercise_knows():
    assert sum(not expected.startswith("(") for *_, expected in ROWS) >= 0.75 * len(ROWS) and len(ROWS) >= 350
    for name, exercise in EXERCISES.items():
        assert not {change for of, change, _ in ROWS if of == name} & set(getattr(exercise, "edits", ()))
