"""An emulated network: collectives take as long as they would on a described network.

`World(8, fabric=network)` sends every byte over gloo, and then holds the result back until the moment when
the network would have delivered it:

    begins   when all ranks of the group have called the operation, and their earlier operations have ended
    ends     later by the time of its hops, one after the other (`three_axes.paper.collectives.hop_by_hop`)

Ranks that wait use no core, so eight ranks keep time on two cores. A network faster than this machine cannot
be emulated: `Traffic.late` counts the operations whose real bytes arrived after the emulated time.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from three_axes import pytorch_private
from three_axes.count import OwnThread
from three_axes.paper import Network, crosses, hop_by_hop

from .uplink import Oversubscribed, Uplink, leaving, shared

SLOTS = 1 << 14  # calls whose moments are kept, for each group and rank
ROOTED = ("broadcast", "scatter")  # operations that a rank may end before other ranks have called them


class Lost(RuntimeError):
    """Raised in code that waits inside C++ (DDP, functional collectives), because an error of the fabric
    cannot be passed on from there.
    """

    def __init__(self):
        super().__init__("Connection closed while this rank was in a collective")


class Ticket(NamedTuple):
    """An operation that this rank has called."""

    op: str
    called: float  # time.monotonic()
    duration: float  # seconds, on that network
    # The line that the operation keeps busy: links inside a node, or ports between nodes. Sends and receives
    # have lines of their own.
    line: str
    # Returns the moment at which the last of the needed ranks called the operation. Call it after the real
    # operation has ended.
    awaited: Callable[[], float]
    # On an oversubscribed network: the operation's number, and the bytes that it sends out of each node.
    key: int
    leaves: dict[int, float]


class Fabric:
    """This rank's side of the network.

    `folder` is private to the world; `generation` counts how often its group was formed.
    """

    def __init__(self, network: Network, folder: str, generation: int):
        self.network, self.folder, self.generation = network, folder, generation
        self.late = 0
        self.failed: dict[dist.Work, Exception] = {}  # the errors of real operations, by the Work held back
        self._calls: dict[str, np.ndarray] = {}  # when each rank of a group called its k-th operation
        self._uplinks: dict[int, Uplink] = {}
        self._counts: Counter[tuple] = Counter()
        self._streams: dict[str, queue.SimpleQueue] = {}
        # The moment until which each line is busy, with the operations called so far, and with those whose
        # real part has ended.
        self._queued: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self.awaited_in_python: weakref.WeakSet[dist.Work] = weakref.WeakSet()
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._held: set[dist.Work] = set()  # of operations that have ended on this machine, and are held back

    def announce(
        self, op: str, group: str, members: list[int], me: int, peer: int | None, tag: int, payload: float
    ) -> Ticket:
        """Announce to the other ranks that this rank calls `op` now; to be called before `op` begins.

        group: its name. members: its ranks in the world's numbers. me: this rank's index among them. peer:
        the index of the root or partner. payload: bytes, as `hop_by_hop` takes them.
        """
        is_message = op in ("send", "recv")
        pair = (peer, me) if op == "recv" else (me, peer)
        key = (group, *pair, tag) if is_message else (group,)
        self._counts[op == "recv", key] += 1
        k = self._counts[op == "recv", key]
        if is_message:
            k = hash((k, *pair, tag))  # a slot for each message, in whatever order the tags are used
        if group not in self._calls:
            plain = "".join(c if c.isalnum() else "-" for c in group)
            path = os.path.join(self.folder, f"arrivals-{self.generation}-{plain}")
            self._calls[group] = shared(path, "f8", (len(members), SLOTS))
        needs = {"send": [me], "recv": [peer]}.get(op, [me, peer] if op in ROOTED else slice(None))
        ranks = [members[i] for i in pair] if is_message else members
        far = crosses(ranks, self.network.gpus_per_node)
        line = ("ports" if far else "links") + (f" {op}" if is_message else "")
        kind = "send" if is_message else op
        duration = hop_by_hop(kind, payload, tuple(ranks), self.network)
        calls, called = self._calls[group][:, k % SLOTS], time.monotonic()
        if op != "recv":
            with self._lock:
                ready = max(called, self._queued.get(line, 0.0))
                self._queued[line] = ready + duration
            calls[me] = ready
        shares = far and isinstance(self.network, Oversubscribed)
        leaves = leaving(kind, payload, ranks, self.network) if shares else {}
        number = zlib.crc32(repr((key, k)).encode())
        return Ticket(op, called, duration, line, lambda: float(max(calls[needs])), number, leaves)

    def hold(self, ticket: Ticket, group: str, work: dist.Work, result) -> dist.Work:
        """A Work that ends when the emulated network would have ended `work`. result: the value of its
        future. After `close()` it is `work` itself.
        """
        if self._closed.is_set():
            return work
        future = torch.futures.Future()
        held = pytorch_private.work_of(future)

        def end() -> None:
            try:
                work.wait()
                self._held.add(held)
                with self._lock:
                    begins = max(ticket.awaited(), self._busy.get(ticket.line, 0.0))
                    until = self._busy_until(ticket.line, begins + ticket.duration)
                    uplinks = [(self._uplink(node), size) for node, size in ticket.leaves.items()]
                self.late += time.monotonic() > max(until, ticket.called) + 0.001
                for uplink, size in uplinks:
                    uplink.enter(ticket.key, begins, size)
                while (left := until - time.monotonic()) > 0 and not self._closed.is_set():
                    self._closed.wait(min(left, threading.TIMEOUT_MAX))
                    for uplink, _ in uplinks:  # operations that have started meanwhile may slow this one down
                        until = max(until, uplink.until(ticket.key))
                    with self._lock:
                        self._busy_until(ticket.line, until)
            except Exception as e:  # the connection was cut: a rank that waits for this must get the error
                self.failed[held] = e.with_traceback(None)
                if held not in self.awaited_in_python:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(Lost)
                    )
            finally:
                future.set_result(result)
                self._held.discard(held)

        if ticket.op in ("send", "recv"):  # the stream would block: an earlier message may end later
            OwnThread(end).start()
        else:
            self._stream(group).put(end)
        return held

    def _busy_until(self, line: str, until: float) -> float:
        self._busy[line] = max(self._busy.get(line, 0.0), until)
        self._queued[line] = max(self._queued.get(line, 0.0), until)
        return until

    def _uplink(self, node: int) -> Uplink:
        if node not in self._uplinks:
            path = os.path.join(self.folder, f"uplink-{self.generation}-{node}")
            self._uplinks[node] = Uplink(path, self.network.uplink_bandwidth)
        return self._uplinks[node]

    def _stream(self, group: str) -> queue.SimpleQueue:
        """The queue of one group: its collectives end one after the other, as on a device's stream."""
        if group not in self._streams:
            stream = self._streams[group] = queue.SimpleQueue()

            def serve():
                while (end := stream.get()) is not None:
                    end()
                    del end  # drop the reference to the work: its group may be destroyed

            OwnThread(serve).start()
        return self._streams[group]

    def holds(self) -> bool:
        """Whether an operation of this rank has ended on this machine, but not yet on the network."""
        return bool(self._held)

    def close(self) -> None:
        """End all waits: the call has been given up."""
        self._closed.set()
        for stream in self._streams.values():
            stream.put(None)
