"""Counting, on each rank: what PyTorch was asked to move.

Every collective, whoever issues it (`dist.all_reduce`, DDP's buckets in C++, FSDP,
DTensor, a pipeline's sends), passes PyTorch's dispatcher as an operator of the
library `c10d`. `Recorder` puts itself in front of those few operators and of nothing
else, so that arithmetic runs at full speed and a collective costs some 10 µs more.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import devices
from . import lines, wire
from .clock import Span
from .fabric import Fabric
from .operators import OPERATORS, InBatch, OnStream, first_tensor, must_send, nbytes, nobody
from .report import CollectiveCount, Report

# At this key the dispatcher passes also when a DTensor's own operator calls a collective, below autograd.
_KEY = "BackendSelect"
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
BOX_BYTES = 1024
REMEMBERED = 200  # collectives of a call whose shapes are compared between ranks


@dataclass
class Issued:
    """A collective that was begun, and is not known to have ended."""

    work: dist.Work | OnStream | InBatch
    row: CollectiveCount
    size: int  # bytes that it holds


class Recorder:
    """Counts this rank's collectives from `start()` to `stop()`.

    With `on` false it leaves PyTorch alone and counts nothing. The last collective is also written to `box`,
    a small file that outlives this process: when gloo aborts it, the kernel can still read what it was doing.
    """

    def __init__(self, box: int, on: bool = True):
        self.box, self.on = box, on
        self.counter = wire.Counter()
        self.last: dict | None = None  # the collective issued last, as written to the box
        self._groups: dict[str, tuple[str, list[int], int]] = {}
        self._known = lambda: None  # the group whose connections were looked at when it was formed
        self.fabric: Fabric | None = None
        # Called with the name, root or peer, and first tensor of each collective of a call before it begins.
        self.watch: Callable[[str, int | None, torch.Tensor | None], None] | None = None
        self._inside = (
            False  # whether a collective is being issued: some backends hold the caller until it has ended
        )
        if on:
            self._get_in_front()
        self.start()

    def _get_in_front(self) -> None:
        self._libraries = [
            torch.library.Library("c10d", "IMPL"),
            torch.library.Library("_c10d_functional", "IMPL"),
        ]
        for name in OPERATORS:
            self._libraries[0].impl(name, self._in_front_of(name), _KEY, with_keyset=True)
        self._libraries[1].impl("wait_tensor", self._wait_tensor, _KEY, with_keyset=True)
        self._wait = dist.Work.wait
        dist.Work.wait = lambda work, *args, **kwargs: self._waiting(work, args, kwargs)
        self._end_batch = dist.ProcessGroup._end_coalescing
        dist.ProcessGroup._end_coalescing = lambda group, *device: self._batch_issued(group, *device)

    def start(self) -> None:
        self.rows: dict[tuple[str, str], CollectiveCount] = {}
        self._open: list[Issued] = []
        self._since_quiet: list[CollectiveCount] = []
        self._in_flight = self._peak = self._number = self._forgotten = 0
        self.last = self.watch = None
        self.spans: list[Span] = []
        self.levels: list[tuple[float, int]] = []
        self._groups.clear()  # a group may have gone and its name been used again
        if self.fabric:
            self.fabric.late = 0
        self._unseen = not wire.available  # whether bytes moved that the operating system does not count
        self._brought: dict[tuple[int, ...], list[str]] = {}
        self.counter.forget()
        self._before = self.counter.read()
        self._settled = sum(self._before.values())
        os.pwrite(self.box, bytes(BOX_BYTES), 0)

    def joined(self) -> None:
        """A world has been formed: look at its connections now, not in every call."""
        if self.on:
            self.counter.refresh()
            self._known = weakref.ref(dist.group.WORLD)  # (a reference would keep its connections open)

    def finish(self) -> None:
        """Wait for what was begun and never waited for: left alone, it would meet the next call's
        collectives.
        """
        for issued in self._open:
            if not issued.work.is_completed():
                self._wait(issued.work) if isinstance(issued.work, dist.Work) else issued.work.wait()

    def stop(self) -> Report:
        if not self.on:
            return Report(spans=self.spans, levels=self.levels)
        self._settle()
        self.counter.refresh()  # connections made by groups that no collective has used
        now = self.counter.read()
        sent = (
            {ports: n - self._before.get(ports, 0) for ports, n in now.items()} if not self._unseen else None
        )
        not_waited = len(self._open) + self._forgotten
        self._open.clear()
        return Report(
            list(self.rows.values()),
            sent,
            self._peak,
            not_waited,
            self._brought,
            self.spans,
            self.levels,
            self.fabric.late if self.fabric else 0,
        )

    def calm(self) -> bool:
        """Whether nothing is under way."""
        return all(issued.work.is_completed() for issued in self._open)

    def pending(self) -> dict | None:
        """The last collective, if this rank is still in it."""
        return self.last if self._inside or not self.calm() else None

    def _in_front_of(self, operator: str):
        call = getattr(torch.ops.c10d, operator).default
        name, at_group, at_whole, at_root = OPERATORS[operator]

        def counted(keys, *args, **kwargs):
            group = dist.ProcessGroup.unbox(args[at_group])
            axis, members, me = self._axis(group)
            size = len(members)
            payload = 0 if at_whole is None else nbytes(args[at_whole])
            in_flight = payload
            if name in ("gather", "scatter"):
                payload *= size
            root = None if at_root is None else args[at_root]
            if root is not None and not 0 <= root < size:  # gloo would wait for it for ever
                raise ValueError(nobody(name, me, root, size))
            self._quiet()
            row = self.rows.setdefault((name, axis), CollectiveCount(name, axis))
            row.calls += 1
            row.payload += payload
            row.book += must_send(operator, args, payload, size, me, root or 0)
            whole = args[at_whole] if at_whole is not None else None
            if (first := first_tensor(whole)) is not None and first.device.type != "cpu":
                row.wire, self._unseen = None, True  # NCCL moves these, past the operating system's counters
            elif row not in self._since_quiet:
                self._since_quiet.append(row)
            self._remember(name, members, first, payload)
            self._note(name, axis, members, first, root)
            if self.watch:
                self.watch(name, root, first)
            ticket = (
                self.fabric
                and operator != "recv_any_source_"
                and self.fabric.come(
                    name,
                    group.group_name,
                    members,
                    me,
                    root,
                    args[3] if name in ("send", "recv") else 0,
                    payload,
                )
            )
            self._inside = True
            try:
                result = call.redispatch(keys & _BELOW, *args, **kwargs)
            finally:
                self._inside = False
            work = dist.Work.unbox(result[1] if isinstance(result, tuple) else result)
            if ticket:
                tensors = result[0] if isinstance(result, tuple) else []
                work = self.fabric.hold(
                    ticket,
                    group.group_name,
                    work,
                    tensors if isinstance(first_tensor(tensors[:1]), torch.Tensor) else [],
                )
                result = (tensors, work.boxed()) if isinstance(result, tuple) else work.boxed()
            self._peak = max(self._peak, self._in_flight + in_flight)
            if work is None:
                work = self._stand_in(name, first)
            if work is not None:
                self._open.append(Issued(work, row, in_flight))
                self._in_flight += in_flight
            return result

        return counted

    def _stand_in(self, name: str, tensor: torch.Tensor | None) -> OnStream | InBatch | None:
        """What tells when a collective has ended that came back without a Work. None: it has."""
        if name in ("send", "recv"):
            return InBatch()  # alone, a send has a Work in every backend
        on = tensor.device if tensor is not None else devices.CPU
        return None if on.type == "cpu" else OnStream(on)

    def _batch_issued(self, group: dist.ProcessGroup, *device):
        """In front of `ProcessGroup._end_coalescing`, where the sends of a batch begin together, with one
        Work.
        """
        work = self._end_batch(group, *device)
        for issued in self._open:
            if isinstance(issued.work, InBatch) and work is not None:
                issued.work = work
        return work

    def _axis(self, group: dist.ProcessGroup) -> tuple[str, list[int], int]:
        """What to call the group, its ranks as the world numbers them, and which of them this is."""
        known = self._groups.get(group.group_name)
        if known is None:
            described, members = group.group_desc.removeprefix("mesh_"), dist.get_process_group_ranks(group)
            # A mesh over all ranks makes the latter where it finds gloo and a GPU.
            if described in ("default_pg", "default"):
                described = "world"
            elif described in ("undefined", ""):
                described = "ranks " + ",".join(map(str, members))
            known = self._groups[group.group_name] = described, members, group.rank()
            if group is not self._known():
                before = self.counter.total()
                self.counter.refresh()  # the group may have brought connections, and bytes to greet its ranks
                self._settled += self.counter.total() - before
        return known

    def _remember(self, op: str, members: list[int], first: torch.Tensor | None, payload: int) -> None:
        """For `Traffic` to see whether all brought the same.

        Sends have two sides that differ, all_to_all may be uneven.
        """
        brought = self._brought.setdefault(tuple(members), [])
        if op not in ("send", "recv") and len(brought) < REMEMBERED:
            size = (
                ""
                if first is None or op == "all_to_all"
                else (
                    f" of {payload // max(1, first.element_size())} {str(first.dtype).removeprefix('torch.')}"
                )
            )
            brought.append(op + size)

    def _note(
        self, op: str, axis: str, members: list[int], first: torch.Tensor | None, root: int | None
    ) -> None:
        self._number += 1
        self.last = {
            "op": op,
            "axis": axis,
            "number": self._number,
            "at": time.monotonic(),
            "peer": root,
            # whom this rank cannot go on without
            "needs": (
                [members[root]]
                if op in ("send", "recv") and root is not None and root < len(members)
                else members
            ),
            "shape": None if first is None or op == "barrier" else list(first.shape),
            "dtype": None if first is None or op == "barrier" else str(first.dtype).removeprefix("torch."),
            "line": lines.innermost(sys._getframe(2)),
        }
        os.pwrite(self.box, json.dumps(self.last).encode()[:BOX_BYTES].ljust(BOX_BYTES, b"\0"), 0)

    def _quiet(self) -> None:
        """Where nothing is under way, credit the bytes sent so far to what was."""
        if self.calm():
            self._forgotten += len(self._open)
            self._open.clear()
            self._in_flight = 0
            self._settle()

    def _settle(self) -> None:
        """Credit the bytes since the last quiet moment.

        Collectives that overlapped cannot be told apart on the wire: where they were of
        one kind the row is exact, where not each row says n/a and only the total is known.
        """
        if not wire.available:
            for row in self._since_quiet:
                row.wire = None
        else:
            total = self.counter.total()
            if len(self._since_quiet) == 1:
                if (row := self._since_quiet[0]).wire is not None:
                    row.wire += total - self._settled
            else:
                for row in self._since_quiet:
                    row.wire = None
            self._settled = total
        self._since_quiet.clear()

    def _waiting(self, work: dist.Work, args, kwargs):
        start = time.monotonic()
        if self.fabric:
            self.fabric.awaited_in_python.add(work)
            args, kwargs = (), {}  # a work that is held back knows no timeout of its own
        try:
            ended = self._wait(work, *args, **kwargs)
            if self.fabric and (failure := self.fabric.failed.pop(work, None)):
                raise failure
            return ended
        finally:
            if awaited := [issued for issued in self._open if issued.work is work]:  # several, of a batch
                self._waited(awaited[0].row, start)
                self._in_flight -= sum(issued.size for issued in awaited)
                self._open = [issued for issued in self._open if issued.work is not work]

    def _waited(self, row: CollectiveCount, start: float) -> None:
        end = time.monotonic()
        row.waited += end - start
        if end - start > 1e-4:  # less would not be seen
            self.spans.append(Span("wait", f"{row.op} {row.axis}", start, end))

    def _wait_tensor(self, keys, tensor):
        start = time.monotonic()
        waited_for = next((issued.row for issued in self._open if not issued.work.is_completed()), None)
        result = torch.ops._c10d_functional.wait_tensor.default.redispatch(keys & _BELOW, tensor)
        if waited_for is not None:
            self._waited(waited_for, start)
        return result
