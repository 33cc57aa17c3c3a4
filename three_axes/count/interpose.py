"""Calls listeners for each of PyTorch's collectives, at the one place that all of them pass.

A collective is an operator of PyTorch's library `c10d`, whether `dist.all_reduce`, DDP's C++ code, FSDP,
DTensor or a pipeline issues it. The interposer replaces only these few operators, so arithmetic runs at full
speed. It is installed only while there are listeners.

The meter is one of these, and counts bytes. When nothing is under way, the bytes since the last such moment
belong to the only row begun since; with two rows, to neither.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .. import devices, pytorch_private
from ..paper.collectives import ROOTED, needs
from ..replaced import Replaced
from .axes import AxisNames
from .moves import Channel
from .operators import (
    OPERATORS,
    TAGS,
    InBatch,
    OnStream,
    first_tensor,
    must_send,
    nbytes,
    no_such_rank,
    reduction,
    type_of,
)

# The dispatch key under which the operators are replaced. It comes after autograd's, and is also used for
# collectives inside a DTensor's operator.
_KEY = "BackendSelect"


@dataclass(kw_only=True)
class Call:
    """A collective, send or receive that is being issued on this rank."""

    op: str  # 'all_reduce', 'send', … (`operators.OPERATORS`)
    axis: str
    group: dist.ProcessGroup
    members: list[int]  # the group's ranks, by their number in the world
    me: int  # this rank's number in the group
    root: int | None  # the root's number in the group, or the other rank's of a message
    payload: float  # bytes of the whole tensor, over all ranks of the group
    size: int  # bytes of the tensor on this rank; for gather and scatter, of one rank's part
    algorithmic: float  # bytes that this rank must send by the formula
    first: torch.Tensor | None  # the first tensor among the arguments
    alone: bool  # whether it is the only tensor
    reduces: str  # 'sum', 'max', …; '' if nothing is reduced
    tag: int
    limit: float = math.inf  # PyTorch's timeout, in seconds
    backend: str = "gloo"  # "" if it is not known
    backward: int | None = None  # of a DDP bucket: the backward at whose end DDP waits for it
    result: torch.Tensor | None = None  # the first tensor of the result, when PyTorch has returned it

    @property
    def by_ddp(self) -> bool:
        """Whether this is a bucket of DDP."""
        return self.backward is not None

    @property
    def channel(self) -> Channel:
        """The channel in which this call is matched with the same call on other ranks."""
        members = tuple(self.members)
        name = self.group.group_name
        if self.op not in ("send", "recv"):
            return Channel("collective", name, members)
        if self.root is None:
            return Channel("recv_any", name, members, None, members[self.me], self.tag)
        ends = (self.me, self.root) if self.op == "send" else (self.root, self.me)
        source, target = (members[r] for r in ends)
        return Channel(self.op, name, members, source, target, self.tag)

    @property
    def needs(self) -> tuple[int, ...]:
        """The ranks that must have begun this call before it can end on this rank."""
        first, numbers = self.first, None
        # A sparse tensor needs all ranks, even if it is empty: sizes are exchanged first.
        if first is not None and not first.is_sparse:
            numbers = round(self.payload / max(1, first.element_size()))
        on_cpu = first is None or first.device.type == "cpu"
        places = needs(self.op, len(self.members), self.me, self.root, numbers, held=on_cpu)
        return tuple(self.members[r] for r in places)

    @property
    def signature(self) -> str:
        """The name and arguments that must be alike on all ranks, as text: 'all_reduce (max) of
        float32[2, 3]'; for a message '6 float32'.
        """
        what = self.op if self.reduces in ("", "sum") else f"{self.op} ({self.reduces})"
        if self.first is None or self.op == "all_to_all":  # an all-to-all may be uneven
            return what
        of, n = type_of(self.first), f"{self.payload / max(1, self.first.element_size()):.0f}"
        if self.op in ("send", "recv"):
            return f"{n} {of}"
        # The shape must be alike, because each element is added to the same one of other ranks.
        if self.alone and self.op in ("all_reduce", "reduce"):
            what += f" of {of}{list(self.first.shape)}"
        else:
            what += f" of {n} {of}"
        if self.root is not None and self.op in ROOTED:
            what += f" with root {self.members[self.root]}"
        return what


class Listener:
    """Base class of listeners. The interposer calls each method at the moment that its docstring describes.
    work: PyTorch's `Work`, the handle of a collective. start: when a wait began, by `time.monotonic()`.
    """

    def begins(self, call: Call) -> None:
        """Called just before PyTorch gets the call. If this raises, the program gets the exception, and
        nothing is sent.
        """

    def begun(self, call: Call, work) -> None:
        """The collective has begun. work: PyTorch's, or a stand-in for it. Not called for a collective that
        has already ended.
        """

    def refused(self, call: Call) -> None:
        """PyTorch raised an exception instead of beginning the collective."""

    def batch_begun(self, work: dist.Work) -> None:
        """A batch of sends and receives (`InBatch`) is complete and begins. All of them have this Work."""

    def waits(self, on: dist.Work | torch.Tensor | None, limit: float = math.inf) -> None:
        """A wait begins, of at most `limit` seconds: for a Work, for a tensor, or, with None, DDP's wait for
        its buckets.
        """

    def waited(self, work: dist.Work, start: float) -> None:
        """A wait for a Work is over; it may have failed."""

    def failed(self, work: dist.Work | None) -> None:
        """A wait for a Work raised, and `waited` is called next; or, with None, a `monitored_barrier` raised.
        The group may have lost a connection.
        """

    def future_taken(self, work: dist.Work) -> None:
        """The program took this Work's future: it may wait for the future, and not for the Work."""

    def waited_for_tensor(self, start: float) -> None:
        """A wait for the tensor of a functional collective is over."""

    def waited_for_ddp(self, start: float, backward: int) -> None:
        """DDP's wait at the end of this backward is over: all its buckets have ended."""


class Network(Protocol):
    """An emulated network (`helpers.emulate`): each collective takes as long as it would on that network."""

    late: int  # operations that took longer on this machine than on the emulated network
    failed: dict[dist.Work, Exception]  # errors of delayed operations
    awaited_in_python: weakref.WeakSet[dist.Work]  # Works for which Python code has called `wait`

    def announce(self, name, group, members, me, root, tag, payload):
        """Tell the other ranks that this one calls a collective. Returns a ticket, which `hold` takes."""

    def hold(self, ticket, group, work, result) -> dist.Work:
        """A Work that ends when `work` would end on the emulated network. result: that of its future."""

    def holds(self) -> bool:
        """Whether an operation of this rank has ended on this machine, but not yet on that network."""

    def close(self) -> None:
        """End all delays."""


class Interposer:
    """Replaces PyTorch's operators and calls the listeners. A process has one: `interposer`.

    fabric: the emulated network, if there is one. is_issuing: whether PyTorch's own operator runs for a
    collective; some backends block there until the collective has ended. is_capturing: whether the program
    captures a CUDA graph: then the GPU must not be queried. wait_for: PyTorch's `Work.wait`.
    """

    def __init__(self):
        self.axes, self.is_issuing, self.is_capturing = AxisNames(), False, False
        self.fabric: Network | None = None
        self._listeners: list[Listener] = []
        self._watched: set[int] = set()  # numbers of backwards for whose end a callback is queued
        self.wait_for, self._future_of = dist.Work.wait, dist.Work.get_future
        self._thread = threading.local()
        self._replaced = Replaced()

    def _notify(self, name: str, *arguments) -> None:
        """Call the method `name` of every listener."""
        for listener in self._listeners:
            getattr(listener, name)(*arguments)

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """In this block, this thread's collectives are not reported to the listeners."""
        self._thread.unobserved = True
        try:
            yield
        finally:
            self._thread.unobserved = False

    @property
    def _is_unobserved(self) -> bool:
        return getattr(self._thread, "unobserved", False)

    def add(self, listener: Listener) -> None:
        """Call this listener for every collective from now on."""
        if not self._listeners:
            self._install()
        self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling the listener. Without listeners PyTorch's operators are restored."""
        self._listeners.remove(listener)
        if not self._listeners:
            self._uninstall()

    def use(self, fabric: Network | None) -> None:
        """Emulate this network from now on; None: no network."""
        if self.fabric:
            self.fabric.close()
        self.fabric = fabric

    def _install(self) -> None:
        self._libraries = [
            torch.library.Library("c10d", "IMPL"),
            torch.library.Library("_c10d_functional", "IMPL"),
        ]
        for name in OPERATORS:
            self._libraries[0].impl(name, self._replacement_of(name), _KEY, with_keyset=True)
        self._libraries[1].impl("wait_tensor", self._wait_tensor, _KEY, with_keyset=True)
        self.wait_for, self._future_of = dist.Work.wait, dist.Work.get_future
        put = self._replaced.put
        put(dist.Work, "get_future", lambda work: self._giving_future(work))
        put(dist.Work, "wait", lambda work, *args, **kwargs: self._waiting(work, args, kwargs))
        self._end_batch = getattr(dist.ProcessGroup, pytorch_private.END_OF_BATCH, None)
        if self._end_batch:
            issued = lambda group, *device: self._batch_issued(group, *device)
            put(dist.ProcessGroup, pytorch_private.END_OF_BATCH, issued)
        if barrier := getattr(dist.ProcessGroup, "monitored_barrier", None):
            put(dist.ProcessGroup, "monitored_barrier", self._monitored(barrier))
        for name, begins in (("capture_begin", True), ("capture_end", False)):
            if call := getattr(torch.cuda.CUDAGraph, name, None):
                put(torch.cuda.CUDAGraph, name, self._capturing(call, begins))
        self.axes.listen()

    def _uninstall(self) -> None:
        for library in self._libraries:
            library._destroy()
        self._replaced.restore()
        self.axes.leave()

    def _monitored(self, barrier):
        """A replacement for `monitored_barrier`, which passes no operator: call the listeners if it fails."""

        @wraps(barrier)
        def replacement(*args, **kwargs):
            try:
                return barrier(*args, **kwargs)
            except BaseException:
                self._notify("failed", None)
                raise

        return replacement

    def _capturing(self, call, begins: bool):
        """A replacement for the call that begins or ends the capture of a CUDA graph: set `is_capturing`."""

        @wraps(call)
        def replacement(*args, **kwargs):
            captures_after, self.is_capturing = begins, True
            try:
                return call(*args, **kwargs)
            except BaseException:
                captures_after = False
                raise
            finally:
                self.is_capturing = captures_after

        return replacement

    def _replacement_of(self, operator: str):
        """A function that calls the listeners, and PyTorch's operator of this name."""
        original = getattr(torch.ops.c10d, operator).default
        name, at_group, at_whole, at_root = OPERATORS[operator]
        arguments = [argument.name for argument in original._schema.arguments]
        at_limit = arguments.index("timeout") if "timeout" in arguments else len(arguments)

        def intercepted(keys, *args, **kwargs):
            if self._is_unobserved:
                return original.redispatch(keys & pytorch_private.BELOW, *args, **kwargs)
            group = dist.ProcessGroup.unbox(args[at_group])
            _, members, me = self.axes.members(group)
            whole: Any = args[at_whole] if at_whole is not None else None
            held = 0 if whole is None else nbytes(whole)
            root = None if at_root is None else args[at_root]
            # Otherwise gloo would wait for ever for a rank that does not exist.
            if root is not None and not 0 <= root < len(members):
                raise ValueError(no_such_rank(name, me, root, len(members)))
            payload = held * len(members) if name in ("gather", "scatter") else held
            peer = root if name in ("send", "recv") else None
            axis, first = self.axes.name(group, name, peer), first_tensor(whole)
            backend, limit = pytorch_private.backend(group, None if first is None else first.device)
            milliseconds = args[at_limit] if at_limit < len(args) else kwargs.get("timeout", -1)
            if milliseconds >= 0:  # a timeout of this call alone
                limit = min(limit, milliseconds / 1000)
            issued = Call(
                op=name,
                axis=axis,
                group=group,
                members=members,
                me=me,
                root=root,
                payload=payload,
                size=held,
                algorithmic=must_send(operator, args, payload, len(members), me, root or 0),
                first=first,
                alone=whole is first or len(whole) == 1,
                reduces=reduction(operator, args),
                tag=args[TAGS[operator]] if operator in TAGS else 0,
                limit=limit,
                backend=backend,
            )
            if name == "all_reduce" and _by_autograd(sys._getframe().f_back):
                issued.backward = pytorch_private.backward_under_way()
            self._notify("begins", issued)
            if issued.by_ddp:
                self._watch_backward()
            ticket, fabric = None, self.fabric
            if fabric and operator != "recv_any_source_":
                ticket = fabric.announce(name, group.group_name, members, me, root, issued.tag, payload)
            self.is_issuing = True
            try:
                result = original.redispatch(keys & pytorch_private.BELOW, *args, **kwargs)
            except BaseException:
                self._notify("refused", issued)
                raise
            finally:
                self.is_issuing = False
            issued.result = first_tensor(result[0] if isinstance(result, tuple) else args[0])
            work = dist.Work.unbox(result[1] if isinstance(result, tuple) else result)
            if fabric and ticket:
                work, result = _held_back(fabric, ticket, group, work, result)
            work = work if work is not None else _stand_in(name, first, backend)
            if work is not None:
                self._notify("begun", issued, work)
            return result

        return intercepted

    def _batch_issued(self, group: dist.ProcessGroup, *device):
        """Begin the operations of a batch together, as PyTorch does, and call the listeners."""
        assert self._end_batch  # the function that was replaced
        work = self._end_batch(group, *device)
        if work is not None:
            self._notify("batch_begun", work)
        return work

    def _waiting(self, work: dist.Work, args, kwargs):
        if self._is_unobserved:
            return self.wait_for(work, *args, **kwargs)
        start = time.monotonic()
        limit = next(iter((*args, *kwargs.values())), None)
        self._notify("waits", work, math.inf if limit is None else limit.total_seconds())
        if self.fabric:
            self.fabric.awaited_in_python.add(work)
            args, kwargs = (), {}  # a delayed Work has no timeout
        try:
            ended = self.wait_for(work, *args, **kwargs)
            if self.fabric and (failure := self.fabric.failed.pop(work, None)):
                raise failure
            return ended
        except RuntimeError:
            self._notify("failed", work)
            raise
        finally:
            self._notify("waited", work, start)

    def _giving_future(self, work: dist.Work) -> torch.futures.Future:
        self._notify("future_taken", work)
        return self._future_of(work)

    def _wait_tensor(self, keys, tensor):
        start = time.monotonic()
        self._notify("waits", tensor)
        result = pytorch_private.wait_tensor(keys, tensor)
        self._notify("waited_for_tensor", start)
        return result

    def _watch_backward(self) -> None:
        """Call the listeners before and after DDP's wait at the end of this backward. DDP waits for its
        buckets in C++, in a callback that it queues after its last bucket. `begins` is queued now, so it runs
        before DDP's callback. It queues `ends`, which runs after DDP's.
        """
        task = pytorch_private.backward_under_way()
        if task in (-1, *self._watched):
            return
        self._watched.add(task)
        later = pytorch_private.after_backward

        def begins() -> None:
            start = time.monotonic()
            self._notify("waits", None)

            def ends() -> None:
                self._watched.discard(task)
                self._notify("waited_for_ddp", start, task)

            later(ends)

        later(begins)


def _held_back(fabric: Network, ticket, group: dist.ProcessGroup, work, result):
    """Delay a collective. Returns (the Work that ends at the emulated time, the operator's new result)."""
    tensors = result[0] if isinstance(result, tuple) else []
    plain = tensors if isinstance(first_tensor(tensors[:1]), torch.Tensor) else []
    work = fabric.hold(ticket, group.group_name, work, plain)
    return work, (tensors, work.boxed()) if isinstance(result, tuple) else work.boxed()


def _by_autograd(caller) -> bool:
    """Whether autograd's C++ engine issued the collective, without Python code in between. caller: the Python
    frame above the collective; None on the thread of the engine that runs a GPU's backward.
    """
    return caller is None or caller.f_code.co_name == "_engine_run_backward"


def _stand_in(name: str, tensor: torch.Tensor | None, backend: str) -> OnStream | InBatch | None:
    """A stand-in for the Work of an operator that returned none; None if the collective has ended."""
    if name in ("send", "recv"):
        return InBatch()  # outside a batch, a send has a Work in every backend
    on = tensor.device if tensor is not None else devices.CPU
    return None if on.type == "cpu" and backend != "nccl" else OnStream(on)


interposer = Interposer()
