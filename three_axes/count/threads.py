"""Finds threads, processes, timers and signal handlers that might free a rank whose main thread is blocked.

If a rank has one, no hang is proven. Ignored are threads and processes that ran before the user's code (known
by number and start time), and some that never free a rank: this project's threads; those of gloo, NCCL and
CUDA, whose work is recorded elsewhere; tqdm's monitor; and the pool of a DataLoader.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .. import cpython_private, lines, pytorch_private

# Native threads and processes whose names begin so never free a rank: those of gloo and NCCL, of the store's
# server, of CUDA and its backward; of a DataLoader's pool, and of the process that serves its memory.
HARMLESS: tuple[str, ...] = ("pt_gloo", "gloo", "pt_tcpstore", "pt_nccl", "nccl", "NCCL", "cuda")
HARMLESS += ("pt_autograd", "pt_data_worker", "pt_pin_memory", "torch_shm")
# Python threads that never free a rank: of tqdm, known by their module; of a DataLoader, by their name.
MONITORS, FEEDERS = ("tqdm._monitor",), ("QueueFeederThread",)
# Raised when a file in /proc is read and its thread or process has ended, or the system has no such file.
ENDED = FileNotFoundError, ProcessLookupError
Started = dict[tuple[str, str], str]  # (number, start time) of threads or processes -> name


class OwnThread(threading.Thread):
    """A thread of this project, which never frees a rank. It ends with the process."""

    def __init__(self, target: Callable[[], None]):
        super().__init__(target=target, name="three-axes", daemon=True)


class Baseline:
    """This process's threads, children and signal handlers when the object is made: before user code."""

    def __init__(self):
        self._threads, self._hidden = _threads(), _hidden()
        self._children, self._handlers = _children(), _handlers()

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Threads that start in this block also count as known: in it a World forms its group."""
        before = _threads()
        yield
        self._threads |= {started: name for started, name in _threads().items() if started not in before}

    def since(self) -> str:
        """The first new thread, process, timer or handler that may act, in words; '' if there is none."""
        try:
            return self._first_new()
        except OSError as e:  # no file descriptor is left to ask the system
            return f"cannot say what runs in it: {e.strerror}"

    def _first_new(self) -> str:
        if hidden := _hidden() - self._hidden:
            return f"has a thread that Python's threading does not know{_place(hidden.pop())}"
        now, python = _threads(), {str(thread.native_id): thread for thread in threading.enumerate()}
        own = {number: name for (number, _), name in now.items()}.get(str(os.getpid()))
        for started, name in now.items():
            if started not in self._threads:
                if thread := python.get(started[0]):
                    if not _is_harmless(thread, name):
                        return f"has a thread {thread.name!r}{_place(thread.ident)}"
                # A new thread has its process's name at first.
                elif not name.startswith(HARMLESS) or name == own:
                    return f"has a native thread {name!r}"
        for started, name in _children().items():
            if started not in self._children and not name.startswith(HARMLESS):
                return f"has started a process, {name!r}"
        if hasattr(signal, "getitimer") and signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            return "has set a timer, which will send a signal"
        for number, handler in _handlers().items():
            is_known = number in self._handlers and self._handlers[number] == handler
            if not is_known and not _is_own(handler):
                return f"has a handler of {getattr(number, 'name', 'a signal')}"
        return ""


def is_in_backward() -> bool:
    """Whether the main thread is in PyTorch's C++ code for a backward, and in no Python code called by it."""
    frame = lines.of_threads(sys._current_frames).get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _hidden() -> set[int]:
    """The threads that run Python and that `threading` does not know."""
    return set(lines.of_threads(sys._current_exceptions)) - {t.ident for t in threading.enumerate()}


def _is_harmless(thread: threading.Thread, name: str) -> bool:
    """Whether this Python thread never frees a rank. name: the system's, which is gloo's name for a thread
    that one of gloo's threads has started.
    """
    named = isinstance(thread, OwnThread) or type(thread).__module__ in MONITORS
    return named or thread.name in FEEDERS or name.startswith("pt_pin_memory")


def _place(ident: int | None) -> str:
    frame = lines.of_threads(sys._current_frames).get(ident or 0)
    at = lines.innermost(frame) or next(lines.outwards(frame), None)
    return f" in {lines.place(at)}" if at else ""


def _threads() -> Started:
    """This process's threads; if the system does not list them, those that Python knows."""
    if tasks := _tasks():
        return _alive(f"/proc/self/task/{task}/stat" for task in tasks)
    return {(str(thread.native_id), ""): thread.name for thread in threading.enumerate()}


def _children() -> Started:
    """This process's children, without multiprocessing's resource tracker."""
    tidies = str(cpython_private.resource_tracker_pid())
    numbers: list[str] = []
    for task in _tasks():
        with suppress(*ENDED):
            numbers += Path(f"/proc/self/task/{task}/children").read_text().split()
    return _alive(f"/proc/{number}/stat" for number in numbers if number != tidies)


def _tasks() -> list[str]:
    with suppress(FileNotFoundError):
        return os.listdir("/proc/self/task")
    return []


def _alive(files: Iterable[str]) -> Started:
    """The threads or processes that have not ended. files: of the format of proc_pid_stat(5), which is
    `number (name) state …` with the start time in field 22.
    """
    alive = {}
    for file in files:
        with suppress(*ENDED):
            number, _, more = Path(file).read_text(errors="replace").partition(" (")
            name, _, fields = more.rpartition(") ")
            state, *others = fields.split()
            if state not in "ZX":
                alive[number, others[18]] = name
    return alive


def _handlers() -> dict[int, object]:
    """Signal -> handler, for the signals that this process handles by proc_pid_status(5). For a handler in C,
    of which Python does not know, this is Python's earlier one.
    """
    caught = -1  # if the system does not list them: all signals
    with suppress(FileNotFoundError):
        status = Path("/proc/self/status").read_text()
        caught = int(re.findall(r"^SigCgt:\s*(\w+)", status, re.M)[0], 16)
    return {n: signal.getsignal(n) for n in signal.valid_signals() if caught >> (n - 1) & 1}


def _is_own(handler: object) -> bool:
    """Whether a handler is this project's, or the one by which a DataLoader notices a worker's end."""
    file = getattr(getattr(handler, "__code__", None), "co_filename", "")
    of_loader = getattr(handler, "__module__", None) == pytorch_private.HANDLES_LOADERS
    return of_loader or file.startswith(tuple(map(str, lines.COURSE)))
