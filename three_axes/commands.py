"""Lists the commands of `three-axes` that have a module of their own, and adds their options. `plan` and
`estimate` are in options.py, `count` and `verify` in count/options.py.

A command's module is imported when the command is called, because most commands need torch, which takes
seconds to load and may not be installed. So `--help` and the shell's completion work without torch.
"""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from .files import course_on_path, find
from .terminal import Parser


class Command(NamedTuple):
    """A command. help: its line in the list of commands. function: 'module:name' of a function that takes the
    parsed arguments and returns an exit status or None. options: a function that adds options to a parser.
    """

    help: str
    function: str
    options: Callable[[Parser], object] = lambda parser: None

    @property
    def manual(self) -> str:
        """The docstring of the command's module, or package, read without importing it; else `help`."""
        path = self.function.partition(":")[0].replace(".", "/")
        try:
            file = find(f"{path}.py")
        except FileNotFoundError:
            file = find(f"{path}/__init__.py")
        return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or self.help


def _lab(parser: Parser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path("three-axes"), help="%(default)s")
    fresh = "make drop 07, for example, new again; your copy of it is kept in old/"
    number = lambda n: n.zfill(2)
    parser.add_argument("--fresh", help=fresh, metavar="NUMBER", type=number, action="append", default=[])
    parser.add_argument("--port", type=int, default=8888, help="%(default)s, or the next that is free")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def _explain(parser: Parser) -> None:
    traces = "one file for each rank, or a folder; two folders are compared"
    parser.add_argument("traces", nargs="+", metavar="TRACE", help=traces)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _doctor(parser: Parser) -> None:
    numbers = "numbers of the checks, 1 to 5; by default all"
    parser.add_argument("checks", nargs="*", type=int, metavar="NUMBER", help=numbers)


def _class(parser: Parser) -> None:
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("quiz", help="for a student: ten questions")
    stories = "before or after the course: two stories with the same ten questions"
    part.add_argument("story", choices=("before", "after"), help=stories)
    part = parts.add_parser("collect", help="for the teacher: the tables")
    part.add_argument("folder", type=Path, help="folder of the progress files")
    part.add_argument("--csv", type=Path, metavar="FILE", help="write who tried what, for a spreadsheet")


COMMANDS = {
    "lab": Command("the course in JupyterLab, on your own copy", "tools.lab:run", _lab),
    "explain": Command(
        "say where the time of torch.profiler's traces went", "three_axes.explain.command:run", _explain
    ),
    "doctor": Command(
        "check this machine: its packages, its ranks and its GPUs", "tools.doctor:run", _doctor
    ),
    "class": Command(
        "for a class: a quiz before and after, and what students tried", "tools.classroom:run", _class
    ),
}


@contextmanager
def course_needed(by: str):
    """In this block, an error for a missing package names the command that needs it, `by`, and how to install
    it. Raises ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as e:
        package = (e.name or "").split(".")[0]
        if package in ("three_axes", "helpers", "tools", "drops"):
            raise
        clone = Path(__file__).resolve().parents[1]
        how = "pip install '.[course]' in a clone of the course"
        if (clone / "pyproject.toml").is_file():
            how = f"pip install '{clone}[course]'"
        raise ModuleNotFoundError(
            f"{by} needs {package}, which is not installed. This installs all that the course needs: {how}",
            name=e.name,
        ) from None


def call(args: Namespace) -> int:
    """Run a command. Returns its exit status; 0 if it returns None."""
    course_on_path()
    with course_needed(f"three-axes {args.command}"):
        return resolve_name(COMMANDS[args.command].function)(args) or 0
