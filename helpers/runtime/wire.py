"""What the operating system saw: the TCP connections that gloo opened in this process.

Each pair of ranks in a gloo group shares one TCP connection on the loopback
interface. Linux keeps a byte counter for every connection, and any process may
read the counters of its own. That gives the third of the three columns, the one
nobody can argue with. Elsewhere `available` is False and the column says n/a.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys

# struct tcp_info in linux/tcp.h: notsent_bytes is a u32 at byte 144, bytes_sent and bytes_retrans are u64 at 200 and 208.
_TCP_INFO = struct.Struct("144xI52xQQ")


def _speaks() -> bool:
    """Whether this system tells a process the byte counters of its connections."""
    if not hasattr(socket, "TCP_INFO") or sys.platform != "linux":
        return False
    with socket.socket() as s:
        return len(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)) == _TCP_INFO.size


available = _speaks()


def connections() -> list[socket.socket]:
    """Every connected TCP socket of this process whose two ends are on this machine.

    The socket objects are duplicates: the caller closes them, gloo keeps its own.
    """
    found = []
    for name in os.listdir("/dev/fd"):
        fd = int(name)
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            s = socket.socket(fileno=os.dup(fd))
        except OSError:  # the descriptor of listdir itself, closed by now
            continue
        try:
            local = (s.family in (socket.AF_INET, socket.AF_INET6) and s.type == socket.SOCK_STREAM
                     and s.getpeername()[0] in ("127.0.0.1", "::1", "::ffff:127.0.0.1"))
        except OSError:  # a listening socket has no peer
            local = False
        found.append(s) if local else s.close()
    return found


def cut() -> None:
    """Shut down every connection of this rank, so that whatever waits on one wakes up at once.

    gloo cannot be interrupted: a blocked collective only ends when data comes or
    the connection goes. Closing the connection from another thread ends it in
    milliseconds, on this rank and on its peers, and the process lives on.
    """
    for s in connections():
        try:
            s.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        s.close()


class Counter:
    """Bytes this rank has put on the wire, by connection."""

    def __init__(self):
        self._open: dict[tuple[int, int], socket.socket] = {}

    def refresh(self) -> None:
        """Look for connections again: a new process group brings its own."""
        self.close()
        for s in connections() if available else ():
            self._open[s.getsockname()[1], s.getpeername()[1]] = s

    def read(self) -> dict[tuple[int, int], int]:
        """(local port, remote port) -> bytes sent since the connection was made.

        Each byte that was handed over counts once, however often TCP had to repeat it,
        and at once, not when it is acknowledged: an acknowledgement may take 40 ms.
        """
        return {ports: _sent(s) for ports, s in self._open.items()}

    def total(self) -> int:
        return sum(map(_sent, self._open.values()))

    def close(self) -> None:
        for s in self._open.values():
            s.close()
        self._open.clear()


def _sent(s: socket.socket) -> int:
    waiting, sent, repeated = _TCP_INFO.unpack(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    return sent - repeated + waiting
