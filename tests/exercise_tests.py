"""What tests of exercises share. A test module that imports these names gives lists of its own, which
conftest.py hands to them:

MISTAKES         (exercise, attempt, the answer's kind, its misconception): of attempts that are nobody's edit
OTHERWISE_RIGHT  (exercise, attempt) that must pass too; may be left out

slow(...) is a row that `make test` leaves out: its attempt hangs for seconds, as that of another row does.
"""

import importlib
import inspect
import sys

import pytest
from worlds import Lent

from helpers.practice.books import module_of, notebooks, number
from helpers.practice.exercise import Exercise

__all__ = ["judges_share_worlds", "test_a_mistake_is_caught_and_named", "test_what_is_right_passes"]


def _exercises() -> dict[str, Exercise]:
    """'d02.ring' -> the exercise, of all drops."""
    modules = [importlib.import_module(module_of(number(path))) for path in notebooks()]
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": thing
        for module in modules
        for name, thing in vars(module).items()
        if isinstance(thing, Exercise)
    }


EXERCISES = _exercises()


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


def cases(module, names: list[str]) -> list[tuple] | None:
    """The arguments for a test that takes `names`; None if it is none of these."""
    if names == ["exercise", "attempt", "kind", "name"]:
        return module.MISTAKES
    return getattr(module, "OTHERWISE_RIGHT", []) if names == ["exercise", "attempt"] else None


def empty(exercise):
    """A function with the arguments that an exercise wants, and nothing in it."""
    names = list(inspect.signature(exercise.reference).parameters)
    made = {}
    exec(f"def attempt({', '.join(names)}):\n    'Documented.'\n    ...", made)
    return made["attempt"]


def test_a_mistake_is_caught_and_named(exercise, attempt, kind, name):
    answer = exercise.check(attempt)
    assert (answer.kind, answer.misconception) == (kind, name), answer


def test_what_is_right_passes(exercise, attempt):
    answer = exercise.check(attempt)
    assert answer.kind == "right", answer


@pytest.fixture(scope="module", autouse=True)
def judges_share_worlds():
    from helpers import World

    lent = Lent(World)
    judging = ("helpers.practice.engine", "drops")
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith(judging) and getattr(module, "World", None) is World:
                patch.setattr(module, "World", lent)
        yield
    lent.close()
