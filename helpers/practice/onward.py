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
    """Whether all exercises of the drop's lesson are passed. Exercises for another day do not count."""
    return done.passed.issuperset(lessons()[drop])


def where(done: passed.Done) -> str:
    """'1 of 14 drops done, 2 read': done are the drops whose lesson is practised, read those whose last cell
    has run. The second number is left out if it equals the first.
    """
    fourteen = [drop for drop in map(drop_number, notebooks()) if drop.isdigit()]
    count = sum(practised(drop, done) for drop in fourteen)
    read = sum(drop in done.left for drop in fourteen)
    return f"{count} of {len(fourteen)} drops done" + (f", {read} read" if read != count else "")


def next_drop(done: passed.Done) -> Path:
    """The notebook to open: the first whose lesson is not practised, in an order that begins with the
    furthest drop that was read or tried, and continues with the first drop after the last. If all are
    practised, the first in this order with an unsolved exercise; if there is none, the first notebook.
    """
    books = notebooks()
    used = [i for i, p in enumerate(books) if drop_number(p) in done.left or _tried(drop_number(p), done)]
    furthest = max(used, default=0)
    order = books[furthest:] + books[:furthest]
    unpractised = [p for p in order if not practised(drop_number(p), done)]
    return next((p for p in [*unpractised, *order] if unsolved(drop_number(p), done)), books[0])


def _tried(drop: str, done: passed.Done) -> bool:
    return any(name in done.exercises for name in exercises()[drop])


def link(to: Path, here: Path) -> str:
    """The relative link from the notebook `here` to the notebook `to`, for a page or JupyterLab."""
    return os.path.relpath(to, here.parent).replace(os.sep, "/")


def after(exercise: str, module: str, unread: bool = False) -> tuple[str, str]:
    """(a sentence on what comes next, a link to it or '') after the exercise of this name is passed. module:
    that of its solution. If this completes the drop's lesson, the drop is noted as read, unless `unread`:
    `progress.skip` asked the exercise.
    """
    at = next((p for p in notebooks() if f"{module}.".startswith(f"{module_of(drop_number(p))}.")), None)
    if at is None:
        return "", ""
    drop, done = drop_number(at), passed.mine()
    done.exercises[exercise] = passed.Attempts(1, True)  # also if no progress is kept
    ends_lesson = exercise in lessons()[drop] and practised(drop, done)
    if ends_lesson and not unread:
        passed.note_read(drop)
        done.left.append(drop)
    if not ends_lesson and (left := unsolved(drop, done)):
        return f"Next in this drop: {left[0]}.", ""
    there = next_drop(done)
    sentence = f"{where(done)}. " if passed.is_kept() else ""
    return f"{sentence}Next: drop {drop_number(there)}.", link(there, at)
