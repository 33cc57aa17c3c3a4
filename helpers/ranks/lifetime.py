"""How long a rank lives: as long as its kernel. Processes that a rank starts live as long as its world."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys

from . import current


def end_with_kernel(leash) -> None:
    """Leave the kernel's session, because Jupyter sends its signals there, but die when the kernel dies, in
    whatever way.

    Only the kernel holds the other end of `leash`, and nothing is ever written to it. When that end is
    closed, the operating system signals this process, so no thread needs to be free to notice. On Linux the
    signal is SIGKILL to the whole process group. It also ends a stopped rank, a rank that ignores signals,
    and the processes that a rank has started (the processes of a pool wait for ever when their parent is
    dead). Elsewhere the signal is SIGIO.
    """
    if os.getsid(0) != os.getpid():  # a rank that was spawned has its own already
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
    """What `ps` and `top` show. Linux only."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode()[:15], 0, 0, 0)
