"""Where the reader is: what is passed, and what went wrong last time."""

from __future__ import annotations

import importlib
import textwrap

from three_axes.table import Table

from ..ranks import open_worlds
from . import cards, passed
from .books import drop_number, exercises, module_of, notebooks
from .exercise import Exercise


def _of(drop: str) -> dict[str, Exercise]:
    """A drop's exercises in their order, each under its name in the drop's file."""
    known = vars(importlib.import_module(module_of(drop))).items()
    return dict(
        sorted(((name, x) for name, x in known if isinstance(x, Exercise)), key=lambda it: it[1].made)
    )


def here(drop: str) -> None:
    """At the beginning of a drop: print what is passed, and the mistakes made in the drop left last."""
    _say(drop)
    print(f'You know this drop already? progress.skip("{drop}") asks its exercise now.')
    done, known = passed.mine(), [drop_number(path) for path in notebooks() if drop_number(path) != drop]
    before = next((other for other in reversed(done.left) if other in known), None)
    for exercise in _of(before).values() if before else ():
        for name in [*getattr(done.exercises.get(exercise.name), "mistakes", {})][-1:]:
            said = f"last time, drop {before}, {exercise.name}: {name}. {exercise.advice(name)}"
            print(textwrap.fill(said, 100, subsequent_indent="    ", break_on_hyphens=False))


def leave(drop: str) -> cards.Deck:
    """At its end: stop all ranks, print what is passed, and ask three cards."""
    for world in open_worlds():
        world.close()
    done = passed.mine()
    done.left = [other for other in done.left if other != drop] + [drop]
    passed.keep(done)
    _say(drop)
    return cards.Deck(cards.due(done)[:3])


def _say(drop: str) -> None:
    done, names = passed.mine().passed, [x.name for x in _of(drop).values()]
    known = {name for of_one in exercises().values() for name in of_one}  # a file may name what is gone
    marks = ", ".join(f"{'✓' if name in done else '○'} {name}" for name in names)
    print(f"drop {drop}: {sum(n in done for n in names)} of {len(names)} exercises passed: {marks}")
    print(f"all drops: {len(done & known)} passed (progress.show() lists them)")


def skip(drop: str) -> None:
    """For who knows a drop already: put its exercise into a new cell below. A right answer passes it."""
    import nbformat  # which takes longer to import than PyTorch
    from IPython import get_ipython

    left = [name for name, x in _of(drop).items() if x.name not in passed.mine().passed]
    if not left:
        print(f"drop {drop} is passed")
        return
    path = next(p for p in notebooks() if drop_number(p) == drop)
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    get_ipython().set_next_input(next(source for source in cells if f"{left[0]}.check(" in source))


def show() -> Table:
    """Drop by drop, what is done. Delete the file to begin anew."""
    done, rows = passed.mine().passed, []
    for drop, names in exercises().items():
        marks = "●" * sum(name in done for name in names)
        rows.append([drop, marks.ljust(len(names), "○"), ", ".join(names)])
    marks = "".join(row[1] for row in rows)
    title = f"{marks.count('●')} of {len(marks)} exercises passed"
    return Table(["drop", "passed", "exercises"], rows, title=title)
