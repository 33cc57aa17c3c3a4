"""What a rank has begun and what it stands in, so that ranks can be held against each other.

Operations are matched by number: the third collective of a group is everybody's third, the third message of
a rank to another, in a group and with a tag, is what the other receives third. So it is enough to count them,
in channels. `deadlock` reads what is noted here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from . import lines

KEPT_FIRST = 200  # of each channel, for a comparison when the call has ended
KEPT_LAST = 8  # for one while it stands still
OWN_THREAD = "three-axes"  # the name of the course's own: they free nobody
COMMUNICATES = os.path.dirname(dist.__file__)


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


def from_anybody(channel: Channel, begun: Sequence[Mapping[Channel, Begun]]) -> bool:
    """Whether the target of a message also takes some from anybody: then it is not known which of its
    messages are this channel's. begun[r]: what rank r has begun.
    """
    anybodys = channel._replace(kind="recv_any", source=None)
    return channel.target is not None and anybodys in begun[channel.target]


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
    ends_itself: bool = False  # after a time of its own, so that nothing is proven of who stands in it


class Look(NamedTuple):
    """One rank at one moment. moves: how often it has moved by then; two looks with the same number saw it
    still. stands: the operations that it waits for, None where it does not. every: it waits for all of them,
    else for one that is not known.
    """

    moves: int
    begun: dict[Channel, Begun]
    stands: list[Operation] | None
    every: bool = True


class Moves:
    """This rank's, in one call."""

    def __init__(self):
        self.start()

    def start(self) -> None:
        """Forget all that was begun: a new call starts."""
        self.begun: dict[Channel, Begun] = {}
        self._moves, self._every, self._thread = 0, True, 0
        self._stands: list[Operation] | None = None

    def begin(self, channel: Channel, brought: str) -> int:
        """Note an operation before it begins, so that nobody can see its end first. Returns its number."""
        self._moves += 1
        begun = self.begun.setdefault(channel, Begun())
        begun.count += 1
        begun.last.append(brought)
        if len(begun.first) < KEPT_FIRST:
            begun.first.append(brought)
        return begun.count

    def take_back(self, channel: Channel) -> None:
        """The last operation did not begin, since PyTorch refused it."""
        self._moves += 1
        begun = self.begun[channel]
        begun.last.pop()
        if begun.count == len(begun.first):
            begun.first.pop()
        begun.count -= 1

    def stand(self, operations: Iterable[Operation], every: bool = True) -> None:
        """This thread waits from here on."""
        self._moves += 1
        self._stands, self._every, self._thread = list(operations), every, threading.get_ident()

    def go_on(self) -> None:
        """This thread waits no longer."""
        self._moves += 1
        self._stands = None

    def look(self) -> Look | None:
        """This rank now; None where it moved meanwhile. One that something else may free does not stand."""
        before, stands = self._moves, self._stands
        if stands is not None and (any(o.ends_itself for o in stands) or self.has_help()):
            stands = None
        seen = Look(before, dict(self.begun), stands, self._every)
        return seen if self._moves == before else None

    def has_help(self) -> bool:
        """Whether another thread runs the reader's code, or is in PyTorch's communication. Threads of other
        libraries wait for work, which nobody gives them now.
        """
        known = self._thread, threading.get_ident()
        others = {t.ident for t in threading.enumerate() if t.ident not in known and t.name != OWN_THREAD}
        if not others:  # a look at frames may keep their tensors longer, as a memory budget would see
            return False
        frames = [frame for thread, frame in sys._current_frames().items() if thread in others]
        return any(lines.innermost(frame) or _communicates(frame) for frame in frames)


def _communicates(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith(COMMUNICATES):
        frame = frame.f_back
    return frame is not None
