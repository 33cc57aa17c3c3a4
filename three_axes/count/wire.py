"""Reads how many bytes the operating system has sent over this process's TCP connections of gloo.

Each pair of ranks in a gloo group shares one TCP connection. Linux counts the bytes of every connection, and
a process may read the counters of its own connections. They are the column "on the wire", which does not
depend on PyTorch or on formulas. On other systems `available` is False and the column has n/a.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
from collections.abc import Set
from contextlib import suppress

End = tuple[str, int]  # address and port

# Fields of struct tcp_info in linux/tcp.h: bytes_acked and bytes_received, two u64 at bytes 120 and 128;
# notsent_bytes, a u32 at 144; bytes_sent and bytes_retrans, two u64 at 200 and 208.
_TCP_INFO = struct.Struct("120xQQ8xI52xQQ")


def _has_counters() -> bool:
    """Whether this system lets a process read the byte counters of its connections."""
    if not hasattr(socket, "TCP_INFO") or sys.platform != "linux" or not os.path.isdir("/dev/fd"):
        return False
    with socket.socket() as s:
        return len(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)) == _TCP_INFO.size


available = _has_counters()


def _sockets(but: Set[int] = frozenset()) -> dict[int, int]:
    """inode -> descriptor, for every socket of this process. but: descriptors to leave out. Several
    descriptors may belong to one socket; one of them is returned. Empty if the system lists none.
    """
    descriptors: dict[int, int] = {}
    if not os.path.isdir("/dev/fd"):
        return descriptors
    for descriptor in set(map(int, os.listdir("/dev/fd"))) - but:
        try:
            status = os.fstat(descriptor)
        except OSError:
            continue  # the descriptor of listdir itself, closed by now
        if stat.S_ISSOCK(status.st_mode):
            descriptors[status.st_ino] = descriptor
    return descriptors


def _own_ports() -> range:
    """The ports that this system gives to a program that does not choose one; gloo does not choose."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
            first, last = map(int, f.read().split())
        return range(first, last + 1)
    except (OSError, ValueError):
        return range(1024, 65536)


_PORTS = _own_ports()
_LOOPBACK = ("127.0.0.1", "::1")
services: set[int] = set()  # ports in that range which a program has chosen, such as that of the ranks' store


def _connection(descriptor: int) -> tuple[tuple[End, End], socket.socket] | None:
    """((local end, remote end), a duplicate of the socket) of a TCP connection like those of gloo: the system
    chose both its ports, so no service listens there. None for any other descriptor.

    The caller closes the duplicate; gloo keeps its own socket.
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
        pass  # it listens, or was just cut, or is no TCP socket
    s.close()
    return None


def _end(address: tuple) -> End:
    return address[0].removeprefix("::ffff:"), address[1]


def cut(anywhere: bool = False) -> None:
    """Shut down every connection of this rank, so that everything that waits on one wakes up at once.
    anywhere: also connections to other hosts.

    gloo cannot be interrupted: a blocked collective ends only when data arrives or the connection closes. If
    another thread closes the connection, the collective ends within milliseconds, on this rank and on its
    peers, and the process continues.
    """
    for descriptor in _sockets().values():
        if found := _connection(descriptor):
            (_, (host, _)), s = found
            try:
                if anywhere or host in _LOOPBACK:
                    s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer has closed it already
            s.close()


class Sockets:
    """The bytes that this rank has sent, by connection. Connections that close are kept until `forget`."""

    def __init__(self):
        self._open: dict[int, tuple[tuple[End, End], socket.socket]] = {}  # by inode
        self._closed: dict[tuple[End, End], int] = {}

    def forget(self) -> None:
        """Forget the connections that have closed."""
        self._closed.clear()

    def close(self) -> None:
        """Close this object's duplicates of all sockets."""
        for _, s in self._open.values():
            s.close()
        self._open.clear()

    def refresh(self) -> None:
        """Find connections that were opened or closed since the last time. Each process group has its own."""
        there = _sockets({s.fileno() for _, s in self._open.values()}) if available else {}
        for inode in set(self._open) - set(there):  # gloo has closed it; only the duplicate is left
            ends, s = self._open.pop(inode)
            self._closed[ends] = _sent(s)
            s.close()
        for inode in set(there) - set(self._open):
            if found := _connection(there[inode]):
                self._open[inode] = found

    def read(self) -> dict[tuple[End, End], int]:
        """(local end, remote end) -> bytes sent since the connection was made.

        Each byte that was passed to TCP counts once, however often TCP repeats it. It counts at once, not
        when it is acknowledged: an acknowledgement may take 40 ms.
        """
        return self._closed | {ends: _sent(s) for ends, s in self._open.values()}

    def total(self) -> int:
        """Bytes sent over all connections, each since it was made."""
        return sum(self.read().values())

    def carried(self) -> int:
        """Bytes that were acknowledged or received over the connections that are open now; 0 if unknown."""
        carried = 0
        for _, s in list(self._open.values()):  # another thread may find new ones meanwhile, or close some
            with suppress(OSError):
                acknowledged, received, *_ = _info(s)
                carried += acknowledged + received
        return carried


def _info(s: socket.socket) -> tuple[int, ...]:
    return _TCP_INFO.unpack(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))


def _sent(s: socket.socket) -> int:
    _, _, waiting, sent, repeated = _info(s)
    return sent - repeated + waiting
