"""Records which operations (collectives, sends, receives) a rank has begun, and which one it waits in; and
what else in its process may still act.

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

from .. import lines

KEPT = 200  # the last operations of each channel whose signatures are kept, to be compared
PATIENT = 60.0  # seconds: a program may rely on a shorter timeout, so an operation that has one may still end
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
    """The state of one rank at one moment. All but `moves` is empty if the rank neither waits in an operation
    nor has ended.
    """

    moves: tuple[int, ...]  # if two snapshots have the same, the rank made no move in between (see `Moves`)
    waiting: Waiting | None = None  # what its main thread waits for; None if it does not wait in an operation
    ended: bool = False  # whether it has ended the call, and runs no more of the user's code
    begun: dict[Channel, Begun] = {}  # all operations that it has begun
    # As words that follow 'rank 0', or '': why its wait may still end by itself; a thread that may act.
    may_end: str = ""
    thread: str = ""


class OwnThread(threading.Thread):
    """A thread of this project, which never frees a rank. It ends with the process."""

    def __init__(self, target: Callable[[], None]):
        super().__init__(target=target, name="three-axes", daemon=True)


def threads() -> set[int]:
    """The threads that run Python in this process, without the main thread and this project's. Threads of C++
    are not among them, unless one is in a function of Python.
    """
    own = {thread.ident for thread in threading.enumerate() if isinstance(thread, OwnThread)}
    return set(lines.frames_of_threads()) - own - {threading.main_thread().ident}


def _in_words(ident: int) -> str:
    """'has a thread 'heartbeat' in train.py, line 3'."""
    names = {thread.ident: f" {thread.name!r}" for thread in threading.enumerate()}
    frame = lines.frames_of_threads().get(ident)
    at = lines.innermost(frame) or next(lines.outwards(frame), None)
    return f"has a thread{names.get(ident, '')}" + (f" in {lines.place(at)}" if at else "")


def _is_main() -> bool:
    """Whether this is the main thread. (`current_thread` would register a thread of gloo's in Python.)"""
    return threading.get_ident() == threading.main_thread().ident


class Moves:
    """Records this rank's operations and waits in one call. A begun operation, the begin and the end of a
    wait, and bytes that its connections have carried are its moves.
    """

    def __init__(self):
        self._count = itertools.count(1)
        self._moves = 0  # each move gets a new number, even if threads move at the same time
        self._known = threads()  # that ran before the user's first code
        # Two functions that the recorder sets.
        self.carried: Callable[[], int] = int  # returns the bytes that this rank's connections have carried
        self.is_held: Callable[[], bool] = bool  # returns whether an emulated network holds an operation back
        self.start()

    def start(self) -> None:
        """Forget all that was begun: a new call starts."""
        self.begun: dict[Channel, Begun] = {}
        self._waiting: Callable[[], Waiting] | None = None  # returns what the main thread waits for
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

    def may_end(self) -> str:
        """Why the main thread's wait may end by itself, as words that follow 'rank 0'; '' if nothing does."""
        awaited = self.awaited()
        if not all(operation.on_gloo for operation in awaited):
            return "waits on another backend than gloo"
        if any(operation.limit < PATIENT for operation in awaited):
            return "waits with a limit of less than a minute"
        return "has an operation that the emulated network holds back" if self.is_held() else ""

    def thread(self) -> str:
        """A thread that may act, begun by the user's code, as words that follow 'rank 0'; '' if none runs."""
        running = threads()
        self._known &= running  # a new thread may get the number of one that has ended
        new = running - self._known
        return _in_words(min(new)) if new else ""

    def snapshot(self, ended: bool = False) -> Snapshot | None:
        """The state of this rank now; None if it moved meanwhile. ended: as in `Snapshot`."""
        before, wait = self._moves, self._waiting
        waiting = wait() if wait else None
        if not ended and not (waiting and waiting.operations):
            return Snapshot((before,))
        moves = before, self.carried()
        now = Snapshot(moves, waiting, ended, dict(self.begun), self.may_end(), self.thread())
        return now if self._moves == before else None
