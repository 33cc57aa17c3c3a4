"""What a rank has begun and what it stands in, so that ranks can be held against each other.

Operations are matched by number: the third collective of a group is everybody's third, the third message of
a rank to another, in a group and with a tag, is what the other receives third. So it is enough to count them,
in channels. `deadlock` reads what is noted here.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from .. import lines
from . import threads

KEPT_FIRST = 200  # of each channel, for a comparison when the call has ended
KEPT_LAST = 8  # for one while it stands still
PATIENT = 60.0  # seconds: a program may count on a limit that is shorter, whoever catches what is raised then
NEVER = float("inf")


class Channel(NamedTuple):
    """Operations that are matched by their number. kind: collective, send or recv; 'recv_any' of messages
    that may come from anybody. Ranks are numbered as the world does. made: how many groups of this name the
    process had made when this one was there: a group that is destroyed and made again counts anew.
    """

    kind: str
    group: str  # its name in PyTorch
    members: tuple[int, ...]
    source: int | None = None
    target: int | None = None
    tag: int = 0
    made: int = 0


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
    last: deque[str] = field(default_factory=partial(deque, maxlen=KEPT_LAST))

    def brought(self, number: int) -> str | None:
        """What was brought to the operation of this number, from 1; None where it was not kept."""
        if number <= len(self.first):
            return self.first[number - 1]
        back = self.count - number
        return self.last[-1 - back] if 0 <= back < len(self.last) else None


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
    """What one thread of a rank waits for. every: all the operations must end before the thread goes on,
    else one of them, and it is not known which. caught: what an operation raises would be caught by the
    reader's code, or run some of it, so that the program may go on from there: it raises where a limit is
    over, or where another rank ends its group, or its process.

    `ASLEEP` waits for no operation, but for another thread of its own, and none is there that may wake it.
    """

    operations: tuple[Operation, ...]
    every: bool = True
    caught: bool = False

    @property
    def ends_itself(self) -> bool:
        """Whether the program may count on the operations' own limits."""
        patience = NEVER if self.caught else PATIENT
        return any(operation.limit < patience for operation in self.operations)


ASLEEP = Waiting((), every=False)


class Look(NamedTuple):
    """One rank at one moment.

    moves, slept: two looks with the same saw the rank still, all the time between them. stands: what its
    threads wait for, where no thread can do anything else; None where one may. Of a rank that has ended the
    call it is empty. why: why `stands` is None, in words, where that is known. made: group -> how many of
    this name the rank has made.
    """

    moves: int
    begun: dict[Channel, Begun]
    stands: list[Waiting] | None
    slept: tuple[int, ...] = ()
    why: str = ""
    made: dict[str, int] = {}

    def is_still_in(self, later: Look | None) -> bool:
        """Whether the rank did nothing from this look to the later one."""
        return later is not None and (self.moves, self.slept) == (later.moves, later.slept)


class Moves:
    """This rank's, in one call."""

    def __init__(self):
        self._count = itertools.count(1)
        self._moves = 0  # one number is never taken twice, whichever threads move at once
        self.made: dict[str, int] = {}
        self._since: int | None = None  # how often the main thread had gone to sleep at the last look
        # What will be called when an operation has ended, by whom nobody knows; None: it may be called now.
        self.callbacks: Callable[[], list[Operation | None]] = list
        self.start()

    def start(self) -> None:
        """Forget all that was begun: a new call starts."""
        self.begun: dict[Channel, Begun] = {}
        self._stands: dict[int, Callable[[], Waiting]] = {}  # thread -> what it waits for, when asked
        self.blind = ""  # what the program did past our sight, in words
        self._moved()

    def _moved(self) -> None:
        self._moves = next(self._count)

    def begin(self, channel: Channel, brought: str) -> int:
        """Note an operation before it begins, so that nobody can see its end first. Returns its number."""
        self._moved()
        begun = self.begun.setdefault(channel, Begun())
        begun.count += 1
        begun.last.append(brought)
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

    def stand(self, operations: Iterable[Operation], every: bool = True) -> None:
        """This thread waits from here on."""
        waits = tuple(operations)
        self.stand_in(lambda: waits, every)

    def stand_in(self, operations: Callable[[], tuple[Operation, ...]], every: bool) -> None:
        """This thread waits from here on, for what `operations` gives when asked: that changes."""
        # A thread that ends of an exception may free another, which waits for that.
        is_main = threading.current_thread() is threading.main_thread()
        caught = not is_main or lines.is_guarded(sys._getframe(1))
        self._moved()
        self._stands[threading.get_ident()] = lambda: Waiting(operations(), every, caught)

    def go_on(self) -> None:
        """This thread waits no longer."""
        self._moved()
        self._stands.pop(threading.get_ident(), None)

    def awaited(self) -> list[Operation]:
        """What this rank's threads wait for, the main thread's first."""
        main = threading.main_thread().ident
        stands = sorted(self._stands.items(), key=lambda stand: stand[0] != main)
        return [operation for _, waits in stands for operation in waits().operations]

    def help(self) -> str:
        """The first thread that may still do something, in words: not the main one, nor one that stands."""
        return self.blind or threads.beside({*self._stands, threading.main_thread().ident or 0}).help

    def _main_sleeps_on(self) -> bool:
        """Whether the main thread slept at the last look too. To look at its frames keeps its tensors."""
        before, self._since = self._since, threads.main_asleep_since()
        return before is not None and before == self._since

    def look(self, ended: bool = False) -> Look | None:
        """This rank now; None where it moved meanwhile. ended: its main thread has ended the call, and runs
        no more of the reader's code.
        """
        before, waits = self._moves, {thread: waits() for thread, waits in list(self._stands.items())}
        if not (waits or ended or self._main_sleeps_on()):
            return Look(before, dict(self.begun), None)
        callbacks = self.callbacks()
        main = {threading.main_thread().ident or 0} if ended else set()
        others = threads.beside({*waits, *main})
        why = self.blind or others.help
        if any(wait.ends_itself for wait in waits.values()):
            why = "an operation has a limit of its own, and the program may go on when that is over"
        if not all(wait.operations for wait in waits.values()):
            why = "all that it waited for has ended"
        if None in callbacks:
            why = "what is to be called when an operation has ended may not have been called yet"
        # It is called where the operation raises, too.
        called = [Waiting((operation,), caught=True) for operation in callbacks if operation]
        stands = [*waits.values(), *called]
        stands = stands or ([] if ended else [ASLEEP])
        seen = Look(before, dict(self.begun), None if why else stands, others.slept, why, dict(self.made))
        return seen if self._moves == before else None
