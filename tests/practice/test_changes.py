"""No check praises a solution that `changes` has changed in one place, unless it still does the same on all
inputs of the check, or the exercise has several right ways.
"""

from collections import Counter

import changes
import pytest
from test_exercises import EXERCISES

from drops import b4
from helpers.practice.engine import Compared
from helpers.practice.runs import alike

pytestmark = [pytest.mark.waits, pytest.mark.usefixtures("judges_share_worlds")]

QUICK, ALL = 3, 40  # changes of each exercise: by `make test-all`, and by `make attempts`
JUDGED = {name: one for name, one in EXERCISES.items() if isinstance(one, Compared)}


def is_the_same(exercise: Compared, attempt) -> bool:
    """Whether an attempt gives the solution's values, and gradients, in each try."""
    for does, observe in exercise.worlds():
        run, truth = observe(attempt), does("")
        if run.error or exercise._form(run, truth) or run.differs_in(truth, alike):
            return False
    return True


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize(
    "most", [pytest.param(QUICK, marks=pytest.mark.slow), pytest.param(ALL, marks=pytest.mark.exhaustive)]
)
def test_no_check_praises_what_does_something_else(name, most, monkeypatch):
    monkeypatch.setattr(b4.cells, "_deals", [0])  # after a wrong diagnosis the roles of the ranks change
    exercise, told, praised = JUDGED[name], Counter(), []
    for what, attempt in changes.changed(exercise.reference, most, seed=1):
        answer = exercise.check(attempt)
        if answer.kind != "right":
            told["refused"] += 1
        elif is_the_same(exercise, attempt):
            told["equal"] += 1
            print("equal:", what)
        else:
            told["in another way" if not exercise.compares else "praised"] += 1
            praised.append(what)
    print(f"{name}: {sum(told.values())} tried, {dict(told)}", *praised, sep="\n  ")
    assert not told["praised"], praised
