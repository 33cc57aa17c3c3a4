"""One temporary folder for all worlds of this process: with a short path, made again if it was removed, and
deleted when the process ends.

multiprocessing has a temporary folder too, with three faults. If TMPDIR is long, the paths of its sockets are
longer than the system allows. If a cleaner removes the folder, it is never made again. A killed process
leaves its folder behind, and ranks are always killed. Here each folder has a lock (flock): the system
releases the lock when the owner dies, so the next process finds the folders of dead owners and removes them.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import socket
import tempfile
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

from three_axes import cpython_private

with suppress(ImportError):  # on Windows, where `server.warm` raises an error with advice
    import fcntl

LONGEST = 60  # characters of the parent folder's path: on Linux a socket's whole path may have 107
_home: tuple[str, int, int] | None = None  # path, descriptor that holds its lock, pid of the owner


def home() -> str:
    """The path of this process's folder, which exists. Raises OSError where none can be made."""
    global _home
    if _home is None or _home[2] != os.getpid() or not os.path.isdir(_home[0]):
        parent = short_parent()
        _sweep(parent)
        _home = (*_make(parent), os.getpid())
        cpython_private.set_folder(_home[0])
        util.Finalize(None, _remove, exitpriority=-100)  # processes forked by multiprocessing skip atexit
    return _home[0]


def short_parent(longest: int = LONGEST) -> str:
    """The folder of temporary files (TMPDIR); /tmp if its path has more than `longest` characters."""
    return tempfile.gettempdir() if len(tempfile.gettempdir()) <= longest else "/tmp"


def _prefix() -> str:
    """The first part of a folder's name; `_sweep` removes only folders that have it. It names this start of
    this machine (off Linux: the host), since only its processes are sure to see each other's locks.
    """
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        system = socket.gethostname()
    return f"three-axes-{re.sub('[^a-z0-9]', '', system.lower())[:8]}-"


def _make(parent: str) -> tuple[str, int]:
    """(path of a new folder, descriptor that holds its lock)."""
    while True:
        path = tempfile.mkdtemp(prefix=_prefix(), dir=parent)
        handle = os.open(path, os.O_RDONLY)
        if _try_lock(handle) and os.path.isdir(path):  # else another process's _sweep removes it
            return path, handle
        os.close(handle)


def _try_lock(handle: int) -> bool:
    """Take the lock. Returns False if another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where `_sweep` removes nothing
        pass
    return True


def _sweep(parent: str) -> None:
    """Remove the folders of owners that are dead."""
    for path in Path(parent).glob(_prefix() + "*"):
        with suppress(OSError):  # its owner lives, it is another user's, or it was removed meanwhile
            handle = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)


@atexit.register
def _remove() -> None:
    if _home and _home[2] == os.getpid():
        shutil.rmtree(_home[0], ignore_errors=True)
