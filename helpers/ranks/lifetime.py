"""Ends a rank's process when the notebook's kernel ends, and with a rank the processes that it has forked."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys

from . import current


def end_with_kernel(leash) -> None:
    """Leave the kernel's session, because Jupyter sends its signals there, but end whenever the kernel ends.

    leash: one end of a pipe; only the kernel holds the other, and nothing is ever written to it. When the
    kernel's end is closed, the operating system signals this process, so no thread needs to be free to
    notice. On Linux the signal is SIGKILL to the whole process group. It also ends a stopped rank, a rank
    that ignores signals, and processes that the rank has started. Elsewhere the signal is SIGIO.
    """
    if os.getsid(0) != os.getpid():  # a spawned rank already has a session of its own
        os.setsid()
    on_linux = sys.platform == "linux"
    fcntl.fcntl(leash, fcntl.F_SETOWN, -os.getpid() if on_linux else os.getpid())  # negative: the group
    if on_linux:
        f_setsig = 10  # fcntl.F_SETSIG, which the module has from Python 3.12 on
        fcntl.fcntl(leash, f_setsig, signal.SIGKILL)
    os.register_at_fork(after_in_child=_end_with_rank)
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)
    if leash.poll(0):
        os._exit(0)  # the kernel ended before the signal was set up


def _end_with_rank() -> None:
    """In a process forked by a rank, such as a DataLoader's worker: it is no rank, and ends with the rank."""
    current.rank = None
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` print for this process. Linux only."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode()[:15], 0, 0, 0)
