"""What the project uses of CPython that CPython does not promise, in one place: names of `multiprocessing`.

Each entry says what breaks without it. All were seen in Python 3.10 to 3.14. `tests/test_structure.py` looks
for such names elsewhere. Frames of all threads are asked for in `lines.of_threads`.
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
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess

# -- the fork server: without these names no World starts on Linux ------------------------------------------


def fork_server() -> tuple[int | None, str | None]:
    """(its number, the path of its socket) as this process knows them; None where it has started none."""
    from multiprocessing.forkserver import _forkserver

    return _forkserver._forkserver_pid, _forkserver._forkserver_address


def forget_fork_server() -> None:
    """Know of no fork server. One that runs ends with its last child."""
    from multiprocessing.forkserver import _forkserver

    if _forkserver._forkserver_alive_fd is not None:
        os.close(_forkserver._forkserver_alive_fd)
        _forkserver.__init__()


@contextmanager
def starting_with(statement: str) -> Iterator[None]:
    """What `multiprocessing` starts in this block as a new Python runs `statement` first. The caller sees to
    it that one thread at a time is in here.
    """
    spawn = util.spawnv_passfds
    util.spawnv_passfds = partial(_spawn_with, spawn, statement)
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


def _spawn_with(spawn: Callable, statement: str, path, args, fds):
    """`spawn` of a Python that runs `-c PROGRAM`."""
    i = args.index("-c") + 1
    return spawn(path, [*args[:i], f"{statement}; {args[i]}", *args[i + 1 :]], fds)


# -- a process ---------------------------------------------------------------------------------------------


def set_folder(path: str) -> None:
    """Let `multiprocessing` keep its sockets in this folder, here and in what this process starts. Without it
    a long TMPDIR makes their paths too long for the system.
    """
    multiprocessing.process.current_process()._config["tempdir"] = path


def allow_children() -> None:
    """Let this daemonic process start others. Without it a DataLoader on a rank has no workers."""
    multiprocessing.process.current_process()._config["daemon"] = False


def disown(process: BaseProcess) -> None:
    """In a fork: the process is the parent's child. Without it this fork joins it when it ends."""
    multiprocessing.process._children.discard(process)


def resource_tracker_pid() -> int | None:
    """The process that tidies up behind `multiprocessing`. Where the name is missing it counts as the
    reader's, and no standstill is proven.
    """
    return getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)


# -- a Connection ------------------------------------------------------------------------------------------


def whole_messages(came: bytearray) -> list[bytes]:
    """Takes the messages that are whole out of the bytes that came through a Connection: a length of 4 bytes,
    or −1 and a length of 8 bytes, and then the message. `Connection.recv_bytes` would wait for the rest.
    """
    messages, at = [], 0
    while len(came) >= at + 4:
        (size,), start = struct.unpack_from("!i", came, at), at + 4
        if size == -1:
            if len(came) < start + 8:
                break
            (size,), start = struct.unpack_from("!Q", came, start), start + 8
        if len(came) < start + size:
            break
        at = start + size
        with memoryview(came) as view:
            messages.append(view[start:at].tobytes())
    del came[:at]
    return messages
