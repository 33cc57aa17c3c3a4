"""Starts the processes that become ranks, with torch imported already.

On Linux they are forked from one server, `multiprocessing`'s forkserver. On macOS forking after imports is
not safe, so each process is spawned, which takes seconds. There some spare processes wait: a world takes
them, and others are spawned in the background. An idle spare holds 0.15 to 0.3 GB.
A process learns which rank it is from its first message; a spare has not received that message yet.
Where ranks need another NCCL than PyTorch's, the server is restarted with that library (`LD_PRELOAD`).
This module does not import torch, so that the server can start before the notebook imports torch.
"""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import types
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from three_axes import cpython_private

from . import folders

SPARES = 4  # at most; the course's worlds have two, four or eight ranks
ROOT = Path(__file__).resolve().parents[2]  # the folder that contains `helpers`


class Unnamed(NamedTuple):
    """A process that has not received its rank yet, and the kernel's ends of its three pipes."""

    process: BaseProcess
    control: Connection
    output: Connection
    leash: Connection


FILES = "too many files are open: `ulimit -n` prints the limit"
_spares: list[Unnamed] = []
_lock = threading.RLock()  # worlds may be made in several threads
_library = ""  # path of the library that processes load before PyTorch; "" if there is none


def spawns() -> bool:
    """Whether ranks are spawned. On Linux they are if THREE_AXES_SPAWN=1 is set, which tests do."""
    return sys.platform != "linux" or bool(os.environ.get("THREE_AXES_SPAWN"))


def warm(spares: int = SPARES) -> None:
    """Start the server or, where ranks are spawned, up to `spares` spare processes. Their imports run in the
    background. The import of `World` calls this.

    Raises ImportError on Windows: ranks are freed by Unix signals, and watch the kernel by fcntl.
    """
    if sys.platform == "win32":
        raise ImportError(
            "ranks run on Linux and macOS. On Windows start the course inside WSL 2, which is a Linux: in"
            " PowerShell `wsl --install`, then in its terminal as on Linux"
        )
    if not spawns():
        with refusal_explained():
            return _start_server()
    with _lock:
        _spares[:] = [spare for spare in _spares if spare.process.is_alive()]
        while len(_spares) < min(spares, SPARES):
            _spares.append(_start())


@contextmanager
def refusal_explained():
    """If the system refuses to start a process, raise RuntimeError with what to do."""
    try:
        yield
    except (OSError, EOFError) as e:
        full = getattr(e, "errno", None) in (errno.EMFILE, errno.ENFILE)
        why = FILES if full else "`ulimit -a` prints the limits, and TMPDIR is where folders are made"
        raise RuntimeError(f"no ranks can start here ({e or type(e).__name__}): {why}") from None


def take(library: str = "") -> Unnamed:
    """A process for a rank: a spare process if there is one, otherwise a new one. library: the path of a
    library that the process loads before PyTorch. If it differs from the last call's, the server is
    restarted; living ranks stay.
    """
    with _lock:
        _load(library)
        while _spares:
            spare = _spares.pop(0)
            if spare.process.is_alive():
                return spare
        try:
            if not spawns():
                _start_server()
            return _start()
        except (EOFError, BrokenPipeError, ConnectionError):  # the server had ended
            _start_server()
            return _start()


def _load(library: str) -> None:
    global _library
    if library == _library:
        return
    _library = library
    while _spares:
        spare = _spares.pop()
        spare.process.kill()
        spare.process.join()
    cpython_private.forget_fork_server()


def _start() -> Unnamed:
    context = mp.get_context("spawn" if spawns() else "forkserver")
    control, its_control = context.Pipe()
    output, its_output = context.Pipe(duplex=False)
    its_leash, leash = context.Pipe(duplex=False)
    its_ends = its_control, its_output, its_leash
    process = context.Process(target=_be_a_rank, args=its_ends, daemon=True)
    try:
        # multiprocessing asks for the current folder, and fails if that was deleted.
        with _in_sessions(), main_hidden(), _stop_blocked(), _inside(None if cwd() else ROOT), _environ():
            process.start()
    finally:
        for end in its_ends:
            end.close()
    return Unnamed(process, control, output, leash)


def _be_a_rank(*pipes: Connection) -> None:
    """Body of a process that becomes a rank."""
    from . import preload

    preload.worker.main(*pipes)


def _start_server() -> None:
    if is_running():
        return
    from multiprocessing import forkserver

    folders.home()  # the server's socket is made there
    mp.get_context("forkserver").set_forkserver_preload(["helpers.ranks.preload"])
    with _in_sessions(), main_hidden(), _inside(ROOT), _stop_blocked(), _environ():
        forkserver.ensure_running()


@contextmanager
def _in_sessions():
    """Give each process that starts in this block a session of its own.

    A kernel that is shut down first ends all processes of its group, and waits for them. multiprocessing's
    resource tracker ignores SIGTERM: in that group it would make each restart 2.5 seconds longer.
    """
    with _lock, cpython_private.starting_with("import os; os.setsid()"):  # one thread at a time
        yield


@contextmanager
def _environ():
    """Set the environment of a process that starts in this block, for its imports: the kernel's pid
    (`preload` ends the process when the kernel ends), the library to load first, and the log level of
    PyTorch's C++ code, whose log is for developers (the stack of a watchdog after an abort; a warning that a
    send makes a communicator). A log level that the reader has set is kept.
    """
    before = dict(os.environ)
    os.environ["THREE_AXES_KERNEL"] = str(os.getpid())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if _library:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [_library, os.environ.get("LD_PRELOAD")]))
    try:
        yield
    finally:
        for name in ("THREE_AXES_KERNEL", "TORCH_CPP_LOG_LEVEL", "LD_PRELOAD"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


@contextmanager
def _stop_blocked():
    """Block SIGINT in a process that starts in this block: the stop button is for the notebook. (A rank
    unblocks SIGINT when it has received its `Setup`.)
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # a tracker that starts later would undo the mask below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_running() -> bool:
    """Whether this process has started the server, and the server and its socket are still there."""
    pid, socket = cpython_private.fork_server()
    if socket and not os.path.exists(socket):
        cpython_private.forget_fork_server()  # a cleaner removed the socket; living ranks keep the server
        return False
    try:
        return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def server_pid() -> int | None:
    """The pid of the server that forks ranks now; None if no server runs, or ranks are spawned."""
    return None if spawns() or not is_running() else cpython_private.fork_server()[0]


def has_ended(pid: int | None) -> bool:
    """Whether the fork server `pid` has ended, or another has replaced it. A killed server closes its pipes
    just before it has ended, so this waits up to half a second for the end. None, of a spawned process:
    False.
    """
    until = time.monotonic() + 0.5
    while (is_there := server_pid() == pid) and pid is not None and time.monotonic() < until:
        time.sleep(0.01)
    return not is_there


def forget() -> None:
    """In a fork of the kernel: close the fork's copies of the pipes to the server and to the spare processes,
    so that these notice when the kernel ends.
    """
    while _spares:
        disown(*_spares.pop())
    cpython_private.forget_fork_server()


def disown(process: BaseProcess, *pipes: Connection) -> None:
    """In a fork of the kernel: close the fork's copies of the pipes, so that the process, which is the
    kernel's, notices when the kernel ends.
    """
    for pipe in pipes:
        pipe.close()
    cpython_private.disown(process)


def cwd() -> str | None:
    """The current folder; None if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


@contextmanager
def _inside(folder: Path | None):
    """In this block the current folder is `folder`, in which a new Python finds this package before any other
    package of its name. None: do not change the folder.
    """
    if folder is None:
        yield
        return
    before = os.open(".", os.O_PATH)  # a descriptor works even if the folder was deleted
    os.chdir(folder)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


@contextmanager
def main_hidden():
    """Keep multiprocessing from importing the user's script again in every rank.

    Functions are sent by value, so ranks need no `__main__`, and scripts need no guard.
    """
    real = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real


@contextmanager
def undisturbed(again: bool = True):
    """Delay a stop (SIGINT) until the block has ended: a stop inside an import of torch leaves torch half
    imported. In another thread than the main one this does nothing: Python handles signals in the main
    thread.

    again: whether a stop raises KeyboardInterrupt after the block; if False, the stop is ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and again:
        raise KeyboardInterrupt
