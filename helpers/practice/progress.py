"""Prints the reader's progress: passed exercises, the last mistakes, and the cards that are due."""

from __future__ import annotations

import importlib
import os
import re
import textwrap
from contextlib import suppress
from datetime import date
from pathlib import Path

from IPython.display import display

from three_axes.files import find
from three_axes.table import Table

from ..ranks import open_worlds
from . import cards, missing, onward, passed
from .books import drop_number, exercises, module_of, notebooks
from .exercise import SKIPS, Exercise


def _exercises_of(drop: str) -> dict[str, Exercise]:
    """Variable of the drop's module -> its exercise, in their order."""
    known = vars(importlib.import_module(module_of(drop))).items()
    return dict(
        sorted(((name, x) for name, x in known if isinstance(x, Exercise)), key=lambda it: it[1].made)
    )


LINE = 100  # characters of a line
_begun: dict[tuple[str, str], cards.Deck] = {}  # (drop, day) -> the cards that it began with in this kernel


def here(drop: str) -> None:
    """At the beginning of a drop, print at most three lines: the reader's progress; the notebooks that still
    run; how the exercises of the drop read last went. Display up to three due cards. Later
    cells explain a NameError (see `missing`).
    """
    missing.advise(drop)
    done, today = passed.mine(), str(date.today())
    deck = _begun.get((drop, today)) or cards.beginning(today)
    skips = "" if onward.practised(drop, done) else f'progress.skip("{drop}") asks'
    if done != passed.Done():
        now = f", {skips} those of this drop" if skips else ""
        print(f"{onward.where(done)}. progress.show() lists the exercises{now}.")
    elif skips:
        print(f"You know this drop already? {skips} its exercise now.")
    if passed.is_kept() and (running := _still_run(drop)):
        print(running)
    known = [drop_number(path) for path in notebooks() if drop_number(path) != drop]
    before = next((other for other in reversed(done.left) if other in known), None)
    last = _last_time(before, done) if before else ""
    if deck.all:
        _begun[drop, today] = deck
        last += " Three cards" if len(deck.all) == 3 else " Cards"
        last += " of what you have read:"
    if last:
        print(last.strip())
    if deck.all:
        display(deck)


def _last_time(drop: str, done: passed.Done) -> str:
    """'Last time, drop 02: the mean of unequal shares solved.' For an exercise that is not solved, the last
    mistake. '' if no exercise of this drop was tried.
    """
    tried = [(name, done.exercises[name]) for name in exercises()[drop] if name in done.exercises]
    went = [
        f"{name} solved" if attempts.passed else ": ".join([name, *list(attempts.mistakes)[-1:]])
        for name, attempts in tried
    ]
    sentence = f"Last time, drop {drop}: {'; '.join(went)}."
    return textwrap.shorten(sentence, LINE, placeholder=" …") if went else ""


def advice_to(drop: str, exercise: str, mistake: str) -> str:
    """The course's advice on a mistake in an exercise; '' if the advice depends on the attempt."""
    return next((x.advice(mistake) for x in _exercises_of(drop).values() if x.name == exercise), "")


def _still_run(drop: str) -> str:
    """A sentence that names the other notebooks in this notebook's folder whose kernels run, and whose ranks
    run; '' if there are none. Names ranks on Linux only, where their processes have names.
    """
    running = _running_kernels()
    mine = _session_file(os.environ.get("JPY_SESSION_NAME") or "no name", os.getcwd())
    folder = mine.parent.parent if mine.parent.name == "beyond" else mine.parent
    others = [
        folder / path.relative_to(find("notebooks")) for path in notebooks() if drop_number(path) != drop
    ]
    found = [path for path in others if path in running and path != mine]
    if not found:
        return ""
    with_ranks = [path for path in found if running[path]]
    close = "notebook's menu Kernel, Shut Down Kernel, ends"
    if len(found) == 1:
        ranks = ", and so do its ranks" if with_ranks else ""
        return f"{found[0].name} still runs: its kernel holds memory{ranks}. The {close} it."
    ranks = f", and so do the ranks of {_in_words(with_ranks)}" if with_ranks else ""
    return f"{_in_words(found)} still run: their kernels hold memory{ranks}. Each {close} it."


def _in_words(paths: list[Path]) -> str:
    """The numbers of these notebooks: '02, 03 and 05'"""
    *most, last = map(drop_number, paths)
    return f"{', '.join(most)} and {last}" if most else last


def _running_kernels() -> dict[Path, bool]:
    """The notebook of each of this user's Jupyter kernels -> whether ranks of that kernel run."""
    import psutil

    found: dict[Path, bool] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or it has ended meanwhile
            session = process.environ().get("JPY_SESSION_NAME")
            if session and "ipykernel_launcher" in process.cmdline():  # its child processes inherit the name
                file = _session_file(session, process.cwd())
                found.setdefault(file, False)
                for child in process.children(recursive=True):
                    with suppress(psutil.Error):
                        found[file] |= bool(re.match(r"rank \d+ of ", child.name()))
    return found


def _session_file(session: str, cwd: str) -> Path:
    """A kernel's notebook. session: what Jupyter wrote into the kernel's JPY_SESSION_NAME: a full path, or in
    older versions one from the server's folder. cwd: the kernel's folder, which is the notebook's.
    """
    folder = os.path.dirname(session) if os.path.isabs(session) else cwd
    return Path(os.path.realpath(folder), os.path.basename(session))


def leave(drop: str) -> None:
    """At the end of a drop: end all ranks of this kernel, note the drop as read, and print the progress."""
    for world in open_worlds():
        world.close()
    passed.note_read(drop)
    done = passed.mine()
    marks = ", ".join(f"{'✓' if name in done.passed else '○'} {name}" for name in exercises()[drop])
    print(f"drop {drop}: {marks}")
    print(f"{onward.where(done)} (progress.show() lists the exercises)")


def skip(drop: str) -> None:
    """For a reader who knows a drop: put its exercise into a new cell. A right answer passes the drop."""
    import nbformat  # imported here because it takes longer than PyTorch
    from IPython import get_ipython

    left = [name for name, x in _exercises_of(drop).items() if x.name not in passed.mine().passed]
    if not left:
        print(f"drop {drop} is passed")
        return
    path = next(p for p in notebooks() if drop_number(p) == drop)
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    source = next(source for source in cells if f"{left[0]}.check(" in source)
    get_ipython().set_next_input(SKIPS + source)


def show() -> Table:
    """A table of the passed exercises, drop by drop. To start again, delete the progress file."""
    done, rows = passed.mine().passed, []
    for drop, names in exercises().items():
        marks = "●" * sum(name in done for name in names)
        rows.append([drop, marks.ljust(len(names), "○"), ", ".join(names)])
    marks = "".join(row[1] for row in rows)
    title = f"{marks.count('●')} of {len(marks)} exercises passed"
    return Table(["drop", "passed", "exercises"], rows, title=title)
