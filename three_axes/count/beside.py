"""What a program waits for, or sends, where no operator of PyTorch's passes: futures and what is called when
they end, functions that wait in C++, the making of groups, and backends that are called by themselves.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch.distributed as dist

from .. import pytorch_private
from .moves import Channel

Tell = Callable[..., None]  # calls the method of this name of every `interposer.Listener`
SENDS = """
    allreduce allreduce_coalesced allgather allgather_coalesced _allgather_base alltoall alltoall_base barrier
    broadcast gather recv recv_anysource reduce scatter send reduce_scatter _reduce_scatter_base
""".split()


class Futures:
    """Which Works a future is of, and what will be called when it ends. `of` and `pending` know of those that
    were asked for while they were listened to.
    """

    def __init__(self, tell: Tell):
        self._tell = tell
        self.of: weakref.WeakKeyDictionary[pytorch_private.Future, list[dist.Work]]
        self.of = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[_Call, bool] = weakref.WeakKeyDictionary()
        kind: Any = pytorch_private.Future
        self._before = kind.then, kind.add_done_callback, kind.wait
        then, add, wait = self._before
        kind.then = lambda future, call: self._chained(future, then(future, self._noted(future, call)))
        kind.add_done_callback = lambda future, call: add(future, self._noted(future, call))
        kind.wait = lambda future: self._waited(future, wait)
        collect = pytorch_private.replace_collection(lambda them: self._collected(them, collect(them)))
        self._collect = collect

    def leave(self) -> None:
        """Put PyTorch's own methods in their places again."""
        kind: Any = pytorch_private.Future
        kind.then, kind.add_done_callback, kind.wait = self._before
        pytorch_private.replace_collection(self._collect)

    def pending(self) -> list[list[dist.Work]]:
        """The Works of each call that has not returned yet; none where they are not known."""
        return [call.works for ref in self._calls.keyrefs() if (call := ref()) is not None]

    def _noted(self, future, function):
        call = _Call(self.of.get(future, []), function)
        self._calls[call] = True
        call.among = weakref.ref(self._calls)
        return call

    def _chained(self, future, then):
        if works := self.of.get(future):
            self.of[then] = works
        return then

    def _collected(self, futures, all_of_them):
        works = [self.of.get(future, []) for future in futures]
        if all(works):
            self.of[all_of_them] = sum(works, [])
        return all_of_them

    def _waited(self, future, wait):
        if not (works := self.of.get(future)):
            return wait(future)
        self._tell("stands_in", lambda: works, True)
        try:
            return wait(future)
        finally:
            self._tell("goes_on")


class _Call:
    """A function that is called when a future has ended. As long as it may be, somebody keeps this."""

    def __init__(self, works: list[dist.Work], function):
        self.works, self.function = works, function
        self.among: Callable[[], Any] = lambda: None  # the calls that have not returned

    def __call__(self, *args):
        try:
            return self.function(*args)
        finally:
            if (calls := self.among()) is not None:
                calls.pop(self, None)


class Beside:
    """Listens to all this from `__init__` to `leave`. made: name of a group -> how often one was made.
    hooked: is called where DDP calls a hook, for whose future it will wait at the end of backward.
    """

    def __init__(self, tell: Tell, made: dict[str, int], hooked: Callable[[], None]):
        self._tell, self._made, self._thread = tell, made, threading.local()
        self._hooked: Callable[[], None] | None = hooked
        self.futures = Futures(tell)
        self._own: list[tuple[Any, str, Any]] = []
        for where, name in pytorch_private.WAIT_THEMSELVES:
            self._replace(where, name, self._waiting_itself)
        for name in filter(partial(hasattr, pytorch_private.Backend), SENDS):
            self._replace(pytorch_private.Backend, name, self._passing_by)
        self._replace(dist.ProcessGroup, "monitored_barrier", self._monitored)
        self._replace(*pytorch_private.REGISTERS_HOOKS, self._registering)
        self._undo = pytorch_private.replace_making_of_groups(self._making, self._meeting)

    def leave(self) -> None:
        """Put PyTorch's own functions in their places again."""
        self._undo()
        self._hooked = None
        self.futures.leave()
        for where, name, function in self._own:
            setattr(where, name, function)

    def _replace(self, where, name: str, by: Callable) -> None:
        function = getattr(where, name)
        self._own.append((where, name, function))
        setattr(where, name, by(function))

    def begun(self, work: dist.Work | None) -> None:
        """Where this thread is in a function that waits itself, it may wait for this from now on."""
        inside = getattr(self._thread, "inside", None)
        if inside is not None and isinstance(work, dist.Work):
            inside.append(work)
            self._tell("stands_in", lambda: [one for one in inside if not one.is_completed()], False)

    def _waiting_itself(self, function):
        @wraps(function)
        def waits(*args, **kwargs):
            self._thread.inside = []
            try:
                return function(*args, **kwargs)
            finally:
                self._thread.inside = None
                self._tell("goes_on")

        return waits

    def _passing_by(self, function):
        @wraps(function)
        def passes(*args, **kwargs):
            self._tell("passed_by", f"the backend's own {function.__name__} was called, which nobody counts")
            return function(*args, **kwargs)

        return passes

    def _registering(self, register):
        @wraps(register)
        def registers(reducer, state, hook):
            @wraps(hook)
            def hears(state, bucket):
                if self._hooked is not None:
                    self._hooked()
                return hook(state, bucket)

            return register(reducer, state, hears)

        return registers

    def _making(self, make):
        @wraps(make)
        def makes(size, rank, ranks, backend, store, name, *args, **kwargs):
            self._made[name] = self._made.get(name, 0) + 1
            meets = ranks and dist.get_rank() in ranks and "gloo" in str(backend).lower()
            with self.meets("new_group", name, tuple(ranks) if meets else (), kwargs.get("timeout")):
                return make(size, rank, ranks, backend, store, name, *args, **kwargs)

        return makes

    def _meeting(self, meet):
        @wraps(meet)
        def meets(rank, store, name, count, timeout, *args, **kwargs):
            everybody = count == dist.get_world_size()
            with self.meets("new_group's end", name, tuple(range(count)) if everybody else (), timeout):
                return meet(rank, store, name, count, timeout, *args, **kwargs)

        return meets

    def _monitored(self, barrier):
        @wraps(barrier)
        def meets(group, *args, **kwargs):
            known = group in pytorch_private.groups()
            members = tuple(dist.get_process_group_ranks(group)) if known else ()
            timeout = next(iter(args), kwargs.get("timeout"))
            with self.meets("monitored_barrier", group.group_name, members, timeout):
                return barrier(group, *args, **kwargs)

        return meets

    @contextmanager
    def meets(self, what: str, name: str, members: tuple[int, ...], timeout) -> Iterator[None]:
        """In this block, this thread waits until all members are in theirs, or for `timeout`."""
        if len(members) < 2:
            yield
            return
        seconds = timeout.total_seconds() if timeout is not None else math.inf
        channel = Channel("collective", f"{what} {name}", members, made=self._made.get(name, 0))
        self._tell("meets", channel, seconds if seconds < pytorch_private.USUAL_LIMIT else math.inf)
        is_made = False
        try:
            yield
            is_made = True
        finally:
            self._tell("met", channel, is_made)
