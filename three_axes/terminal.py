"""Keeps printed text within the terminal's width. Text for files and other programs is not folded."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import groupby
from typing import NoReturn

from .foreign import plain

_columns: ContextVar[int | None] = ContextVar("columns of the terminal", default=None)


def columns() -> int | None:
    """The width for what is printed now; None if there is no limit."""
    return _columns.get()


@contextmanager
def fitted(stream) -> Iterator[None]:
    """In this block, tables and `fold` keep within the width of the terminal that `stream` writes to, if it
    is a terminal.
    """
    width = None
    if stream.isatty():
        from shutil import get_terminal_size

        width = get_terminal_size().columns
    token = _columns.set(width)
    try:
        yield
    finally:
        _columns.reset(token)


def fold(text: str, most: int | None = None) -> str:
    """Fold lines that are wider than the terminal, or than `most` characters, at spaces, with an indent."""
    width = min(filter(None, (columns(), most)), default=None)
    return "\n".join(_folded(line, width) for line in text.splitlines())


def put(text: str) -> int:
    """Print the text. Returns an exit status: 1 if it cannot be printed, otherwise 0."""
    try:
        print(text)
        sys.stdout.flush()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it ends
        if not isinstance(e, BrokenPipeError):  # a broken pipe is no error: `head`, say, has read enough
            print(f"cannot print: {e.strerror}", file=sys.stderr)
            return 1
    return 0


def _folded(line: str, width: int | None) -> str:
    if width is None or len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False))


class Manual(argparse.RawDescriptionHelpFormatter):
    """Prints a module's docstring under --help. It fills paragraphs anew and keeps indented lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for prose, lines in groupby(text.splitlines(), key=lambda line: line[:1].strip() != ""):
            filled += (
                textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
                if prose
                else [_folded(line, width) for line in lines]
            )
        return "\n".join(filled)


class Parser(argparse.ArgumentParser):
    """A parser that on an error prints one sentence and mentions --help. It completes words in a shell if
    argcomplete is installed.
    """

    def __init__(self, **kwargs):
        super().__init__(**{"formatter_class": Manual, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Print the message, plain, and exit with status 2. argparse calls this method."""
        self.exit(2, f"{plain(message, 2000)}\n{self.prog} --help has all that it takes\n")

    def parse_args(self, args=None, namespace=None):
        """Like argparse's. When a shell asks for completions, print them and end the process."""
        if "_ARGCOMPLETE" in os.environ:
            with suppress(ImportError):
                import argcomplete

                argcomplete.autocomplete(self)
        return super().parse_args(args, namespace)
