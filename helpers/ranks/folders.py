"""A folder of this process for all its worlds: short, made again when it is gone, removed when its owner is.

multiprocessing's own would do, but for three things: below a long TMPDIR its sockets' paths are too long for
the system, one that a tidier has removed stays lost for good, and a process that is killed leaves it behind.
So does every rank, since ranks are killed. Here a lock says whose folder is alive: the system lets go of it
when the owner dies, however it dies.
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

LONGEST = 60  # characters of the folder around ours: a socket's path in it may have 107
_home: tuple[str, int, int] | None = None  # path, descriptor that holds its lock, owner


def home() -> str:
    """This process's folder. Raises OSError where none can be made."""
    global _home
    if _home is None or _home[2] != os.getpid() or not os.path.isdir(_home[0]):
        around = tempfile.gettempdir() if len(tempfile.gettempdir()) <= LONGEST else "/tmp"
        _sweep(around)
        _home = (*_make(around), os.getpid())
        cpython_private.set_folder(_home[0])
        util.Finalize(None, _remove, exitpriority=-100)  # a process that multiprocessing forked has no atexit
    return _home[0]


def _prefix() -> str:
    """A name's beginning that all processes under one system share: these see each other's locks, and perhaps
    no others do.
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
        if _locked(handle) and os.path.isdir(path):  # else somebody who sweeps was faster
            return path, handle
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody sweeps there
        pass
    return True


def _sweep(around: str) -> None:
    """Remove the folders of owners that are dead."""
    for path in Path(around).glob(_prefix() + "*"):
        with suppress(OSError):  # somebody else's, or gone meanwhile
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
