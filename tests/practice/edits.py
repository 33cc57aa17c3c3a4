"""Natural attempts as changes of a solution, each in a line."""

import inspect
import textwrap
from collections.abc import Callable

from drops.b5.cells import changed
from helpers.practice.engine import compiled


def edited(solution: Callable, edit: str) -> Callable:
    """The solution, `changed` by an edit."""
    return compiled(changed(textwrap.dedent(inspect.getsource(solution)), edit, solution.__name__), solution)
