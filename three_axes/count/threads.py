"""The other threads of a rank: whether one of them may still do something for whoever waits.

A thread is asleep where it waits for a lock of Python's and has set no limit: only another thread of the same
process can wake it. Its innermost frame is a function of the library that does so, or the reader's own, whose
instruction tells what it takes. The operating system says so exactly, of each thread: what system call it is
in, and how often it has gone to sleep. Some threads do nothing for anybody, whatever they are in; `IDLE`
lists them. All other threads may help, and of a rank that has such a one nothing is proven. Threads of C's
run no Python now, and may call some later: they free nobody where they are asleep as well, or where `NATIVE`
lists their names.
"""

from __future__ import annotations

import ctypes
import dis
import multiprocessing
import os
import platform
import re
import signal
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache, reduce
from inspect import getattr_static
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from queue import SimpleQueue
from types import BuiltinMethodType, CodeType, FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import lines, pytorch_private

# Functions of Python's library that wait for a lock, in their innermost frame: (end of the file, name).
SLEEPS = {
    ("threading.py", "wait"),  # Condition: and with it Event, Barrier, Queue, Future
    ("threading.py", "_wait_for_tstate_lock"),  # join, up to Python 3.12
    ("threading.py", "join"),
    ("concurrent/futures/thread.py", "_worker"),
    ("multiprocessing/pool.py", "worker"),
    ("multiprocessing/pool.py", "_handle_tasks"),
    ("multiprocessing/pool.py", "_handle_results"),
}
# What is waited in without a frame of the library: (type, method).
TAKES = {(type(threading.Lock()), "acquire"), (type(threading.RLock()), "acquire"), (SimpleQueue, "get")}
# Instructions between what is called and the call, that change nothing of what that is.
_BETWEEN = ("CACHE", "PRECALL", "PUSH_NULL", "LOAD_CONST", "LOAD_SMALL_INT", "KW_NAMES", "EXTENDED_ARG")
_always = lambda names: True
_STREAMS = ("_io", "ipykernel.iostream")  # modules of files that run no code of the reader's
# Threads that free nobody. (end of the file, name of an outer function): what the innermost frame must be in,
# where that matters, and whether it holds, by the outer function's names. Where it matters, all frames
# between the two must be of their files, or of multiprocessing's connections.
IDLE: dict[tuple[str, str], tuple[tuple[str, str] | None, Callable[[dict], bool]]] = {
    # Every ten seconds it draws bars anew.
    ("tqdm/_monitor.py", "run"): (None, lambda names: _are_plain(names["self"].get_instances())),
    ("IPython/core/history.py", "run"): (None, _always),  # writes the history to a file
    ("_pydevd_bundle/pydevd_daemon_thread.py", "run"): (None, _always),  # a debugger's, debugpy's too
    # A loader's: it hands on what workers have loaded to a loop that asks for it, which counts itself.
    ("torch/utils/data/_utils/pin_memory.py", "_pin_memory_loop"): (None, _always),
    # It replaces processes, or threads, that have ended.
    ("multiprocessing/pool.py", "_handle_workers"): (None, _always),
    # These take results of other processes, and may then call the reader's code.
    ("multiprocessing/pool.py", "_handle_results"): (
        ("multiprocessing/connection.py", "_recv"),
        lambda names: not names["cache"],
    ),
    ("concurrent/futures/process.py", "run"): (
        ("selectors.py", "select"),
        lambda names: not names["self"].pending_work_items,
    ),
    ("asyncio/base_events.py", "run_forever"): (
        ("selectors.py", "select"),
        lambda names: _nothing_is_planned(names["self"]),
    ),
}
# Beginnings of names of threads in C: of gloo and NCCL, which end what is noted elsewhere, of the store's
# server, of CUDA, ZeroMQ and an allocator.
NATIVE = ("pt_gloo", "gloo", "pt_tcpstore", "pt_nccl", "nccl", "NCCL", "cuda", "ZMQbg", "jemalloc")
COMMUNICATES = os.path.dirname(dist.__file__) + os.sep

NANOSLEEP = {"x86_64": ("35 ", "230 "), "aarch64": ("101 ", "115 ")}.get(platform.machine(), ())
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # Linux's system call to wait for a lock
WAIT, BITSET, PRIVATE = 0, 9, 128  # its operations, and that only threads of this process can wake
CAUGHT = re.compile(r"^SigCgt:\s*(\w+)", re.MULTILINE)  # a bit for each signal that has a handler
# Signals of a process's own errors, of which faulthandler tells.
FAULTS = {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV}
SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


class OwnThread(threading.Thread):
    """One of the course's own, which frees nobody. It ends with the process."""

    def __init__(self, target: Callable[[], None]):
        super().__init__(target=target, name="three-axes", daemon=True)


class Others(NamedTuple):
    """help: the first thread that may still do something, in words; '' where there is none. slept: of each
    that is asleep, how often it has gone to sleep.
    """

    help: str
    slept: tuple[int, ...]


def beside(known: Collection[int]) -> Others:
    """All threads that run Python now, but for the known ones, the one that asks and the course's own."""
    # To list them makes no frames, which would keep their tensors longer, as a memory budget would see.
    running = lines.of_threads(sys._current_exceptions).keys()
    # A thread of C's that has run Python once leaves a name behind.
    named = {thread.ident: thread for thread in threading.enumerate() if thread.ident in running}
    own = {ident for ident, thread in named.items() if isinstance(thread, OwnThread)}
    others = running - own - {*known, threading.get_ident()}
    hidden = {*known} - named.keys()  # a debugger's, for one
    if not others:
        return Others(_calls_from_outside(named.values(), len(hidden)), ())
    slept, frames = [], lines.of_threads(sys._current_frames)
    for ident in sorted(others & frames.keys()):
        thread, frame = named.get(ident), frames[ident]
        if _idle(frame):
            continue
        if thread is None or (since := _asleep(thread, frame)) is None:
            name = "a thread without a name" if thread is None else f"thread {thread.name!r}"
            at = lines.innermost(frame) or next(lines.outwards(frame))
            return Others(f"{name} may still do something, at {lines.place(at)}", ())
        slept.append(since)
    hidden |= others & frames.keys() - named.keys()
    # Such a thread is in a function of C's now, and in none of Python's.
    seen = [thread for ident, thread in named.items() if ident in frames or ident not in others]
    return Others(_calls_from_outside(seen, len(hidden)), tuple(slept))


def is_in_backward(thread: int) -> bool:
    """Whether the thread is in a backward of PyTorch's now, which calls none of the reader's functions; so is
    one of a GPU's, which runs no Python.
    """
    frame = lines.of_threads(sys._current_frames).get(thread)
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _matches(frame: FrameType, place: tuple[str, str]) -> bool:
    code, (file, name) = frame.f_code, place
    return code.co_name == name and code.co_filename.replace("\\", "/").endswith("/" + file)


def _idle(innermost: FrameType) -> bool:
    """Whether a listed function has come to this frame, calls none of the reader's and frees nobody."""
    between: set[str] = set()
    for frame in lines.callers(innermost):
        file = frame.f_code.co_filename.replace("\\", "/")
        for place, (waits, holds) in IDLE.items():
            if _matches(frame, place):
                ways = (place[0], "multiprocessing/connection.py", *(waits or ())[:1])
                is_it = waits is None or (
                    _matches(innermost, waits) and all(f.endswith(ways) for f in between)
                )
                return is_it and holds(frame.f_locals)
        if file.startswith((COMMUNICATES, "<string>")) or not file.startswith(lines.LIBRARIES):
            return False
        between.add(file)
    return False


def _are_plain(bars: Collection) -> bool:
    """Whether all bars are tqdm's own, or of who makes them plainly, on files of Python's own."""
    files = [getattr(bar.fp, "_wrapped", bar.fp) for bar in bars]
    for name in ("buffer", "raw"):  # what they write into
        files += [getattr(file, name) for file in files if hasattr(file, name)]
    ours = all(type(bar).__module__.startswith(("tqdm.", "huggingface_hub.")) for bar in bars)
    return ours and all(type(file).__module__ in _STREAMS for file in files)


def _nothing_is_planned(loop) -> bool:
    """Whether an event loop waits for nothing but another thread's call: no time, no socket, no signal."""
    watched = len(loop._selector.get_map()) if hasattr(loop, "_selector") else 2
    return not (loop._ready or loop._scheduled or watched > 1 or getattr(loop, "_signal_handlers", None))


def _asleep(thread: threading.Thread, frame: FrameType) -> int | None:
    """How often this thread has gone to sleep, where it is asleep until another thread of this process wakes
    it; None where it is not, or that cannot be known.
    """
    is_main = thread is threading.main_thread()
    since = main_asleep_since() if is_main else _in_a_lock(thread.native_id)
    is_known = since is not None and (any(_matches(frame, place) for place in SLEEPS) or _takes(frame))
    return since if is_known else None


def _takes(frame: FrameType) -> bool:
    """Whether the frame is in a call of `TAKES`, or enters a `with` that is one."""
    names = ChainMap(frame.f_locals, frame.f_globals)
    if _matches(frame, ("threading.py", "run")):  # of a thread whose target is such a method
        target = getattr_static(names["self"], "_target", None)
        return isinstance(target, BuiltinMethodType) and (type(target.__self__), target.__name__) in TAKES
    name, path, method = _called(frame.f_code, frame.f_lasti)
    try:
        # As it is stored: to ask for a property would run code of the reader's.
        taken = reduce(getattr_static, path, names[name])
    except (AttributeError, KeyError):
        return False
    return (type(taken), method) in TAKES


@lru_cache(1000)
def _called(code: CodeType, at: int) -> tuple[str, tuple[str, ...], str]:
    """What is called by the instruction at this place: (a variable, attributes of it, a method). No variable
    is named '', which is given where that cannot be read.
    """
    steps = [step for step in dis.get_instructions(code) if step.offset <= at and step.opname not in _BETWEEN]
    method, last = "acquire", steps.pop()  # a lock's `with` does the same
    if last.opname in ("CALL", "CALL_KW") and steps and steps[-1].opname in ("LOAD_METHOD", "LOAD_ATTR"):
        method = steps.pop().argval
    elif last.opname != "BEFORE_WITH":
        return "", (), ""
    path: list[str] = []
    while steps and steps[-1].opname == "LOAD_ATTR":
        path.insert(0, steps.pop().argval)
    named = steps and steps[-1].opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"))
    return (steps[-1].argval if named else "", tuple(path), method)


def main_asleep_since() -> int | None:
    """How often the main thread has gone to sleep, where it seems to wait for a lock without a limit, and no
    debugger may hold it there, nor a signal wake it.
    """
    main = threading.main_thread()
    since = _in_a_lock(main.native_id)
    if since is None or "pydevd" in sys.modules or _is_signalled() or _may_be_told_by_children():
        return None
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # anybody may send that, and it raises
        frame = lines.of_threads(sys._current_frames).get(main.ident or 0)
        return None if lines.is_guarded(frame, lines.LIBRARIES) else since
    return since


class Sleep(NamedTuple):
    """A thread that waits in the system for a lock which lies at `address`. since: how often it had gone to
    sleep.
    """

    since: int
    address: int
    is_limited: bool


def _sleep(native_id: int | str | None) -> Sleep | None:
    if FUTEX is None:
        return None
    try:
        task = f"/proc/self/task/{native_id}"
        with open(f"{task}/status") as status, open(f"{task}/syscall") as syscall:
            switches, call = SWITCHES.search(status.read()), syscall.read().split()
    except OSError:  # no Linux, or not all of it
        return None
    if switches is None or len(call) < 5 or call[0] != str(FUTEX):
        return None
    address, operation, _, limit = (int(word, 16) for word in call[1:5])
    is_private = operation & PRIVATE and operation & 127 in (WAIT, BITSET)
    return Sleep(int(switches[1]), address, limit != 0) if is_private else None


def _in_a_lock(native_id: int | str | None) -> int | None:
    """How often a thread has gone to sleep that waits in the system for a lock, and has set no limit."""
    sleep = _sleep(native_id)
    return None if sleep is None or sleep.is_limited else sleep.since


class _Place(ctypes.Structure):
    """What `dladdr` of the C library says of an address."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("start", ctypes.c_void_p),
    ]


def _is_the_profilers(native_id: str) -> bool:
    """Whether a thread of C's waits, from time to time, for a variable of PyTorch's library itself: so does
    the one that its profiler leaves behind, which reads settings and runs no Python.
    """
    sleep, place = _sleep(native_id), _Place()
    found = sleep and ctypes.CDLL(None).dladdr(ctypes.c_void_p(sleep.address), ctypes.byref(place))
    return bool(found and os.path.basename(place.file or b"").startswith(b"libtorch_cpu."))


def _sleeps_for_a_time(task: Path) -> bool:
    """Whether the thread does nothing but let time pass. What has a library's name and does so was begun by
    another's code: a thread has its maker's name until it takes its own.
    """
    try:
        return (task / "syscall").read_text().startswith(NANOSLEEP)
    except OSError:  # not every system tells
        return False


def _is_signalled() -> bool:
    """Whether a signal may run the reader's code in the main thread, which a lock of Python's lets it do."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    stop: Any = handlers.pop(signal.SIGINT)  # Python's own raises; a rank's does so in a call that is ended
    ours = getattr(stop, "__module__", "").startswith("helpers.ranks.")
    known = ours or stop is signal.default_int_handler or not callable(stop)
    if _is_timed() or not known or any(callable(h) and not _is_a_loaders(h) for h in handlers.values()):
        return True
    try:
        caught = int(CAUGHT.findall(Path("/proc/self/status").read_text())[0], 16)
    except (OSError, IndexError):
        return True
    # Some that Python did not set itself: C's may call Python.
    return any(caught >> (n - 1) & 1 and not callable(h) and n not in FAULTS for n, h in handlers.items())


def _is_a_loaders(handler: Callable) -> bool:
    """Whether it is what a `DataLoader` sets, which raises where one of its processes has died, and calls no
    handler of the reader's. (`_may_be_told_by_children` asks whether there are any.)
    """
    if getattr(handler, "__module__", "") != pytorch_private.HANDLES_LOADERS:
        return False
    return not any(callable(cell.cell_contents) for cell in getattr(handler, "__closure__", None) or ())


def _is_timed() -> bool:
    """Whether the system will send this process a signal, which may end it."""
    return hasattr(signal, "getitimer") and signal.getitimer(signal.ITIMER_REAL)[0] > 0


def _children() -> set[int]:
    """The processes that have come from this one, but for those that serve PyTorch and multiprocessing."""
    servers = {getattr(forkserver._forkserver, "_forkserver_pid", None)}
    servers |= {getattr(resource_tracker._resource_tracker, "_pid", None)}
    files = Path("/proc/self/task").glob("*/children")
    found = {int(child) for file in files for child in file.read_text().split()} - servers
    return {child for child in found if not Path(f"/proc/{child}/comm").read_text().startswith("torch_shm")}


def _may_be_told_by_children() -> bool:
    """Whether a process that this one has made may wake its main thread: by a signal, as one that is not
    multiprocessing's may, or by its end, for which a `DataLoader` has set a handler.
    """
    try:
        found = _children()
    except OSError:  # one has ended, or a thread
        return True
    # `active_children()` would take the end of one from who waits for it.
    others = found - {child.pid for child in list(vars(multiprocessing.process)["_children"])}
    return bool(others or (found and callable(signal.getsignal(signal.SIGCHLD))))


def _calls_from_outside(named: Iterable[threading.Thread], hidden: int) -> str:
    """What may have this process run something though no thread of Python's does, in words; '' where nothing
    can: another process, a signal, a thread of C's. hidden: how many that run Python are not among the named.
    """
    if pytorch_private.takes_remote_calls():
        return "torch.distributed.rpc may still call something"
    if _is_timed():
        return "a timer may still send a signal"
    known = {str(thread.native_id) for thread in named}
    tasks, awake = Path("/proc/self/task"), []
    try:
        given = Path("/proc/self/comm").read_text()  # by whoever names the process
        for task in tasks.iterdir() if tasks.exists() else ():
            if task.name in known or _in_a_lock(task.name) is not None:
                continue
            name = (task / "comm").read_text()
            is_named = name.startswith(NATIVE) and name != given and not _sleeps_for_a_time(task)
            if not is_named and not _is_the_profilers(task.name):
                awake.append(name.strip())
    except OSError:
        return "a thread of C's has ended just now"
    return f"a thread of C's, {awake[0]!r}, may still do something" if len(awake) > hidden else ""
