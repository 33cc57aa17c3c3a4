"""What is printed stays within the terminal. Into files and other programs it goes as it is."""

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
    """How wide things may be that are printed now; None where nothing limits them."""
    return _columns.get()


@contextmanager
def fitted(stream) -> Iterator[None]:
    """Inside, tables and `fold` stay within the terminal that a stream leads to, if it does lead to one."""
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
    """Lines that are wider than the terminal, or than `most` characters, cut at spaces and indented."""
    width = min(filter(None, (columns(), most)), default=None)
    return "\n".join(_folded(line, width) for line in text.splitlines())


def put(text: str) -> int:
    """Print it. Returns the exit status of a command that does nothing after it."""
    try:
        print(text)
        sys.stdout.flush()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        if not isinstance(e, BrokenPipeError):  # there the reader, head say, has seen enough
            print(f"cannot print: {e.strerror}", file=sys.stderr)
            return 1
    return 0


def _folded(line: str, width: int | None) -> str:
    if width is None or len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False))


class Manual(argparse.RawDescriptionHelpFormatter):
    """Shows a module's docstring under --help: its paragraphs are set anew, indented lines stay lines."""

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
    """Says in a sentence what is wrong, and where the rest is told. A shell that asks what may come next is
    answered by argcomplete, where it is installed.
    """

    def __init__(self, **kwargs):
        super().__init__(**{"formatter_class": Manual, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Exit with status 2. argparse itself calls this."""
        self.exit(2, f"{plain(message, 2000)}\n{self.prog} --help has all that it takes\n")

    def parse_args(self, args=None, namespace=None):
        """As argparse's; while a shell asks for completions, they are printed and the process ends."""
        if "_ARGCOMPLETE" in os.environ:
            with suppress(ImportError):
                import argcomplete

                argcomplete.autocomplete(self)
        return super().parse_args(args, namespace)
