"""What every exercise must do. A test module that imports these names gives lists of its own, which
conftest.py hands to them:

MISTAKES         (exercise, attempt, the answer's kind, its misconception)
EXERCISES        their solutions must pass
OTHERWISE_RIGHT  (exercise, attempt) that must pass too; may be left out

slow(...) is a row that `make test` leaves out: its attempt hangs for seconds, as that of another row does.
"""

import functools
import inspect
import sys
import time

import pytest
from worlds import Lent

__all__ = [
    "judges_share_worlds",
    "test_a_mistake_is_caught_and_named",
    "test_what_is_right_passes",
    "test_empty_is_not_started_and_gives_the_first_hint",
]


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


def cases(module, names: list[str]) -> list[tuple] | None:
    """The arguments for a test that takes `names`; None if it is none of these."""
    if names == ["exercise", "attempt", "kind", "name"]:
        return module.MISTAKES
    if names == ["exercise", "attempt"]:
        return [(e, e.reference) for e in module.EXERCISES] + getattr(module, "OTHERWISE_RIGHT", [])
    if names == ["exercise"]:
        return [(e,) for e in module.EXERCISES]
    return None


def empty(exercise):
    """A function with the arguments that an exercise wants, and nothing in it."""
    names = list(inspect.signature(exercise.reference).parameters)
    made = {}
    exec(f"def attempt({', '.join(names)}):\n    'Documented.'\n    ...", made)
    return made["attempt"]


def test_a_mistake_is_caught_and_named(exercise, attempt, kind, name):
    answer = exercise.check(attempt)
    assert (answer.kind, answer.misconception) == (kind, name), answer
    print(answer)


def test_what_is_right_passes(exercise, attempt):
    start = time.monotonic()
    answer = exercise.check(attempt)
    assert answer.kind == "right", answer
    print(answer, time.monotonic() - start)


def test_empty_is_not_started_and_gives_the_first_hint(exercise):
    answer = exercise.check(empty(exercise))
    assert answer.kind == "not started" and exercise.hints[0] in answer.text
    assert repr(exercise.hint()) and exercise.reference.__name__ in str(exercise.solution())


@pytest.fixture(scope="module", autouse=True)
def judges_share_worlds():
    from helpers import World
    from helpers.lesson.drops.d10 import practice as of_drop_10

    lent = Lent(World)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("helpers.lesson.") and getattr(module, "World", None) is World:
                patch.setattr(module, "World", lent)
        # Three runs that end out of memory: recorded once, told apart by each attempt.
        patch.setattr(of_drop_10, "crash", functools.cache(of_drop_10.crash))
        yield
    lent.close()
