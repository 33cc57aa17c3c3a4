"""How long a rank lives: as long as its kernel. What it starts lives as long as its world."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys

from . import current


def end_with_kernel(leash) -> None:
    """Leave the kernel's session, where Jupyter sends its signals, but die when the kernel does, however it
    dies.

    Nothing is ever written to `leash`, whose other end only the kernel holds. When that is closed, the
    operating system signals it: no thread need be free to notice. On Linux the signal is SIGKILL, which ends
    also a rank that is stopped or ignores signals, and goes to all that it has started: a pool's processes
    wait for ever when theirs is gone. Elsewhere it is SIGIO.
    """
    if os.getsid(0) != os.getpid():  # a rank that was spawned has its own already
        os.setsid()
    on_linux = sys.platform == "linux"
    fcntl.fcntl(leash, fcntl.F_SETOWN, -os.getpid() if on_linux else os.getpid())  # below 0 the whole group
    if on_linux:
        f_setsig = 10  # a name of the module's from Python 3.12 on
        fcntl.fcntl(leash, f_setsig, signal.SIGKILL)
    os.register_at_fork(after_in_child=_end_with_rank)
    fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | os.O_ASYNC)
    if leash.poll(0):
        os._exit(0)  # it went before we were listening


def _end_with_rank() -> None:
    """In a process forked by a rank (a DataLoader's worker): it is no rank, and ends when the rank does."""
    current.rank = None
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def name_process(name: str) -> None:
    """What `ps` and `top` show. Linux only."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode()[:15], 0, 0, 0)
