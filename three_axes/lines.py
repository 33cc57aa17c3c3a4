"""Finds which lines of a traceback the reader (the user) wrote, and describes them: 'Cell In[7], line 3'."""

from __future__ import annotations

import gc
import linecache
import math
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from .files import PACKAGE, ROOT

STILL = 5.0  # if for so many seconds no rank begins or ends an operation, each rank's line is printed


class Line(NamedTuple):
    """One line of code, in a form that can be sent between processes."""

    file: str
    number: int
    function: str


COURSE = PACKAGE, *(ROOT / name for name in ("helpers", "tools", "notebooks/drops"))  # this project's code
PSEUDO = "<frozen", "<string>", "<__array_function__"  # beginnings of a frame's file name that is no file


def _libraries() -> tuple[str, ...]:
    """Beginnings of file names whose lines are not the reader's: Python, its packages, this project."""
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]}
    if torch := getattr(sys.modules.get("torch"), "__file__", None):
        folders.add(os.path.dirname(os.path.dirname(torch)))
    folders |= {*map(str, COURSE)}
    return tuple(f + os.sep for f in folders) + PSEUDO


LIBRARIES = _libraries()
# The code that calls a reader's function on a rank, and examines its result.
OURS = tuple(str(folder) + os.sep for folder in (PACKAGE, ROOT / "helpers/ranks", ROOT / "helpers/practice"))


_asking = threading.Lock()


def frames_of_threads() -> dict[int, FrameType]:
    """`sys._current_frames()`, called with garbage collection off. Up to Python 3.11 the collector may run
    inside that function, and if it then frees a `threading.local`, the process deadlocks (CPython's issue
    106883).
    """
    with _asking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def readers(frames: list[Line]) -> list[Line]:
    """The reader's lines among these; if there are none, the last line, unless it belongs to this project."""
    last = [f for f in frames[-1:] if not f.file.startswith(OURS)]
    return [f for f in frames if not f.file.startswith(LIBRARIES)] or last


def are_readers(frames: list[Line]) -> bool:
    """Whether one of these lines is the reader's."""
    return any(not f.file.startswith(LIBRARIES) for f in frames)


def callers(frame: FrameType | None, most: float = math.inf) -> Iterator[FrameType]:
    """This frame and its callers, from the innermost outwards; at most `most` frames."""
    while frame is not None and most > 0:
        yield frame
        frame, most = frame.f_back, most - 1


def outwards(frame: FrameType | None) -> Iterator[Line]:
    """The lines of this frame and of all its callers, outwards."""
    return (Line(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in callers(frame))


def innermost(frame: FrameType | None) -> Line | None:
    """The reader's line nearest to this frame, looking outwards; None if there is none."""
    return next((line for line in outwards(frame) if not line.file.startswith(LIBRARIES)), None)


def stack(frame: FrameType | None) -> list[Line]:
    """All lines from this frame outwards to the reader's outermost; [] if no line is the reader's."""
    lines = list(outwards(frame))
    while lines and lines[-1].file.startswith(LIBRARIES):
        lines.pop()
    return lines


def place(line: Line) -> str:
    """'Cell In[7], line 3' in a notebook, 'train.py, line 3' elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: None)
    where = " ".join(name(line.file) or [os.path.basename(line.file)])
    return f"{where}, line {line.number}"


def show(line: Line) -> str:
    """The place of the line and, if its source can be read here, its text."""
    text = linecache.getline(line.file, line.number).strip()
    return place(line) + (f":  {text}" if text else "")
