"""What a rank has begun and what it stands in, so that ranks can be held against each other.

Operations are matched by number: the third collective of a group is everybody's third, the third message of
a rank to another, in a group and with a tag, is what the other receives third. So it is enough to count them,
in channels. `deadlock` reads what is noted here.
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

KEPT_FIRST = 200  # of each channel, for a comparison when the call has ended
KEPT_LAST = 8  # for one while it stands still
PATIENT = 60.0  # seconds: a program may count on a limit that is shorter
NEVER = float("inf")


class Channel(NamedTuple):
    """Operations that are matched by their number. kind: collective, send or recv; 'recv_any' of messages
    that may come from anybody. Ranks are numbered as the world does.
    """

    kind: str
    group: str  # its name in PyTorch
    members: tuple[int, ...]
    source: int | None = None
    target: int | None = None
    tag: int = 0


def sides_of(channel: Channel) -> dict[int, Channel]:
    """Rank -> the channel in which it counts its side of this one's operations."""
    if channel.kind == "collective":
        return dict.fromkeys(channel.members, channel)
    receives = "recv_any" if channel.kind == "recv_any" else "recv"
    sides = (channel.source, "send"), (channel.target, receives)
    return {rank: channel._replace(kind=kind) for rank, kind in sides if rank is not None}


def anybodys(channel: Channel) -> Channel:
    """The channel in which the target of this one's messages receives such from anybody."""
    return channel._replace(kind="recv_any", source=None)


def from_anybody(channel: Channel, begun: Sequence[Mapping[Channel, Begun]]) -> bool:
    """Whether the target of a message also takes some from anybody: then it is not known which of its
    messages are this channel's. begun[r]: what rank r has begun.
    """
    return channel.target is not None and anybodys(channel) in begun[channel.target]


def brought_to(
    channel: Channel, number: int, begun: Sequence[Mapping[Channel, Begun]]
) -> dict[int, str | None]:
    """What each side has brought to one operation, in words; None where it has not begun, or was not kept."""
    return {r: begun[r].get(its, Begun()).brought(number) for r, its in sides_of(channel).items()}


@dataclass
class Begun:
    """What was begun in one channel: how often, and what was brought, in words."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    last: deque[tuple[int, str]] = field(default_factory=partial(deque, maxlen=KEPT_LAST))  # with numbers

    def brought(self, number: int) -> str | None:
        """What was brought to the operation of this number, from 1; None where it was not kept."""
        if number <= len(self.first):
            return self.first[number - 1]
        return next((brought for its, brought in self.last if its == number), None)


class Operation(NamedTuple):
    """One rank's side of a collective or of a message."""

    channel: Channel
    number: int  # in its channel, from 1
    needs: tuple[int, ...]  # ranks that must have begun their side before this one can leave
    limit: float = NEVER  # seconds after which it fails by itself, where somebody has set a limit
    marked: bool = True  # as gloo does, that a message of one kind of collective never meets another kind's
    # Of a receive from anybody: the messages that the rank had received before it, where that is known.
    received: int | None = None


class Waiting(NamedTuple):
    """What a rank's main thread waits for. every: all the operations must end before it goes on, else one of
    them, and it is not known which.
    """

    operations: tuple[Operation, ...]
    every: bool = True


class Ahead(NamedTuple):
    """How many collectives a rank's host has begun on NCCL, how many of these its GPU has completed, and the
    oldest that it has not, as written to the box.
    """

    begun: int
    complete: int
    oldest: dict | None = None


class Look(NamedTuple):
    """One rank at one moment.

    moves: two looks with the same saw the rank still, all the time between them. stands: what its main thread
    waits for, in a wait of ours; None where it is anywhere else. ended: it has ended the call, and runs no
    more of the reader's code. begun, open: all that the rank has begun, and what of it has not ended beside
    what it waits for; both are empty of a rank that is elsewhere. why: what it has that forbids a proof, in
    words; '' where nothing does.
    """

    moves: int
    stands: Waiting | None = None
    ended: bool = False
    begun: dict[Channel, Begun] = {}
    open: tuple[Operation, ...] = ()
    why: str = ""

    def is_still_in(self, later: Look | None) -> bool:
        """Whether the rank did nothing from this look to the later one."""
        return later is not None and self.moves == later.moves


def _is_main() -> bool:
    """To ask for `current_thread` in gloo's would have Python take that for one of its own from then on."""
    return threading.get_ident() == threading.main_thread().ident


class Moves:
    """This rank's, in one call. before: what runs beside that is not the reader's."""

    def __init__(self):
        self._count = itertools.count(1)
        self._moves = 0  # one number is never taken twice, whichever threads move at once
        self.before = Before()
        self.open: Callable[[], tuple[Operation, ...]] = tuple  # what has not ended
        self.forbids: Callable[[], str] = str  # why nothing can be proven, by what passes no operator
        self.start()

    def start(self) -> None:
        """Forget all that was begun: a new call starts."""
        self.begun: dict[Channel, Begun] = {}
        self._stands: Callable[[], Waiting] | None = None  # what the main thread waits for, when asked
        self.blind = ""  # what the program did past our sight, in words
        self._moved()

    def _moved(self) -> None:
        self._moves = next(self._count)

    def begin(self, channel: Channel, brought: str) -> int:
        """Note an operation before it begins, so that nobody can see its end first. Returns its number."""
        self._moved()
        begun = self.begun.setdefault(channel, Begun())
        begun.count += 1
        begun.last.append((begun.count, brought))
        if len(begun.first) < KEPT_FIRST:
            begun.first.append(brought)
        return begun.count

    def take_back(self, channel: Channel) -> None:
        """The last operation did not begin, since PyTorch refused it."""
        self._moved()
        begun = self.begun[channel]
        begun.last.pop()
        if begun.count == len(begun.first):
            begun.first.pop()
        begun.count -= 1

    def stand(self, waits: Callable[[], Waiting]) -> None:
        """This thread waits from here on, for what `waits` gives when asked: that may change."""
        self._moved()
        if _is_main():
            self._stands = waits

    def go_on(self) -> None:
        """This thread waits no longer."""
        self._moved()
        if _is_main():
            self._stands = None

    def awaited(self) -> tuple[Operation, ...]:
        """What the main thread waits for."""
        stands = self._stands
        return stands().operations if stands else ()

    def why(self, is_placed: bool = False) -> str:
        """What this rank has that forbids a proof now, in words; '' where nothing does."""
        if self.blind:
            return self.blind
        if any(operation.limit < PATIENT for operation in (*self.awaited(), *self.open())):
            return "has an operation with a limit of less than a minute"
        return self.forbids() or self.before.since(is_placed)

    def look(self, ended: bool = False) -> Look | None:
        """This rank now; None where it moved meanwhile. ended: as of a look."""
        before, stands = self._moves, self._stands
        waiting = stands() if stands else None
        if not ended and not (waiting and waiting.operations):  # all that it waited for has ended
            return Look(before)
        awaited = {operation[:2] for operation in waiting.operations} if waiting else ()
        beside = tuple(operation for operation in self.open() if operation[:2] not in awaited)
        seen = Look(before, waiting, ended, dict(self.begun), beside, self.why())
        return seen if self._moves == before else None
