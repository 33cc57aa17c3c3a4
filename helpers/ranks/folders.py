"""One temporary folder for all worlds of this process: with a short path, made again if it was removed, and
deleted when the process ends.

multiprocessing has such a folder too, with three faults. Below a long TMPDIR its sockets' paths are longer
than the system allows. If a cleaner removes it, it is never made again. If its process is killed, it stays,
and ranks are always killed. Here each folder has a lock (flock): the system releases the lock when the owner
dies, so the next process finds the folders of dead owners and removes them.
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

with suppress(ImportError):  # on Windows, where `server` says what to do
    import fcntl

LONGEST = 60  # characters of the parent folder's path: a socket's whole path may have 107
_home: tuple[str, int, int] | None = None  # path, descriptor that holds its lock, owner


def home() -> str:
    """This process's folder. Raises OSError where none can be made."""
    global _home
    if _home is None or _home[2] != os.getpid() or not os.path.isdir(_home[0]):
        around = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST else "/tmp"
        _sweep(around)
        _home = (*_make(around), os.getpid())
        cpython_private.set_folder(_home[0])
        util.Finalize(None, _remove, exitpriority=-100)  # processes forked by multiprocessing skip atexit
    return _home[0]


def _prefix() -> str:
    """The first part of a folder's name, the same for all processes under one running system. Only these
    processes are sure to see each other's locks.
    """
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        system = socket.gethostname()
    return f"three-axes-{re.sub('[^a-z0-9]', '', system.lower())[:8]}-"


def _make(around: str) -> tuple[str, int]:
    """A new folder and its lock."""
    while True:
        path = tempfile.mkdtemp(prefix=_prefix(), dir=around)
        handle = os.open(path, os.O_RDONLY)
        if _locked(handle) and os.path.isdir(path):  # else another process's _sweep has removed it already
            return path, handle
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: there _sweep removes nothing
        pass
    return True


def _sweep(around: str) -> None:
    """Remove the folders of owners that are dead."""
    for path in Path(around).glob(_prefix() + "*"):
        with suppress(OSError):  # another user's folder, or removed meanwhile
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
