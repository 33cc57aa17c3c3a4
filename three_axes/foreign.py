"""Reads files and names from unknown sources, or refuses them in one sentence.

A file may be a pipe that nobody writes to, larger than memory, nested without end, or hold numbers that
cannot be computed with. A name may hold escape sequences, which a terminal would obey.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import stat
from collections.abc import Callable

LARGEST = 10_000_000  # bytes of a file that is read whole: as objects they need up to forty times as many
DEEPEST = 100  # levels of lists and objects inside each other
DIGITS = 18  # most digits of a whole number, so that it fits in 64 bits


class Unreadable(ValueError):
    """A file that is not what it should be. The message is one sentence: what is wrong, and what to do."""


def plain(text: object, most: int = 200) -> str:
    """A text from an unknown source, safe to print: one line of at most `most` characters, without characters
    that a terminal would obey.
    """
    text = str(text)
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:most])
    return printable if len(text) <= most else printable[:-1] + "…"


def open_file(path: str | os.PathLike) -> io.BufferedReader:
    """Open a file to read its bytes. Raises Unreadable if it cannot be read."""
    name = plain(path, 1000)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait until somebody writes to it
            raise Unreadable(f"{name} is a folder, a pipe or a device: give a file")
        return open(path, "rb")
    except OSError as e:
        raise Unreadable(f"cannot read {name}: {e.strerror}") from None


def read_json(path: str | os.PathLike) -> object:
    """The content of a JSON file. Raises Unreadable if it is not JSON, has more than `LARGEST` bytes, is
    nested deeper than `DEEPEST`, or holds a number that is not finite or a whole number of more than `DIGITS`
    digits.
    """
    name = plain(path, 1000)
    too_deep = Unreadable(f"{name} is nested deeper than {DEEPEST} levels: make it flatter")
    with open_file(path) as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise Unreadable(f"{name} has more than {LARGEST:,} bytes, which is more than is read: shorten it")
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except json.JSONDecodeError as e:
        raise Unreadable(
            f"{name} is not a JSON file: line {e.lineno}, column {e.colno}: {e.msg.lower()}"
        ) from None
    except UnicodeDecodeError:
        raise Unreadable(f"{name} is not a JSON file: it is no text in UTF-8") from None
    except Unreadable as e:
        raise Unreadable(f"{name} holds {e}") from None
    except RecursionError:
        raise too_deep from None
    if not _is_flat(value):
        raise too_deep
    return value


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > DIGITS:
        raise Unreadable(f"a whole number of {len(digits)} digits: give one of at most {DIGITS}")
    return int(digits)


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise Unreadable(f"{plain(text, 20)} for a number: give a finite one")
    return float(text)


def _is_flat(value: object) -> bool:
    """Whether lists and objects are nested at most DEEPEST levels deep."""
    level = [value]
    for _ in range(DEEPEST):
        inside = [list(value.values()) if isinstance(value, dict) else value for value in level]
        level = [part for value in inside if isinstance(value, list) for part in value]
    return not any(isinstance(value, (dict, list)) for value in level)


class DataUnpickler(pickle.Unpickler):
    """Unpickles a file from an unknown source, which may hold only data. may_name(module, name): whether the
    pickle may use this class or function. Raises UnpicklingError for any other name, which could be code.
    """

    def __init__(self, content: bytes, may_name: Callable[[str, str], bool]):
        super().__init__(io.BytesIO(content))
        self._may_name = may_name

    def find_class(self, module: str, name: str):
        """The class or function that a pickle names, if `may_name` allows it. pickle calls this method."""
        if self._may_name(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which may be code")
