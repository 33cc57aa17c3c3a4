"""Has all private names of CPython that this project uses, in one place. They are names of `multiprocessing`.

CPython may change these at any time. Each function says what fails without it. All names are in Python 3.10
to 3.14. `tests/test_structure.py` finds private names in other files. (`sys._current_frames`, which is
documented, is used by `lines.frames_of_threads` only.)
"""

# mypy: disable-error-code="attr-defined, misc"
# The names are missing in the type stubs as well.

from __future__ import annotations

import multiprocessing.process
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import util
from multiprocessing.process import BaseProcess

# -- the fork server: without these names no ranks start in a notebook on Linux -----------------------------


def fork_server() -> tuple[int | None, str | None]:
    """(pid of the fork server, path of its socket); (None, None) if this process has started no server."""
    from multiprocessing.forkserver import _forkserver

    return _forkserver._forkserver_pid, _forkserver._forkserver_address


def forget_fork_server() -> None:
    """Forget the fork server, so that the next process starts a new one. The old one ends with its last
    child.
    """
    from multiprocessing.forkserver import _forkserver

    if _forkserver._forkserver_alive_fd is not None:
        os.close(_forkserver._forkserver_alive_fd)
        _forkserver.__init__()


@contextmanager
def starting_with(statement: str) -> Iterator[None]:
    """A Python that `multiprocessing` starts in this block runs `statement` first. The caller must let only
    one thread at a time into this block.
    """
    spawn = util.spawnv_passfds
    util.spawnv_passfds = partial(_spawn_with, spawn, statement)
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def _spawn_with(spawn: Callable, statement: str, path, args, fds):
    """Call `spawn` of a Python that runs `-c PROGRAM`, with `statement` in front of the program."""
    i = args.index("-c") + 1
    return spawn(path, [*args[:i], f"{statement}; {args[i]}", *args[i + 1 :]], fds)


# -- a process ---------------------------------------------------------------------------------------------


def set_folder(path: str) -> None:
    """Let `multiprocessing` keep its sockets in this folder, in this process and its children. Without it
    their paths are too long for the system if TMPDIR is long.
    """
    multiprocessing.process.current_process()._config["tempdir"] = path


def allow_children() -> None:
    """Let this daemonic process start other processes. Without it a DataLoader on a rank has no workers."""
    multiprocessing.process.current_process()._config["daemon"] = False


def disown(process: BaseProcess) -> None:
    """Forget, in a forked process, a child of its parent. Without it the fork would join that child before it
    ends.
    """
    multiprocessing.process._children.discard(process)


# -- a Connection ------------------------------------------------------------------------------------------


def whole_messages(received: bytearray) -> list[bytes]:
    """Remove the whole messages from the bytes received through a Connection, and return them. A message is
    its length in 4 bytes (or −1 and the length in 8 bytes), then its content. `Connection.recv_bytes` would
    wait for the rest of a message.
    """
    messages, at = [], 0
    while len(received) >= at + 4:
        (size,), start = struct.unpack_from("!i", received, at), at + 4
        if size == -1:
            if len(received) < start + 8:
                break
            (size,), start = struct.unpack_from("!Q", received, start), start + 8
        if len(received) < start + size:
            break
        at = start + size
        with memoryview(received) as view:
            messages.append(view[start:at].tobytes())
    del received[:at]
    return messages
