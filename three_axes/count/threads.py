"""What else can act in a rank besides its main thread: a thread, a process, a timer, a signal handler.

Threads and processes from before the reader's first line are known, by number and start time, and so are the
course's own threads. Some others never free a rank: those of gloo, NCCL and CUDA, whose work is recorded
elsewhere, tqdm's monitor, and a loader's pool. If a rank has any other, nothing is proven about it.
"""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .. import cpython_private, lines, pytorch_private

# How the names of native threads and of processes begin: those of gloo and NCCL, of the store's server, of
# CUDA and its backward; of a loader's pool, and of the process that serves its memory.
HARMLESS: tuple[str, ...] = ("pt_gloo", "gloo", "pt_tcpstore", "pt_nccl", "nccl", "NCCL", "cuda")
HARMLESS += ("pt_autograd", "pt_data_worker", "pt_pin_memory", "torch_shm")
# Modules of Python threads that never free a rank, and the names that a loader's pool gives its threads.
MONITORS, FEEDERS = ("tqdm._monitor",), ("QueueFeederThread",)


class OwnThread(threading.Thread):
    """A thread of the course's own, which never frees a rank. It ends with the process."""

    def __init__(self, target: Callable[[], None]):
        super().__init__(target=target, name="three-axes", daemon=True)


class Before:
    """The threads and processes at the moment when this object is made: before the reader's first line."""

    def __init__(self):
        self._threads = weakref.WeakSet(_pythons())
        self._running = set(_running())
        self._tasks, self._children, self._caught = _tasks(), _children(), _caught()
        self._handlers = _handlers()

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Native threads that start in this block also count as known: the course forms a group in it."""
        then = _tasks()
        yield
        self._tasks |= {task: name for task, name in _tasks().items() if task not in then}

    def since(self, is_placed: bool = False) -> str:
        """A description of the first new thread, process or handler that may act; '' if there is none.
        is_placed: also name the line where a thread is. (Reading its frames keeps the tensors that they hold
        alive.)
        """
        try:
            return self._came(is_placed)
        except OSError as e:  # no file descriptor is left to ask the system
            return f"cannot say what runs in it: {e.strerror}"

    def _came(self, is_placed: bool) -> str:
        threads = _pythons()
        for thread in threads:
            if thread not in self._threads and not _is_harmless(thread):
                return f"has a thread {thread.name!r}{_place(thread.ident) if is_placed else ''}"
        if hidden := _running() - self._running - {thread.ident for thread in threads}:
            at = _place(hidden.pop()) if is_placed else ""
            return f"has a thread that Python's threading does not know{at}"
        named = {str(thread.native_id) for thread in threads}
        own = Path("/proc/self/comm").read_text().strip() if self._tasks else ""  # threads inherit this name
        for task, name in _tasks().items():
            is_harmless = name.startswith(HARMLESS) and name != own
            if task not in self._tasks and task[0] not in named and not is_harmless:
                return f"has a native thread {name!r}"
        for child, name in _children().items():
            if child not in self._children and not name.startswith(HARMLESS):
                return f"has started a process, {name!r}"
        return self._signalled()

    def _signalled(self) -> str:
        if hasattr(signal, "getitimer") and signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            return "has set a timer, which will send a signal"
        handlers = _handlers()
        known = {n for n, handler in handlers.items() if _is_own(handler)}
        new = {n for n, handler in handlers.items() if handler != self._handlers[n]} - known
        if new := new | _caught() - self._caught - known:
            return f"has a handler of {getattr(min(new), 'name', 'a signal')}"
        return ""


def is_in_backward() -> bool:
    """Whether the main thread is in a backward of PyTorch's, and not in a Python function that the backward
    called.
    """
    frame = lines.of_threads(sys._current_frames).get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _pythons() -> list[threading.Thread]:
    """The threads that Python started. (Python also registers a C thread that has asked for itself once.)"""
    kept = getattr(threading, "_DummyThread", ())
    return [thread for thread in threading.enumerate() if not isinstance(thread, kept)]


def _running() -> set[int]:
    """All threads that run Python. This list makes no frames."""
    return set(lines.of_threads(sys._current_exceptions))


def _is_harmless(thread: threading.Thread) -> bool:
    named = isinstance(thread, OwnThread) or type(thread).__module__ in MONITORS
    return named or thread.name in FEEDERS or _name(thread.native_id).startswith("pt_pin_memory")


def _name(native_id: int | None) -> str:
    with suppress(OSError):
        return Path(f"/proc/self/task/{native_id}/comm").read_text().strip()
    return ""


def _place(ident: int | None) -> str:
    frame = lines.of_threads(sys._current_frames).get(ident or 0)
    at = lines.innermost(frame) or next(lines.outwards(frame), None)
    return f" in {lines.place(at)}" if at else ""


def _tasks() -> dict[tuple[str, str], str]:
    """(number, start) -> name, for each thread that the system knows; {} if the system does not list them."""
    return dict(_alive(Path("/proc/self/task").glob("*/stat")))


def _children() -> dict[tuple[str, str], str]:
    """The same for this process's children, without multiprocessing's resource tracker."""
    tidies = str(cpython_private.resource_tracker_pid())
    numbers: list[str] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            numbers += file.read_text().split()
    return dict(_alive(Path(f"/proc/{number}/stat") for number in numbers if number != tidies))


def _alive(files: Iterator[Path]) -> Iterator[tuple[tuple[str, str], str]]:
    """Parse proc_pid_stat(5): number (name) state …, and the start time in field 22."""
    for file in files:
        with suppress(OSError):  # it has ended
            number, _, more = file.read_text().partition(" (")
            name, _, fields = more.rpartition(") ")
            state, *others = fields.split()
            if state not in "ZX":
                yield (number, others[18]), name


def _handlers() -> dict[int, object]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _is_own(handler: object) -> bool:
    """Whether a handler is the course's, or the one with which a loader notices its pool's end."""
    file = getattr(getattr(handler, "__code__", None), "co_filename", "")
    of_loader = getattr(handler, "__module__", None) == pytorch_private.HANDLES_LOADERS
    return of_loader or file.startswith(tuple(map(str, lines.COURSE)))


def _caught() -> set[int]:
    """The signals that this process handles, even in C; empty if the system does not list them."""
    with suppress(OSError, IndexError):
        mask = int(Path("/proc/self/status").read_text().split("SigCgt:")[1].split()[0], 16)
        return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}
    return set()
