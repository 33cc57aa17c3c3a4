"""What the operating system saw: the TCP connections that gloo opened in this process.

Each pair of ranks in a gloo group shares one TCP connection. Linux keeps a byte
counter for every connection, and any process may read the counters of its own.
That gives the third of the three columns, the one nobody can argue with.
Elsewhere `available` is False and the column says n/a.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Set

End = tuple[str, int]  # address and port

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


def _sockets(but: Set[int] = frozenset()) -> dict[int, int]:
    """inode -> descriptor, for every socket of this process but through some descriptors: several may lead to
    one socket.
    """
    descriptors = {}
    for descriptor in set(map(int, os.listdir("/dev/fd"))) - but:
        try:
            status = os.fstat(descriptor)
        except OSError:
            continue  # the descriptor of listdir itself, closed by now
        if stat.S_ISSOCK(status.st_mode):
            descriptors[status.st_ino] = descriptor
    return descriptors


def _own_ports() -> range:
    """The ports that this system gives to a program that asks for none, as gloo does."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
            first, last = map(int, f.read().split())
        return range(first, last + 1)
    except (OSError, ValueError):
        return range(1024, 65536)


_PORTS = _own_ports()
_LOOPBACK = ("127.0.0.1", "::1")
services: set[int] = set()  # ports in that range which somebody chose: the store's, where ranks meet


def _connection(descriptor: int) -> tuple[tuple[End, End], socket.socket] | None:
    """((local end, remote end), a duplicate of the socket) of a TCP connection such as gloo makes: both its
    ports were given by the system, so that no service listens there. None for anything else.

    The caller closes the duplicate, gloo keeps its own.
    """
    try:
        s = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    try:
        if s.type == socket.SOCK_STREAM and s.family in (socket.AF_INET, socket.AF_INET6):
            ends = _end(s.getsockname()), _end(s.getpeername())
            if all(port in _PORTS and port not in services for _, port in ends):
                return ends, s
    except (OSError, ValueError):
        pass  # it listens, or has just been cut, or is no TCP socket at all
    s.close()
    return None


def _end(address: tuple) -> End:
    return address[0].removeprefix("::ffff:"), address[1]


def cut(anywhere: bool = False) -> None:
    """Shut down every connection of this rank, so that whatever waits on one wakes up at once. anywhere: also
    to other hosts.

    gloo cannot be interrupted: a blocked collective only ends when data comes or
    the connection goes. Closing the connection from another thread ends it in
    milliseconds, on this rank and on its peers, and the process lives on.
    """
    for descriptor in _sockets().values():
        if found := _connection(descriptor):
            (_, (host, _)), s = found
            try:
                if anywhere or host in _LOOPBACK:
                    s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer was faster
            s.close()


class Counter:
    """Bytes this rank has put on the wire, by connection, those that have closed since `forget` included."""

    def __init__(self):
        self._open: dict[int, tuple[tuple[End, End], socket.socket]] = {}  # by inode
        self._closed: dict[tuple[End, End], int] = {}

    def forget(self) -> None:
        """Forget the connections that have closed."""
        self._closed.clear()

    def close(self) -> None:
        """Let go of all connections."""
        for _, s in self._open.values():
            s.close()
        self._open.clear()

    def refresh(self) -> None:
        """Look for connections again: a process group brings its own, and takes them with it."""
        there = _sockets({s.fileno() for _, s in self._open.values()}) if available else {}
        for inode in set(self._open) - set(there):  # only our duplicate is left
            ends, s = self._open.pop(inode)
            self._closed[ends] = _sent(s)
            s.close()
        for inode in set(there) - set(self._open):
            if found := _connection(there[inode]):
                self._open[inode] = found

    def read(self) -> dict[tuple[End, End], int]:
        """(local end, remote end) -> bytes sent since the connection was made.

        Each byte that was handed over counts once, however often TCP had to repeat it,
        and at once, not when it is acknowledged: an acknowledgement may take 40 ms.
        """
        return self._closed | {ends: _sent(s) for ends, s in self._open.values()}

    def total(self) -> int:
        """Bytes sent over all of them, each connection since it was made."""
        return sum(self.read().values())


def _sent(s: socket.socket) -> int:
    waiting, sent, repeated = _TCP_INFO.unpack(
        s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    )
    return sent - repeated + waiting
