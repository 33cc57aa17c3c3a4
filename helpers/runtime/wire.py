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


def connections() -> dict[tuple[int, int], socket.socket]:
    """(local port, remote port) -> socket, for every TCP connection of this process that stays on this machine.

    The sockets are duplicates: the caller closes them, gloo keeps its own.
    """
    found = {}
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            s = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # the descriptor of listdir itself, closed by now
        try:
            host, port = s.getpeername()[:2]
            if s.type == socket.SOCK_STREAM and host in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
                if found.setdefault((s.getsockname()[1], port), s) is s:
                    continue
        except (OSError, ValueError):
            pass  # it listens, or has just been cut, or is no TCP socket at all
        s.close()
    return found


def cut() -> None:
    """Shut down every connection of this rank, so that whatever waits on one wakes up at once.

    gloo cannot be interrupted: a blocked collective only ends when data comes or
    the connection goes. Closing the connection from another thread ends it in
    milliseconds, on this rank and on its peers, and the process lives on.
    """
    for s in connections().values():
        try:
            s.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        s.close()


class Counter:
    """Bytes this rank has put on the wire, by connection, those that have closed since `reset` included."""

    def __init__(self):
        self._open: dict[tuple[int, int], socket.socket] = {}
        self._closed: dict[tuple[int, int], int] = {}

    def reset(self) -> None:
        """Forget the connections that have closed, and look which are open."""
        self.refresh()
        self._closed.clear()

    def refresh(self) -> None:
        """Look for connections again: a process group brings its own, and takes them with it."""
        found = connections() if available else {}
        self._closed |= {ports: _sent(s) for ports, s in self._open.items() if ports not in found}
        for s in self._open.values():
            s.close()
        self._open = found

    def read(self) -> dict[tuple[int, int], int]:
        """(local port, remote port) -> bytes sent since the connection was made.

        Each byte that was handed over counts once, however often TCP had to repeat it,
        and at once, not when it is acknowledged: an acknowledgement may take 40 ms.
        """
        return self._closed | {ports: _sent(s) for ports, s in self._open.items()}

    def total(self) -> int:
        return sum(self.read().values())


def _sent(s: socket.socket) -> int:
    waiting, sent, repeated = _TCP_INFO.unpack(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    return sent - repeated + waiting
