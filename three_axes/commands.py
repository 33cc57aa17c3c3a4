"""The commands of `three-axes` that have a module of their own. (Those that size a cluster are in __main__.)

A new one is one line here.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from .files import course_on_path


class Command(NamedTuple):
    """function: 'module:name' of what takes the arguments after the command and returns an exit status.

    It is imported when it is called, for most of these need torch, which takes seconds to load and may not
    be installed.
    """

    help: str
    function: str


COMMANDS = {
    "lab": Command("the course in JupyterLab, on your own copy", "tools.lab:main"),
    "train": Command("train the 4-layer model, sharded", "helpers.train.launch:main"),
    "explain": Command(
        "say where the time of torch.profiler's traces went", "three_axes.explain.command:main"
    ),
    "trace": Command("count the collectives of a real model, on fake ranks", "three_axes.trace.trace:main"),
    "doctor": Command("check this machine, its GPUs and its launchers", "tools.doctor:main"),
    "class": Command("for a class: a quiz before and after, and what students tried", "tools.classroom:main"),
    "cards": Command("print the flashcards, into build/", "tools.printables:main_cards"),
    "cheatsheet": Command("print the cheat sheet, into build/", "tools.printables:main_cheatsheet"),
    "worksheets": Command("print a worksheet for each drop, into build/", "tools.printables:main_worksheets"),
    "slides": Command("make slides of the drops, in build/slides/", "tools.slides:main"),
    "site": Command("make pages of the whole course, in build/site/", "tools.site:main"),
}


@contextmanager
def course_needed(by: str):
    """Where a package of the course is missing, say who needs it and how to get it."""
    try:
        yield
    except ModuleNotFoundError as e:
        package = (e.name or "").split(".")[0]
        if package in ("three_axes", "helpers", "tools", "drops"):
            raise
        clone = Path(__file__).resolve().parents[1]
        source = clone if (clone / "pyproject.toml").is_file() else "three-axes"
        raise ModuleNotFoundError(
            f"{by} needs {package}, which is not installed. With it comes all that the course needs:"
            f" pip install '{source}[course]'",
            name=e.name,
        ) from None


def call(name: str, argv: list[str]) -> int:
    """Run a command. Returns its exit status, 0 where it returns none."""
    from pkgutil import resolve_name

    course_on_path()
    with course_needed(f"three-axes {name}"):
        return resolve_name(COMMANDS[name].function)(argv) or 0
