"""Attempts at an exercise, written as an edit of its solution in one line, or as a function."""

import inspect
import textwrap
from collections.abc import Callable

from drops.b5.cells import changed
from helpers.practice.engine import compiled


def edited(solution: Callable, edit: str) -> Callable:
    """The solution, `changed` by an edit; or the function that replaces it, from 'def' on."""
    if edit.startswith("def "):
        return compiled(edit, solution)
    return compiled(changed(textwrap.dedent(inspect.getsource(solution)), edit, solution.__name__), solution)
