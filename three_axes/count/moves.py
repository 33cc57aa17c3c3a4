"""Records which operations (collectives, sends, receives) a rank has begun, and which one it waits in.

Ranks can be compared by counts alone. The third collective of a group is the third on every rank. The third
message from one rank to another, in a group and with a tag, is the third that the other receives. Operations
that are counted together form a channel. `deadlock` compares the counts of all ranks.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from .threads import Baseline

KEPT = 200  # the last operations of each channel whose signatures are kept, to be compared
PATIENT = 60.0  # seconds; under a shorter timeout no hang is proven, since the program may rely on it
NEVER = float("inf")  # seconds: an operation without a timeout


class Channel(NamedTuple):
    """The name of a sequence of operations that ranks count alike: a group's collectives, or the messages
    from one rank to another. Ranks have the world's numbers.
    """

    kind: str  # 'collective', 'send' or 'recv'; 'recv_any' for receives from any rank
    group: str  # its name in PyTorch
    members: tuple[int, ...]
    source: int | None = None  # the rank that sends; None for a collective and for 'recv_any'
    target: int | None = None  # the rank that receives; None for a collective
    tag: int = 0


def sides_of(channel: Channel) -> dict[int, Channel]:
    """Rank -> the channel in which it counts its side of these operations, a message's 'send' or 'recv'."""
    if channel.kind == "collective":
        return dict.fromkeys(channel.members, channel)
    receives = "recv_any" if channel.kind == "recv_any" else "recv"
    sides = (channel.source, "send"), (channel.target, receives)
    return {rank: channel._replace(kind=kind) for rank, kind in sides if rank is not None}


def any_source(channel: Channel) -> Channel:
    """The 'recv_any' channel of the rank that receives these messages."""
    return channel._replace(kind="recv_any", source=None)


def target_receives_any(channel: Channel, begun: Sequence[Mapping[Channel, Begun]]) -> bool:
    """Whether the target of a message has also begun receives from any rank. Then it is not known which of
    its receives belong to this channel. begun[r]: what rank r has begun.
    """
    return channel.target is not None and any_source(channel) in begun[channel.target]


@dataclass
class Begun:
    """What one rank has begun in one channel: how many operations, and (number, signature) of the last ones.
    A signature is the text of what must be alike on all ranks, such as 'all_reduce of float32[3]'.
    """

    count: int = 0
    last: deque[tuple[int, str]] = field(default_factory=partial(deque, maxlen=KEPT))

    def signature(self, number: int) -> str | None:
        """The signature of the operation of this number, from 1; None if it was not kept."""
        place = number - self.last[0][0] if self.last else 0
        return self.last[place][1] if 0 <= place < len(self.last) else None


class Operation(NamedTuple):
    """One rank's side of a collective or of a message."""

    channel: Channel
    number: int  # in its channel, from 1
    needs: tuple[int, ...]  # ranks that must have begun their side before this one can end
    limit: float = NEVER  # PyTorch's timeout, in seconds
    on_gloo: bool = True  # gloo never matches messages of different kinds of collective; NCCL may
    # For a receive from any rank: the number of messages that the rank had received before, if known.
    received: int | None = None


class Waiting(NamedTuple):
    """What a rank's main thread waits for. every: whether all the operations must end before it continues; if
    not, one of them must, and which one is not known.
    """

    operations: tuple[Operation, ...]
    every: bool = True


class GpuProgress(NamedTuple):
    """How far a rank's GPU is with its collectives on NCCL, for which the host does not wait."""

    begun: int  # collectives that the host has begun
    complete: int  # those of them that the GPU has completed
    oldest: dict | None = None  # the oldest one not completed, in the form of `Recorder.last`


class Snapshot(NamedTuple):
    """The state of one rank at one moment. `begun` and `open` are empty if the rank neither waits nor has
    ended, because no proof needs them then.
    """

    moves: int  # if two snapshots have the same number, the rank made no move in between (see `Moves`)
    waiting: Waiting | None = None  # what its main thread waits for; None if it does not wait in an operation
    ended: bool = False  # whether it has ended the call, and runs no more of the user's code
    begun: dict[Channel, Begun] = {}  # all operations that it has begun
    open: tuple[Operation, ...] = ()  # those that have not ended, except the ones it waits for
    why: str = ""  # what forbids a proof; '' if nothing does


def _is_main() -> bool:
    """Whether this is the main thread. (`current_thread` would register a thread of gloo's in Python.)"""
    return threading.get_ident() == threading.main_thread().ident


class Moves:
    """Records this rank's operations and waits in one call. A begun operation, and the begin and the end of a
    wait, are its moves. baseline: the threads and processes that ran before the user's code.
    """

    def __init__(self):
        self._count = itertools.count(1)
        self._moves = 0  # each move gets a new number, even if threads move at the same time
        self.baseline = Baseline()
        # Two functions that the recorder sets.
        self.open: Callable[[], tuple[Operation, ...]] = tuple  # returns the operations that have not ended
        self.forbids: Callable[[], str] = str  # returns what else forbids a proof; '' if nothing does
        self.start()

    def start(self) -> None:
        """Forget all that was begun: a new call starts."""
        self.begun: dict[Channel, Begun] = {}
        self._waiting: Callable[[], Waiting] | None = None  # returns what the main thread waits for
        self.bypass = ""  # what the program did without passing the interposer; it forbids a proof
        self._move()

    def _move(self) -> None:
        self._moves = next(self._count)

    def begin(self, channel: Channel, signature: str) -> int:
        """Note an operation just before it begins. Returns its number in the channel."""
        self._move()
        begun = self.begun.setdefault(channel, Begun())
        begun.count += 1
        begun.last.append((begun.count, signature))
        return begun.count

    def take_back(self, channel: Channel) -> None:
        """Uncount the last operation: PyTorch refused it."""
        self._move()
        begun = self.begun[channel]
        begun.last.pop()
        begun.count -= 1

    def wait_begins(self, waiting: Callable[[], Waiting]) -> None:
        """This thread waits from now on. waiting: returns what it waits for, which may change meanwhile."""
        self._move()
        if _is_main():
            self._waiting = waiting

    def wait_ends(self) -> None:
        """This thread does not wait any more."""
        self._move()
        if _is_main():
            self._waiting = None

    def awaited(self) -> tuple[Operation, ...]:
        """The operations that the main thread waits for."""
        waiting = self._waiting
        return waiting().operations if waiting else ()

    def why(self) -> str:
        """What forbids a proof about this rank now; '' if nothing does."""
        if self.bypass:
            return self.bypass
        if any(operation.limit < PATIENT for operation in (*self.awaited(), *self.open())):
            return "has an operation with a limit of less than a minute"
        return self.forbids() or self.baseline.since()

    def snapshot(self, ended: bool = False) -> Snapshot | None:
        """The state of this rank now; None if it moved meanwhile. ended: as in `Snapshot`."""
        before, wait = self._moves, self._waiting
        waiting = wait() if wait else None
        if not ended and not (waiting and waiting.operations):
            return Snapshot(before)
        awaited = {operation[:2] for operation in waiting.operations} if waiting else ()
        others = tuple(operation for operation in self.open() if operation[:2] not in awaited)
        now = Snapshot(before, waiting, ended, dict(self.begun), others, self.why())
        return now if self._moves == before else None
