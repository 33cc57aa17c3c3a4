"""Files and names that strangers made: read as far as they make sense, and refused in one sentence.

A file may be a pipe that nobody writes to, larger than memory, nested without end, or hold numbers with which
nothing can be computed. A name may hold escape sequences, which a terminal would obey.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import stat
from collections.abc import Callable

LARGEST = 10_000_000  # bytes of a file that is read whole: as objects they take up to forty times as many
DEEPEST = 100  # lists and objects inside each other
DIGITS = 18  # of a whole number: it fits 64 bits


class Unreadable(ValueError):
    """A file that is not what it should be. The message is one sentence: what it is, and what to do."""


def plain(text: object, most: int = 200) -> str:
    """What a stranger wrote, fit for a terminal: one line of at most so many letters, and nothing that the
    terminal would obey.
    """
    text = str(text)
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:most])
    return shown if len(text) <= most else shown[:-1] + "…"


def open_file(path: str | os.PathLike) -> io.BufferedReader:
    """A file, opened to be read as bytes. Raises Unreadable where there is none to be read."""
    name = plain(path, 1000)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe would be to wait for who writes to it
            raise Unreadable(f"{name} is a folder, a pipe or a device: give a file")
        return open(path, "rb")
    except OSError as e:
        raise Unreadable(f"cannot read {name}: {e.strerror}") from None


def read_json(path: str | os.PathLike) -> object:
    """What a JSON file holds. Raises Unreadable where it is none, has more than `LARGEST` bytes, is nested
    deeper than `DEEPEST`, or holds a number that is not finite or a whole one of more than `DIGITS` digits.
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
    """Whether no more than DEEPEST lists and objects are inside each other."""
    level = [value]
    for _ in range(DEEPEST):
        inside = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [part for one in inside if isinstance(one, list) for part in one]
    return not any(isinstance(one, (dict, list)) for one in level)


class DataUnpickler(pickle.Unpickler):
    """Reads a stranger's pickle, which may hold data alone. may_name(module, name): what it may name. Raises
    UnpicklingError for anything else, since that could be code.
    """

    def __init__(self, content: bytes, may_name: Callable[[str, str], bool]):
        super().__init__(io.BytesIO(content))
        self._may_name = may_name

    def find_class(self, module: str, name: str):
        """The class or function that a pickle names, where `may_name` allows it. pickle itself calls this."""
        if self._may_name(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which may be code")
