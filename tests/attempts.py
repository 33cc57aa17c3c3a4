"""Wrong attempts as a reader makes them: an exercise's solution with something swapped, left out, off by one.

An attempt is a list of changes to the solution's own text, so that each row of a table reads as what was done
wrong, beside what it is told.
"""

import inspect
import itertools
import sys
import textwrap

_numbers = itertools.count()


def edited(exercise, *changes: tuple[str, str]):
    """The solution of `exercise` with each (text, other text) changed, in all places where it stands."""
    source = textwrap.dedent(inspect.getsource(exercise.reference))
    for old, new in changes:
        assert old in source, f"{exercise.name}: the solution has no {old!r}"
        source = source.replace(old, new)
    names = dict(vars(sys.modules[exercise.reference.__module__]))
    # A module that nobody can import: the attempt travels to the ranks by value.
    names["__name__"] = f"attempt {next(_numbers)}"
    exec(compile(source, "<attempt>", "exec"), names)
    made = names[exercise.reference.__name__]
    made.__name__ = "; ".join(f"{old} -> {new}" for old, new in changes) or "as it is"
    return made
