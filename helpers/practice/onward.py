"""What comes next: the exercise, or the drop, that a reader has not passed."""

from __future__ import annotations

import os
from pathlib import Path

from . import passed
from .books import drop_number, exercises, module_of, notebooks


def unsolved(drop: str, done: passed.Done) -> list[str]:
    """Names of the drop's exercises that are not passed, in their order."""
    return [name for name in exercises()[drop] if name not in done.passed]


def next_drop(done: passed.Done) -> Path:
    """The notebook to open: the drop left or tried last while it has an exercise to solve, else the next that
    has; the first of all that have, behind the last; the first notebook where none has.
    """
    books = notebooks()
    touched = [i for i, p in enumerate(books) if drop_number(p) in done.left or _tried(drop_number(p), done)]
    at = max(touched, default=0)
    return next((p for p in books[at:] + books[:at] if unsolved(drop_number(p), done)), books[0])


def _tried(drop: str, done: passed.Done) -> bool:
    return any(name in done.exercises for name in exercises()[drop])


def link(to: Path, here: Path) -> str:
    """From one notebook's folder to another notebook, as a page or JupyterLab follows it."""
    return os.path.relpath(to, here.parent).replace(os.sep, "/")


def after(exercise: str, module: str) -> tuple[str, str]:
    """(what comes next, a link to it or ''), once the exercise of this name is passed; module: its drop's."""
    at = next((p for p in notebooks() if f"{module}.".startswith(f"{module_of(drop_number(p))}.")), None)
    if at is None:
        return "", ""
    done = passed.mine()
    done.exercises[exercise] = passed.Attempts(1, True)  # where nothing is kept, too
    if left := unsolved(drop_number(at), done):
        return f"Next in this drop: {left[0]}.", ""
    there = next_drop(done)
    return f"Next: drop {drop_number(there)}.", link(there, at)
