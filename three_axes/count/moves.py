"""What a rank has begun and what blocks it, so that ranks can be compared.

Operations are matched by number. The third collective of a group is the third on every rank. The third
message from one rank to another, in a group and with a tag, is the third that the other receives. So it is
enough to count them, in channels. `deadlock` reads these counts.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from .threads import Before

KEPT = 200  # operations of each channel, for a comparison
PATIENT = 60.0  # seconds: a program may rely on a timeout that is shorter
NEVER = float("inf")


class Channel(NamedTuple):
    """Operations that are matched by their number. kind: collective, send or recv; 'recv_any' for receives
    from any rank. Ranks have the world's numbers.
    """

    kind: str
    group: str  # its name in PyTorch
    members: tuple[int, ...]
    source: int | None = None
    target: int | None = None
    tag: int = 0


def sides_of(channel: Channel) -> dict[int, Channel]:
    """Rank -> the channel in which that rank counts its side of this channel's operations."""
    if channel.kind == "collective":
        return dict.fromkeys(channel.members, channel)
    receives = "recv_any" if channel.kind == "recv_any" else "recv"
    sides = (channel.source, "send"), (channel.target, receives)
    return {rank: channel._replace(kind=kind) for rank, kind in sides if rank is not None}


def anybodys(channel: Channel) -> Channel:
    """The channel in which the target of these messages receives messages from any rank."""
    return channel._replace(kind="recv_any", source=None)


def from_anybody(channel: Channel, begun: Sequence[Mapping[Channel, Begun]]) -> bool:
    """Whether the target of a message also receives messages from any rank: then it is not known which of its
    receives belong to this channel. begun[r]: what rank r has begun.
    """
    return channel.target is not None and anybodys(channel) in begun[channel.target]


@dataclass
class Begun:
    """What was begun in one channel: how often, and (number, description) of what was passed to the last."""

    count: int = 0
    last: deque[tuple[int, str]] = field(default_factory=partial(deque, maxlen=KEPT))

    def brought(self, number: int) -> str | None:
        """The description of what was passed to the operation of this number, from 1; None if it
        was not kept.
        """
        place = number - self.last[0][0] if self.last else 0
        return self.last[place][1] if 0 <= place < len(self.last) else None


class Operation(NamedTuple):
    """One rank's side of a collective or of a message."""

    channel: Channel
    number: int  # in its channel, from 1
    needs: tuple[int, ...]  # ranks that must have begun their side before this one can leave
    limit: float = NEVER  # seconds after which it fails by itself, if a limit is set
    marked: bool = True  # as in gloo: messages of one kind of collective are never matched with another's
    # For a receive from any rank: the number of messages that the rank had received before, if known.
    received: int | None = None


class Waiting(NamedTuple):
    """What a rank's main thread waits for. every: whether all the operations must end before it continues; if
    not, one of them must, and which one is not known.
    """

    operations: tuple[Operation, ...]
    every: bool = True


class Ahead(NamedTuple):
    """How many collectives a rank's host has begun on NCCL, how many of these its GPU has completed, and the
    oldest one that it has not completed, as written to the box.
    """

    begun: int
    complete: int
    oldest: dict | None = None


class Look(NamedTuple):
    """The state of one rank at one moment.

    moves: a counter. If two looks have the same number, the rank did nothing in between. stands: what its
    main thread waits for, if the wait passes the interposer; None if it is anywhere else. ended: whether it
    has ended the call, and runs no more of the reader's code. begun: all operations that the rank has begun;
    open: those that have not ended, except the ones it waits for; both are empty for a rank that is
    elsewhere. why: a description of what forbids a proof; '' if nothing does.
    """

    moves: int
    stands: Waiting | None = None
    ended: bool = False
    begun: dict[Channel, Begun] = {}
    open: tuple[Operation, ...] = ()
    why: str = ""


def _is_main() -> bool:
    """Whether this is the main thread. (In a thread of gloo's, `current_thread` would register it
    in Python.)
    """
    return threading.get_ident() == threading.main_thread().ident


class Moves:
    """This rank's operations in one call. before: what ran before that is not the reader's."""

    def __init__(self):
        self._count = itertools.count(1)
        self._moves = 0  # each movement gets a new number, even if threads move at the same time
        self.before = Before()
        self.open: Callable[[], tuple[Operation, ...]] = tuple  # the operations that have not ended
        self.forbids: Callable[[], str] = str  # what forbids a proof, without passing an operator
        self.start()

    def start(self) -> None:
        """Forget all that was begun: a new call starts."""
        self.begun: dict[Channel, Begun] = {}
        self._stands: Callable[[], Waiting] | None = None  # returns what the main thread waits for
        self.blind = ""  # a description of what the program did without passing the interposer
        self._moved()

    def _moved(self) -> None:
        self._moves = next(self._count)

    def begin(self, channel: Channel, brought: str) -> int:
        """Note an operation before it begins, so that its end is never noted first. Returns its number."""
        self._moved()
        begun = self.begun.setdefault(channel, Begun())
        begun.count += 1
        begun.last.append((begun.count, brought))
        return begun.count

    def take_back(self, channel: Channel) -> None:
        """The last operation did not begin, since PyTorch refused it."""
        self._moved()
        begun = self.begun[channel]
        begun.last.pop()
        begun.count -= 1

    def stand(self, waits: Callable[[], Waiting]) -> None:
        """This thread waits from now on. waits: returns for what, which may change."""
        self._moved()
        if _is_main():
            self._stands = waits

    def go_on(self) -> None:
        """This thread does not wait any more."""
        self._moved()
        if _is_main():
            self._stands = None

    def awaited(self) -> tuple[Operation, ...]:
        """The operations that the main thread waits for."""
        stands = self._stands
        return stands().operations if stands else ()

    def why(self) -> str:
        """A description of what forbids a proof about this rank now; '' if nothing does."""
        if self.blind:
            return self.blind
        if any(operation.limit < PATIENT for operation in (*self.awaited(), *self.open())):
            return "has an operation with a limit of less than a minute"
        return self.forbids() or self.before.since()

    def look(self, ended: bool = False) -> Look | None:
        """The state of this rank now; None if it moved meanwhile. ended: as in `Look`."""
        before, stands = self._moves, self._stands
        waiting = stands() if stands else None
        if not ended and not (waiting and waiting.operations):  # all operations that it waited for have ended
            return Look(before)
        awaited = {operation[:2] for operation in waiting.operations} if waiting else ()
        beside = tuple(operation for operation in self.open() if operation[:2] not in awaited)
        seen = Look(before, waiting, ended, dict(self.begun), beside, self.why())
        return seen if self._moves == before else None
