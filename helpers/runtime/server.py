"""The process that ranks are forked from, with torch imported already.

`multiprocessing`'s forkserver where forking after imports is safe (Linux); elsewhere each
rank is spawned and imports for itself, which takes some seconds.
This module imports no torch, so that the server can start before the notebook does.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import threading
import types
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the package


def context():
    return mp.get_context("forkserver" if sys.platform == "linux" else "spawn")


def warm() -> None:
    """Start the server, whose imports go on in the background. Called on import of `World`."""
    ctx = context()
    if ctx.get_start_method() == "forkserver" and not _runs():
        from multiprocessing import forkserver, resource_tracker

        ctx.set_forkserver_preload(["helpers.runtime.preload"])
        resource_tracker.ensure_running()  # on its own, for it would undo the mask below
        # A stop button pressed meanwhile is for the notebook; the server inherits that it is blocked.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with main_hidden(), _inside(ROOT):
                forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _runs() -> bool:
    """Whether this process has started the server, and it has not ended since."""
    from multiprocessing.forkserver import _forkserver

    try:
        pid = _forkserver._forkserver_pid  # there is no public one
        return pid is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def forget() -> None:
    """In a fork of the kernel: the server is the kernel's child and not ours, and must see when that ends."""
    from multiprocessing.forkserver import _forkserver

    if _forkserver._forkserver_alive_fd is not None:
        os.close(_forkserver._forkserver_alive_fd)
        _forkserver.__init__()


@contextmanager
def _inside(folder: Path):
    """Work in a folder, where a new Python finds this package before any other of its name.

    Ranks start in the notebook's.
    """
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
