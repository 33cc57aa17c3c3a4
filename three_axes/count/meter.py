"""`Recorder`: counts, on one rank, the bytes that PyTorch was asked to send, the bytes that left the process,
and the seconds for which the rank waited.

The operating system counts the bytes that left, for all collectives together. When nothing is under way, the
bytes since the last such moment belong to the only row begun since; with two rows, to neither.

A recorder is a listener of the `interposer`, which every collective passes. Each rank of a `helpers.World`
has one; `three_axes count` adds one to a script, which needs no change. It makes each collective some tens of
microseconds slower.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from .. import lines, pytorch_private
from . import wire
from .clock import Span
from .interpose import Call, Listener, interposer
from .moves import NEVER, Channel, GpuProgress, Moves, Operation, Waiting, any_source
from .operators import InBatch, OnStream, type_of
from .report import CollectiveCount, Report

BOX_BYTES = 4096  # size of a recorder's box (see `Recorder`): enough for groups of a few hundred ranks


@dataclass(eq=False)
class Issued:
    """An open collective: it has begun, and no Python code has waited for it yet."""

    work: dist.Work | OnStream | InBatch
    row: CollectiveCount  # in which it is counted
    size: int  # bytes of its tensor on this rank
    start: float  # 0 after its end was recorded
    operation: Operation
    piece: int  # number of the storage that holds the result; 0 if not known
    backward: int | None  # of a DDP bucket: the backward at whose end DDP waits for it
    note: dict | None  # as written to the box
    ended: bool = False

    def has_ended(self) -> bool:
        """Whether the collective has ended. The answer True is kept, because each new collective asks this of
        all open ones, and a World's call may have hundreds.
        """
        if not self.ended and not interposer.is_capturing:
            self.ended = self.work.is_completed()
        return self.ended


class Queue:
    """Collectives that the host has begun on NCCL, without waiting, and that the GPU has not completed."""

    def __init__(self):
        self._begun, self._open = 0, deque[Issued]()

    def add(self, issued: Issued) -> None:
        """Add a collective that has begun."""
        self._begun += 1
        self._open.append(issued)
        while self._open and self._open[0].has_ended():
            self._open.popleft()

    def progress(self) -> GpuProgress:
        """How far the GPU is. All open collectives are asked, because with two streams a later one may
        complete before an earlier one.
        """
        begun, open_ = self._begun, [issued for issued in list(self._open) if not issued.has_ended()]
        oldest = open_[0].note if open_ else None
        return GpuProgress(begun, begun - len(open_), oldest)


class Recorder(Listener):
    """Counts this rank's collectives from `start()` to `stop()`.

    on: if false, it does not touch PyTorch and counts nothing. box: descriptor of a small file, to which each
    collective is written when it is issued. The file outlives this process: if gloo aborts the process,
    another one can read what it was doing. spans: how many waits and collectives to keep with their times.
    """

    def __init__(self, box: int | None = None, on: bool = True, spans: int = 1_000_000):
        self.box, self.on, self.most_spans = box, on, spans
        self.sockets, self.moves = wire.Sockets(), Moves()
        self.moves.carried = self.sockets.carried
        self.moves.is_held = lambda: interposer.fabric is not None and interposer.fabric.holds()
        self._thread = threading.local()  # what this thread is issuing (operation), and when (issued_at)
        self.last: dict | None = None  # the collective issued last, as in the box; None without a box
        self._known_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.watch: Callable[[Call], None] | None = None  # called with each collective before it begins
        self.queue: Queue | None = None  # collectives on the GPU; set by `count --watch`
        if on:
            interposer.add(self)
        self.start()

    def close(self) -> None:
        """Stop listening, and close the sockets."""
        if self.on:
            interposer.remove(self)
            self.sockets.close()

    def start(self) -> None:
        """Count from here on."""
        self.rows: dict[tuple[str, str], CollectiveCount] = {}
        self._open: list[Issued] = []
        self._unassigned: list[CollectiveCount] = []  # rows whose bytes on the wire are not known yet
        self._in_flight = self._peak = self._number = self._ended_unawaited = 0
        # Works of collectives that ended before any wait, and are not open any more.
        self._ended: weakref.WeakSet[dist.Work] = weakref.WeakSet()
        self._ended_tensors: set[int] = set()  # storages of their results, for functional collectives
        self._by_future: weakref.WeakSet[dist.Work] = weakref.WeakSet()  # Works whose future was taken
        # All receives begun, also those from a given rank, by their channel's `any_source`.
        self._receives: Counter[Channel] = Counter()
        # Works for which a wait failed, perhaps by a timeout: their connection may be lost.
        self._given_up: weakref.WeakSet[dist.Work] = weakref.WeakSet()
        self.has_failed = False
        self.last = self.watch = None
        self._awaited: CollectiveCount | None = None  # the row of a wait for a tensor, or of DDP's
        self._awaited_for: list[Issued] = []  # the collectives that made the tensor that is waited for
        self.spans: list[Span] = []
        self.streams: list[Span] = []
        self.levels: list[tuple[float, int]] = []
        if interposer.fabric:
            interposer.fabric.late = 0
        self._unseen = not wire.available  # whether bytes were sent that the operating system does not count
        self.sockets.forget()
        self._before = self.sockets.read()
        self._assigned = sum(self._before.values())
        if self.box is not None:
            os.pwrite(self.box, bytes(BOX_BYTES), 0)

    def find_connections(self, group: dist.ProcessGroup | None) -> None:
        """If this group is new, find its connections. Bytes sent to set them up belong to no collective."""
        if self.on and group is not None and group not in self._known_groups:
            self._known_groups.add(group)
            before = self.sockets.total()
            self.sockets.refresh()
            self._assigned += self.sockets.total() - before

    def finish(self) -> None:
        """Wait for collectives that were begun and never waited for, so that they do not overlap those of the
        next call. A wait may never end. Raises PyTorch's exception if it is interrupted.
        """
        for issued in list(self._open):
            if issued.work not in self._given_up and not issued.has_ended():
                self.moves.wait_begins(partial(Waiting, (issued.operation,)))
                interposer.wait_for(issued.work) if isinstance(issued.work, dist.Work) else issued.work.wait()
                self.moves.wait_ends()

    def stop(self) -> Report:
        """What was counted since `start()`; with `on` false only spans and levels. This does not wait."""
        if not self.on:
            return Report(spans=self.spans, levels=self.levels)
        under_way = sum(not issued.has_ended() for issued in self._open)
        self._assign(all_ended=not under_way)
        self.sockets.refresh()  # connections made by groups that no collective has used
        now = self.sockets.read()
        sent = {ports: n - self._before.get(ports, 0) for ports, n in now.items()}
        not_waited = self.not_waited()
        self._close(self._open)
        return Report(
            rows=list(self.rows.values()),
            wire=None if self._unseen or under_way else sent,
            peak_in_flight=self._peak,
            not_waited=not_waited,
            under_way=under_way,
            begun=self.moves.begun,
            spans=self.spans,
            streams=self.streams,
            levels=self.levels,
            late=interposer.fabric.late if interposer.fabric else 0,
        )

    def keep(self, span: Span) -> None:
        """Keep a span if there is room."""
        if len(self.spans) < self.most_spans:
            self.spans.append(span)

    def counted_so_far(self) -> list[CollectiveCount]:
        """A copy of the rows as they are now. Bytes on the wire that are not known yet are None, not 0."""
        self._assign_if_idle()
        unknown = set(map(id, self._unassigned))
        return [replace(row, wire=None) if id(row) in unknown else copy(row) for row in self.rows.values()]

    def is_idle(self) -> bool:
        """Whether no collective is under way."""
        return all(issued.has_ended() for issued in self._open)

    def pending(self) -> dict | None:
        """The collective that this rank waits for, as `last`; if it waits for none, the last open one."""
        if interposer.is_issuing:
            return self.last
        notes = {issued.operation: issued.note for issued in self._open if not issued.has_ended()}
        awaited = [notes[operation] for operation in self.moves.awaited() if operation in notes]
        return (awaited or list(notes.values())[-1:] or [None])[0]

    def not_waited(self) -> int:
        """The number of collectives that were begun and for which no Python code has waited."""
        return len(self._unawaited()) + self._ended_unawaited

    # -- called by the interposer -----------------------------------------------------------

    def begins(self, call: Call) -> None:
        """Count the call in its row, give it a number in its channel, and write it to the box."""
        self._assign_if_idle()
        self.find_connections(call.group)
        row = self.rows.setdefault((call.op, call.axis), CollectiveCount(call.op, call.axis))
        row.calls += 1
        row.payload += call.payload
        row.algorithmic += call.algorithmic
        row.members = tuple(call.members)
        if call.first is not None:
            row.types.add(type_of(call.first))
        if call.first is not None and call.first.device.type != "cpu":
            row.wire, self._unseen = None, True  # the operating system does not count NCCL's bytes
        elif row not in self._unassigned:
            self._unassigned.append(row)
        channel, signature = call.channel, call.signature
        number = self.moves.begin(channel, signature)
        operation = Operation(channel, number, call.needs, call.limit, call.backend == "gloo")
        # Some backends block until others have come, PyTorch's debug level DETAIL among them.
        self.moves.wait_begins(lambda: Waiting((operation,) if interposer.is_issuing else ()))
        self._thread.operation = operation
        if self.box is not None:
            self._note(call, operation, signature, self.box)
        if self.watch:
            self.watch(call)
        # The time is taken before PyTorch gets the call, because other ranks may continue from then on.
        self._thread.issued_at = time.monotonic()

    def begun(self, call: Call, work: dist.Work | OnStream | InBatch) -> None:
        """Add the collective to the open ones."""
        self._peak = max(self._peak, self._in_flight + call.size)
        row, piece = self.rows[call.op, call.axis], _piece(call.result)
        self._ended_tensors.discard(piece)  # this memory is used again, so its former tensor is freed
        operation: Operation = self._thread.operation
        since = self._thread.issued_at
        issued = Issued(work, row, call.size, since, operation, piece, call.backward, self.last)
        self._open.append(issued)
        if self.queue and call.backend == "nccl" and not interposer.is_capturing:
            self.queue.add(issued)
        if _is_receive(operation.channel):
            self._receives[any_source(operation.channel)] += 1
        self._in_flight += call.size

    def refused(self, call: Call) -> None:
        """Take back the call's number. Its row keeps counting the call."""
        self.moves.take_back(call.channel)

    def batch_begun(self, work: dist.Work) -> None:
        """Give the open operations of this batch their Work."""
        for issued in self._open:
            if isinstance(issued.work, InBatch):
                issued.work = work

    def waits(self, on: dist.Work | torch.Tensor | None, limit: float = NEVER) -> None:
        """Note the operations that block this rank. If it is not known which collective made a tensor, these
        are all open ones, and one of them must end.
        """
        if on is None or isinstance(on, torch.Tensor):
            begun = [issued for issued in self._open if not issued.has_ended()]
            piece = _piece(on)
            self._awaited_for = [issued for issued in self._open if piece and issued.piece == piece]
            known = [issued for issued in self._awaited_for if not issued.has_ended()]
            self._awaited = begun[0].row if begun else None
            if piece in self._ended_tensors:
                self._ended_tensors.discard(piece)
                self._ended_unawaited -= 1
        else:
            begun = known = [issued for issued in self._open if issued.work is on]
        if begun:
            operations = tuple(self._awaited_now(issued, limit) for issued in known or begun)
            if on is None:  # between `waits` and DDP's wait, which is in C++, callbacks of the user may run
                self.moves.wait_begins(lambda: Waiting(operations if _is_in_backward() else (), False))
            else:  # `known` has several if results of several collectives share a storage
                every = len(known) == 1 or isinstance(on, dist.Work)
                self.moves.wait_begins(partial(Waiting, operations, every))

    def _awaited_now(self, issued: Issued, limit: float) -> Operation:
        """The operation of a wait that begins now; for a receive from any rank, with `received` if known."""
        operation = issued.operation._replace(limit=min(issued.operation.limit, limit))
        if operation.channel.kind != "recv_any" or self.has_failed:
            return operation
        begun = self._receives[operation.channel]  # read before `_open`, to which `begun` adds first
        others = (one for one in self._open if one is not issued and _is_receive(one.operation.channel))
        is_known = all(one.has_ended() for one in others)
        return operation._replace(received=begun - 1) if is_known else operation

    def waited(self, work: dist.Work, start: float) -> None:
        """Add the seconds to the row, and close the collectives of this Work (several for a batch)."""
        self.moves.wait_ends()
        if awaited := [issued for issued in self._open if issued.work is work]:
            self._waited(awaited[0].row, start)
            self._in_flight -= sum(issued.size for issued in awaited)
            self._close(awaited)
        else:
            self._waited_after_all(work)

    def failed(self, work: dist.Work | None) -> None:
        """Note that a wait raised, for this Work if it is known."""
        self.has_failed = True
        if work is not None:
            self._given_up.add(work)

    def future_taken(self, work: dist.Work) -> None:
        """Do not count this Work as unawaited any more: the program may wait for its future."""
        self._by_future.add(work)
        self._waited_after_all(work)

    def waited_for_tensor(self, start: float) -> None:
        """Add the seconds to the row, and close the collectives that made this tensor."""
        self.moves.wait_ends()
        if self._awaited:
            self._waited(self._awaited, start)
        for issued in self._awaited_for:  # gloo's functional reduce-scatter never reports its end
            issued.ended = True
            self._in_flight -= issued.size
        self._close(self._awaited_for)
        self._awaited_for = []  # keep no reference: a Work may keep its tensors alive
        self._close([issued for issued in self._open if issued.has_ended()], keep=True)

    def waited_for_ddp(self, start: float, backward: int) -> None:
        """Add the seconds to the first bucket's row, and close all buckets of this backward."""
        self.moves.wait_ends()
        buckets = [issued for issued in self._open if issued.backward == backward]
        if buckets:  # which bucket ended last is not known
            self._waited(buckets[0].row, start)
        for issued in buckets:  # gloo completes the future, for which DDP waits, just before the Work
            issued.ended = True
        self._close([issued for issued in self._open if issued.has_ended()], keep=True)

    def _waited_after_all(self, work: dist.Work) -> None:
        """If this Work ended before any wait, do not count it as unawaited any more."""
        if work in self._ended:
            self._ended.discard(work)
            self._ended_unawaited -= 1

    def _unawaited(self) -> list[Issued]:
        """The open collectives whose future the program has not taken."""
        return [issued for issued in self._open if issued.work not in self._by_future]

    # -- bookkeeping -------------------------------------------------------------------

    def _close(self, ended: list[Issued], keep: bool = False) -> None:
        """Record the end of these collectives, and remove them from the open ones. keep: do not remove them,
        because nobody has waited for them.
        """
        now = time.monotonic()
        for issued in ended:
            if issued.start and len(self.streams) < self.most_spans:
                self.streams.append(Span("comm", f"{issued.row.op} {issued.row.axis}", issued.start, now))
            issued.start = 0.0
        if not keep:
            for issued in list(ended):  # one by one, because another thread may add to `_open` meanwhile
                with suppress(ValueError):
                    self._open.remove(issued)

    def _note(self, call: Call, operation: Operation, signature: str, box: int) -> None:
        """Set `last`, and write it to the box."""
        self._number += 1
        tensor = call.first if call.op != "barrier" else None
        peer = call.root if call.op in ("send", "recv") else None
        self.last = {
            "op": call.op,
            "axis": call.axis,
            "rank": call.members[call.me],
            "number": self._number,
            "channel": operation.channel,
            "nth": operation.number,  # in its channel
            "signature": signature,
            "at": time.monotonic(),
            "peer": call.root,
            # the other rank of a message; for a collective all members of the group
            "needs": call.members if peer is None else [call.members[peer]],
            "shape": None if tensor is None else list(tensor.shape),
            "dtype": None if tensor is None else type_of(tensor),
            "line": lines.innermost(sys._getframe(2)),
        }
        os.pwrite(box, json.dumps(self.last).encode()[:BOX_BYTES].ljust(BOX_BYTES, b"\0"), 0)

    def _assign_if_idle(self) -> None:
        """If no collective is under way, assign the bytes sent since the last such moment, and close all."""
        if self.is_idle():
            unawaited = self._unawaited()
            self._ended_unawaited += len(unawaited)
            self._ended.update(issued.work for issued in unawaited if isinstance(issued.work, dist.Work))
            self._ended_tensors.update(issued.piece for issued in unawaited if issued.piece)
            self._close(self._open)
            self._in_flight = 0
            self._assign()

    def _assign(self, all_ended: bool = True) -> None:
        """Assign the bytes sent since the last time to the row of the collectives begun since.

        If these belong to several rows, their bytes cannot be separated: each row gets None, and only the
        total is known. all_ended: whether all have ended; if not, the rows get None too.
        """
        total = self.sockets.total()
        is_known = wire.available and all_ended and len(self._unassigned) == 1
        for row in self._unassigned:
            row.wire = row.wire + total - self._assigned if is_known and row.wire is not None else None
        self._assigned = total
        self._unassigned.clear()

    def _waited(self, row: CollectiveCount, start: float) -> None:
        end = time.monotonic()
        row.waited += end - start
        if end - start > 1e-4:  # a shorter span would not be visible
            self.keep(Span("wait", f"{row.op} {row.axis}", start, end))


def _is_in_backward() -> bool:
    """Whether the main thread is in PyTorch's C++ code for a backward, and in no Python code called by it."""
    frame = lines.frames_of_threads().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _is_receive(channel: Channel) -> bool:
    return channel.kind in ("recv", "recv_any")


def _piece(tensor: torch.Tensor | None) -> int:
    if tensor is None or tensor.is_sparse:  # a sparse tensor lies in several pieces
        return 0
    return pytorch_private.piece_of(tensor.untyped_storage())
