"""Every exercise: its solution passes, an empty attempt is not started, and each known mistake, made as an
edit of the solution, is told its own name and no other's.
"""

import pytest
from exercise_tests import EXERCISES, empty, judges_share_worlds  # noqa: F401

from helpers.practice.engine import Compared, mistakes_of

WITH_EDITS = {name: one for name, one in EXERCISES.items() if isinstance(one, Compared) and one.edits}


def test_all_exercises_are_found():
    assert len(EXERCISES) == 35 and len(WITH_EDITS) >= 19


@pytest.mark.parametrize("exercise", WITH_EDITS.values(), ids=WITH_EDITS)
def test_each_edit_is_told_its_own_name(exercise):
    told = exercise.told_apart()
    assert told and [(row, edit) for row, edit, name in told if name != row] == []


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_the_solution_passes(exercise):
    answer = exercise.check(exercise.reference)
    assert answer.kind == "right" and all(map(len, answer.figures)), answer


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_empty_is_not_started_and_gives_the_first_hint(exercise):
    answer = exercise.check(empty(exercise))
    assert answer.kind == "not started" and exercise.hints[0] in answer.text
    assert repr(exercise.hint()) and exercise.reference.__name__ in str(exercise.solution())


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_rows_have_names_of_their_own_and_advice_in_sentences(exercise):
    rows = getattr(exercise, "rows", [])
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    assert not [row.name for row in rows if row.advice and row.advice[-1] not in ".?)"]


def test_a_text_becomes_rows():
    (one, two) = mistakes_of(
        """
        one of them
            Think of
            this.
            - a => b & c =>
            - d =>
              e
            ! an? error
        two
            Or that.
            ~ form
        """
    )
    assert (one.name, one.advice, one.edits) == ("one of them", "Think of this.", ["a => b & c =>", "d => e"])
    assert one.errors == ["an? error"] and (two.advice, two.parts) == ("Or that.", ["form"])
