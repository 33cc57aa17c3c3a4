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

# struct tcp_info in linux/tcp.h: notsent_bytes is a u32 at byte 144, bytes_sent and bytes_retrans are u64 at
# 200 and 208.
_TCP_INFO = struct.Struct("144xI52xQQ")


def _speaks() -> bool:
    """Whether this system tells a process the byte counters of its connections."""
    if not hasattr(socket, "TCP_INFO") or sys.platform != "linux":
        return False
    with socket.socket() as s:
        return len(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)) == _TCP_INFO.size


available = _speaks()


def _sockets(but: set[int] = frozenset()) -> dict[int, int]:
    """inode -> descriptor, for every socket of this process but through some descriptors: several may lead to
    one socket.
    """
    found = {}
    for descriptor in set(map(int, os.listdir("/dev/fd"))) - but:
        try:
            status = os.fstat(descriptor)
        except OSError:
            continue  # the descriptor of listdir itself, closed by now
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = descriptor
    return found


def _connection(descriptor: int) -> tuple[tuple[int, int], socket.socket] | None:
    """((local port, remote port), a duplicate of the socket) of a TCP connection that stays on this machine;
    None for anything else.

    The caller closes the duplicate, gloo keeps its own.
    """
    try:
        s = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    try:
        host, port = s.getpeername()[:2]
        if s.type == socket.SOCK_STREAM and host in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
            return (s.getsockname()[1], port), s
    except (OSError, ValueError):
        pass  # it listens, or has just been cut, or is no TCP socket at all
    s.close()
    return None


def cut() -> None:
    """Shut down every connection of this rank, so that whatever waits on one wakes up at once.

    gloo cannot be interrupted: a blocked collective only ends when data comes or
    the connection goes. Closing the connection from another thread ends it in
    milliseconds, on this rank and on its peers, and the process lives on.
    """
    for descriptor in _sockets().values():
        if found := _connection(descriptor):
            try:
                found[1].shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was faster
            found[1].close()


class Counter:
    """Bytes this rank has put on the wire, by connection, those that have closed since `forget` included."""

    def __init__(self):
        self._open: dict[int, tuple[tuple[int, int], socket.socket]] = {}  # by inode
        self._closed: dict[tuple[int, int], int] = {}

    def forget(self) -> None:
        """Forget the connections that have closed."""
        self._closed.clear()

    def refresh(self) -> None:
        """Look for connections again: a process group brings its own, and takes them with it."""
        there = _sockets({s.fileno() for _, s in self._open.values()}) if available else {}
        for inode in set(self._open) - set(there):  # only our duplicate is left
            ports, s = self._open.pop(inode)
            self._closed[ports] = _sent(s)
            s.close()
        for inode in set(there) - set(self._open):
            if found := _connection(there[inode]):
                self._open[inode] = found

    def read(self) -> dict[tuple[int, int], int]:
        """(local port, remote port) -> bytes sent since the connection was made.

        Each byte that was handed over counts once, however often TCP had to repeat it,
        and at once, not when it is acknowledged: an acknowledgement may take 40 ms.
        """
        return self._closed | {ports: _sent(s) for ports, s in self._open.values()}

    def total(self) -> int:
        return sum(self.read().values())


def _sent(s: socket.socket) -> int:
    waiting, sent, repeated = _TCP_INFO.unpack(
        s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    )
    return sent - repeated + waiting
