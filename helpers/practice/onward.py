"""Finds the next exercise, or the next drop, that a reader has not passed."""

from __future__ import annotations

import os
from pathlib import Path

from . import passed
from .books import drop_number, exercises, lessons, module_of, notebooks


def unsolved(drop: str, done: passed.Done) -> list[str]:
    """Names of the drop's exercises that are not passed, in their order."""
    return [name for name in exercises()[drop] if name not in done.passed]


def practised(drop: str, done: passed.Done) -> bool:
    """Whether the lesson's exercise is passed. Exercises for another day do not count."""
    return done.passed.issuperset(lessons()[drop])


def where(done: passed.Done) -> str:
    """'1 of 14 drops done': drops whose lesson is practised, or whose last cell has run."""
    fourteen = [drop for drop in map(drop_number, notebooks()) if drop.isdigit()]
    behind = sum(drop in done.left or practised(drop, done) for drop in fourteen)
    return f"{behind} of {len(fourteen)} drops done"


def next_drop(done: passed.Done) -> Path:
    """The notebook to open: the first one, from the last used drop on and around, whose lesson is not
    practised. If all are practised, the first with an unsolved exercise; if there is none, the first
    notebook.
    """
    books = notebooks()
    touched = [i for i, p in enumerate(books) if drop_number(p) in done.left or _tried(drop_number(p), done)]
    at = max(touched, default=0)
    order = books[at:] + books[:at]
    open_ = [p for p in order if not practised(drop_number(p), done)]
    return next((p for p in [*open_, *order] if unsolved(drop_number(p), done)), books[0])


def _tried(drop: str, done: passed.Done) -> bool:
    return any(name in done.exercises for name in exercises()[drop])


def link(to: Path, here: Path) -> str:
    """The link from one notebook's folder to another notebook, for a page or JupyterLab."""
    return os.path.relpath(to, here.parent).replace(os.sep, "/")


def after(exercise: str, module: str, unread: bool = False) -> tuple[str, str]:
    """(what comes next, a link to it or '') after the exercise of this name in drop `module` is passed. A
    drop whose lesson is practised by that is noted as read. unread: `progress.skip` asked the exercise.
    """
    at = next((p for p in notebooks() if f"{module}.".startswith(f"{module_of(drop_number(p))}.")), None)
    if at is None:
        return "", ""
    drop, done = drop_number(at), passed.mine()
    done.exercises[exercise] = passed.Attempts(1, True)  # also if no progress is kept
    ends_lesson = exercise in lessons()[drop] and practised(drop, done)
    if ends_lesson and not unread:
        passed.leave(drop)
    if not ends_lesson and (left := unsolved(drop, done)):
        return f"Next in this drop: {left[0]}.", ""
    there = next_drop(done)
    sentence = f"{where(done)}. " if passed.is_kept() else ""
    return f"{sentence}Next: drop {drop_number(there)}.", link(there, at)
