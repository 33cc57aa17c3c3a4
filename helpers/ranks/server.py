"""Where processes for ranks come from, with torch imported already.

On Linux they are forked from one server, `multiprocessing`'s forkserver. On macOS forking after imports is
not safe, so each is spawned, which takes seconds. There some spares wait: a world takes them, and others are
spawned in the background. An idle spare holds 0.15 to 0.3 GB.
A process learns which rank it is from the first message, so a spare is a rank that was not told yet.
Where ranks need another NCCL than PyTorch's, the server is begun anew with that one (`LD_PRELOAD`).
This module imports no torch, so that all this can start before the notebook imports it.
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
ROOT = Path(__file__).resolve().parents[2]  # of the package


class Unnamed(NamedTuple):
    """A process that waits to be told which rank it is, and the kernel's ends of its pipes."""

    process: BaseProcess
    control: Connection
    output: Connection
    leash: Connection


FILES = "too many files are open: `ulimit -n` says how many may be"
WHY = {
    errno.EMFILE: FILES,
    errno.ENFILE: FILES,
    errno.EAGAIN: "no more processes may be started: `ulimit -u` says how many may be",
    errno.ENOMEM: "no memory is left for another process",
    errno.EACCES: "no folder can be made that this process may use: look at `umask`, and set TMPDIR",
    errno.ENOSPC: "no space is left for a folder: set TMPDIR to another disk's",
}
_spares: list[Unnamed] = []
_counting = threading.RLock()  # worlds may be made in several threads
_library = ""  # what processes load before PyTorch


def spawns() -> bool:
    """Whether ranks are spawned. THREE_AXES_SPAWN=1 has it so on Linux too, for tests."""
    return sys.platform != "linux" or bool(os.environ.get("THREE_AXES_SPAWN"))


def warm(spares: int = SPARES) -> None:
    """Start the server, or spares, whose imports go on in the background. Called on import of `World`.

    Raises ImportError on Windows: ranks are freed by Unix signals, and watch the kernel by fcntl.
    """
    if sys.platform == "win32":
        raise ImportError(
            "ranks run on Linux and macOS. On Windows start the course inside WSL 2, which is a Linux: in"
            " PowerShell `wsl --install`, then in its terminal as on Linux"
        )
    if not spawns():
        with in_words():
            return _start_server()
    with _counting:
        _spares[:] = [spare for spare in _spares if spare.process.is_alive()]
        while len(_spares) < min(spares, SPARES):
            _spares.append(_start())


@contextmanager
def in_words():
    """Where the system forbids what a process needs to start, raise RuntimeError with what to do."""
    try:
        yield
    except (OSError, EOFError) as e:
        why = WHY.get(getattr(e, "errno", None), "the process that starts them could not: see `ulimit -a`")
        raise RuntimeError(f"no ranks can start here ({e or type(e).__name__}): {why}") from None


def take(library: str = "") -> Unnamed:
    """A process for a rank: a spare if there is one, else a new one. library: the path of one that it loads
    before PyTorch. Where the last had another, the server is begun anew; ranks that are there stay.
    """
    with _counting:
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
    mine, its = context.Pipe()
    printed, printing = context.Pipe(duplex=False)
    leashed, leash = context.Pipe(duplex=False)
    process = context.Process(target=_be_a_rank, args=(its, printing, leashed), daemon=True)
    try:
        # multiprocessing asks where it works, which nobody knows of a folder that is gone.
        with _in_sessions(), main_hidden(), _stop_blocked(), _inside(None if folder() else ROOT), _environ():
            process.start()
    finally:
        for end in (its, printing, leashed):
            end.close()
    return Unnamed(process, mine, printed, leash)


def _be_a_rank(*pipes: Connection) -> None:
    """Body of the process."""
    from . import preload

    preload.worker.main(*pipes)


def _start_server() -> None:
    if runs():
        return
    from multiprocessing import forkserver

    folders.home()  # where its socket will be
    mp.get_context("forkserver").set_forkserver_preload(["helpers.ranks.preload"])
    with _in_sessions(), main_hidden(), _inside(ROOT), _stop_blocked(), _environ():
        forkserver.ensure_running()


@contextmanager
def _in_sessions():
    """A process that starts here has a session of its own.

    A kernel that is shut down first ends all processes of its group, and waits for them. multiprocessing's
    resource tracker ignores SIGTERM: in that group it would make each restart 2.5 seconds longer.
    """
    with _counting, cpython_private.starting_with("import os; os.setsid()"):  # one thread at a time
        yield


@contextmanager
def _environ():
    """What a process that starts here has in its environment while it imports PyTorch: its kernel (`preload`
    ends without it), the library that it loads first, and silence of PyTorch's C++, whose lines are for
    developers (frames of a watchdog after an abort; that a send makes a communicator). What the reader has
    set stands.
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
    """A process that starts here does not hear the stop button, which is for the notebook. (A rank hears it
    again when it serves.)
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # now, for it would undo the mask below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def runs() -> bool:
    """Whether this process has started the server, it has not ended since, and its socket is there."""
    pid, socket = cpython_private.fork_server()
    if socket and not os.path.exists(socket):
        cpython_private.forget_fork_server()  # something has tidied up: ranks that are alive keep the old one
        return False
    try:
        return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def number() -> int | None:
    """The process that forks ranks now; None where none runs, or ranks are spawned."""
    return None if spawns() or not runs() else cpython_private.fork_server()[0]


def ended(was: int | None) -> bool:
    """Whether that fork server is gone. One that is killed closes its pipes a little before it has ended."""
    until = time.monotonic() + 0.5
    while (same := number() == was) and was is not None and time.monotonic() < until:
        time.sleep(0.01)
    return not same


def forget() -> None:
    """In a fork of the kernel: server and spares are the kernel's and not ours, and must see when it ends."""
    while _spares:
        disown(*_spares.pop())
    cpython_private.forget_fork_server()


def disown(process: BaseProcess, *pipes: Connection) -> None:
    """In a fork of the kernel: the process is the kernel's, and must see when the kernel ends."""
    for pipe in pipes:
        pipe.close()
    cpython_private.disown(process)


def folder() -> str | None:
    """Where this process works, for a spare that began elsewhere; None if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


@contextmanager
def _inside(folder: Path | None):
    """Work in a folder, where a new Python finds this package before any other of its name; None: stay here.

    Ranks start in the notebook's.
    """
    if folder is None:
        yield
        return
    before = os.open(".", os.O_PATH)  # by its number, for it may have been deleted
    os.chdir(folder)
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


@contextmanager
def main_hidden():
    """Keep multiprocessing from importing the user's script again in every rank.

    Functions travel by value, so ranks need no `__main__`, and scripts need no guard.
    """
    real = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = real


@contextmanager
def undisturbed(again: bool = True):
    """Put off a stop until the block has ended: one that breaks into an import of torch leaves half of it
    behind.

    again: whether the stop then takes effect, or was meant for what has ended meanwhile.
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
