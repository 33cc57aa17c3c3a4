"""Reads, from the states of all ranks, which ranks wait for which, and who has not come.

A rank's collective ends when certain other ranks have begun it too: those whose data this rank needs, and
those that need its data (`paper.collectives.needs`). A receive ends when the send has begun, and a send when
the receive has begun: gloo blocks the sender until then, whatever the size.

`read` has a reading only if each rank has ended, or its main thread waits in an operation of which another
rank has not begun its side. `Stillness` compares such readings, poll after poll: a World ends a call in which
nothing has moved for two seconds. Nothing is proven by that. `tests/count/test_deadlock.py` tries the reading
in all orders of the events of random programs, and on real ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..table import ranks
from .moves import Begun, Channel, Operation, Snapshot, Waiting, sides_of, target_receives_any


class Wait(NamedTuple):
    """`rank` waits in an operation for `other`, which has not begun its side of the operation."""

    rank: int
    other: int
    operation: Operation
    signature: str  # what `rank` called: 'all_reduce of float32[3]'
    instead: str = ""  # the signature of what `other` has begun in its place, so that it never begins this

    def in_words(self, lines: Mapping[int, int]) -> str:
        """'rank 0 waits to send to rank 1 (line 4)'"""
        kind = self.operation.channel.kind
        does = {
            "send": "send to",
            "recv": "receive from",
            "recv_any": "receive from anybody, and so from",
        }.get(kind, f"meet in {self.signature} with")
        at = f" (line {lines[self.rank]})" if self.rank in lines else ""
        return f"rank {self.rank} waits to {does} rank {self.other}{at}"


CYCLES = {
    frozenset({"send"}): "everybody sends before anybody receives",
    frozenset({"recv"}): "everybody receives before anybody sends",
    frozenset({"collective"}): "each is in another collective. Let all ranks of a group call its collectives"
    " in the same order",
}


@dataclass
class Deadlock:
    """Each rank has ended, or waits for a rank that has not come. `str` says who waits for whom.

    kind: 'disagree', two ranks called one operation with signatures that do not match; 'absent', ranks wait
    for ranks that have ended; 'cycle', each of several ranks waits for the next, and the last for the first.
    """

    kind: str
    waits: list[Wait]  # the two that disagree, those for ranks that have ended, or the shortest cycle
    every: list[Wait]  # the waits of all blocked ranks
    finished: list[int]  # ranks that have ended
    lines: dict[int, int] = field(default_factory=dict)  # rank -> number of the line where it is, if known

    @property
    def ranks(self) -> list[int]:
        """The blocked ranks in `waits`."""
        both = {wait.rank for wait in self.waits} | {wait.other for wait in self.waits}
        return sorted(both - set(self.finished))

    def __str__(self) -> str:
        if self.kind == "cycle":
            channels = [wait.operation.channel for wait in self.waits]
            usual = CYCLES.get(frozenset(c.kind for c in channels), "each waits for the next")
            why = _apart(channels[0], channels[-1]) or usual
            return "; ".join(wait.in_words(self.lines) for wait in self.waits) + f": {why}."
        return self._absent() if self.kind == "absent" else self._disagree()

    def _absent(self) -> str:
        waiting = sorted({wait.rank for wait in self.waits})
        absent = sorted({wait.other for wait in self.waits})
        return (
            f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {ranks(absent)}, which did not"
            f" come: {'it has' if len(absent) == 1 else 'they have'} finished."
        )

    def _disagree(self) -> str:
        one, other = self.waits
        which, called = f"message number {one.operation.number} of theirs", "passed"
        rule = "Let both sides name one size and type"
        if one.operation.channel.kind == "collective":
            which, called = f"collective number {one.operation.number} of their group", "called"
            rule = "Let all ranks of a group call the same collectives in the same order, with tensors alike"
        return (
            f"rank {one.rank} and rank {other.rank} do not agree on {which}: rank {one.rank} {called}"
            f" {one.signature}, rank {other.rank} {other.signature}. {rule}."
        )


def _apart(one: Channel, other: Channel) -> str:
    """Why two operations between the same ranks never match; '' if they are not between the same ranks."""
    if sides_of(one).keys() != sides_of(other).keys() or one.source != other.source:
        return ""
    differ = [name for name in ("group", "tag") if getattr(one, name) != getattr(other, name)]
    return f"these never match, because they differ in {' and '.join(differ)}" if differ else ""


def read(snapshots: Sequence[Snapshot | None], course: bool = False) -> Deadlock | None:
    """Who waits for whom, if each rank has ended or waits for a rank that has not come; else None.

    snapshots[r]: the state of rank r; None if it is not known. course: whether the ranks are a World's.
    There, tensors that do not match are an error, even if PyTorch would exchange them and continue.
    """
    known = [one for one in snapshots if one and not one.may_end and (one.waiting or one.ended)]
    if len(known) < len(snapshots):
        return None
    all_ranks, finished = _Ranks(known, course), [r for r, one in enumerate(known) if one.ended]
    waits = {r: all_ranks.waits(r, waiting) for r, waiting in all_ranks.waiting.items()}
    if not waits or any(_may_go_on(*of_rank) for of_rank in waits.values()):
        return None
    edges = [wait for operations, _ in waits.values() for missing in operations for wait in missing]
    if found := next((wait for wait in edges if wait.instead), None):
        other = found._replace(rank=found.other, other=found.rank, signature=found.instead)
        return Deadlock("disagree", [found, other], edges, finished)
    if absent := [wait for wait in edges if wait.other in finished]:
        return Deadlock("absent", absent, edges, finished)
    return Deadlock("cycle", _shortest_cycle(edges), edges, finished)


class Stillness:
    """Compares the states of all ranks, poll after poll.

    reading: what the last poll shows (`read`); None if a rank has not answered, or may go on. polls: how many
    polls in a row have found that reading after the first that did, without a movement between them.
    """

    def __init__(self, course: bool = False):
        self._course = course
        self._moves: dict[int, Hashable] = {}  # rank -> the moves of its last state
        self._since, self._is_whole = time.monotonic(), True
        self.reading: Deadlock | None = None
        self.polls = 0

    @property
    def seconds(self) -> float:
        """Seconds since the last poll that found a movement; 0 if no rank has answered yet."""
        return time.monotonic() - self._since if self._moves else 0.0

    def add(self, states: Sequence[Snapshot | None]) -> None:
        """Add a poll. states[r]: the state of rank r; None if it does not answer. Then it counts as not
        moved, and there is no reading.
        """
        moves = {rank: (one.moves, one.ended) for rank, one in enumerate(states) if one}
        has_moved = any(self._moves.get(rank) != its for rank, its in moves.items())
        if has_moved:
            self._since = time.monotonic()
        before, self.reading = self.reading, read(states, self._course)
        self._moves, self._is_whole = self._moves | moves, len(moves) == len(states)
        self.polls = self.polls + 1 if before and self.reading and not has_moved else 0

    def __str__(self) -> str:
        """A sentence on the seconds since the last movement."""
        still = f"no counted operation has begun and no counted wait has ended for {int(self.seconds)} s"
        return still if self._is_whole else f"{still}, as far as ranks answer"


def _may_go_on(operations: list[list[Wait]], every: bool) -> bool:
    """Whether a blocked rank may continue. operations: for each operation in which it is blocked, its waits
    for other ranks. every: whether all of these operations must end before it continues.
    """
    can_end = [not missing for missing in operations]
    return all(can_end) if every else any(can_end)


class _Ranks:
    """The state of all ranks at one moment."""

    def __init__(self, snapshots: Sequence[Snapshot], course: bool):
        self._course = course
        self.begun = [one.begun for one in snapshots]
        self.waiting = {r: one.waiting for r, one in enumerate(snapshots) if one.waiting and not one.ended}

    def waits(self, rank: int, waiting: Waiting) -> tuple[list[list[Wait]], bool]:
        """(for each operation in which the rank is blocked, its waits; whether all of these must end)."""
        if len(waiting.operations) == 1 and waiting.operations[0].channel.kind == "recv_any":
            return self._from_any(rank, waiting.operations[0]), False
        return [list(self.missing(rank, o)) for o in waiting.operations], waiting.every

    def _from_any(self, rank: int, operation: Operation) -> list[list[Wait]]:
        """A wait for each rank that could send the message; [[]] if one may be on its way."""
        channel = operation.channel
        others = [other for other in channel.members if other != rank]
        sends = [channel._replace(kind="send", source=other) for other in others]
        sent = sum(self.begun[s.source].get(s, Begun()).count for s in sends if s.source is not None)
        if operation.received is None or sent > operation.received:
            return [[]]
        return [[Wait(rank, other, operation, "a message")] for other in others]

    def missing(self, rank: int, operation: Operation) -> Iterator[Wait]:
        """A wait for each rank that has not begun its side of the operation, or has begun another instead."""
        channel, number = operation.channel, operation.number
        if channel.kind == "send" and target_receives_any(channel, self.begun):
            return  # the operation may be matched with that receive
        mine = self._signature(operation, rank)
        for other in operation.needs:
            wait = Wait(rank, other, operation, mine or "a collective")
            if self._count(channel, other) < number:
                yield wait
            elif mine and (theirs := self._signature(operation, other)):
                if self._never_match(operation, mine, theirs):
                    yield wait._replace(instead=theirs)

    def _never_match(self, operation: Operation, one: str, other: str) -> bool:
        """Whether two ranks called an operation with signatures that gloo cannot match (or, in the course,
        with any that differ). Collectives of different kinds never match, because gloo tags the messages of
        each kind; but it makes a reduce-scatter of an all-reduce. In a group of two, calls with different
        roots never match: both ranks send, or both receive.
        """
        channel = operation.channel
        if self._course:
            return one != other and not target_receives_any(channel, self.begun)
        if channel.kind != "collective":
            return False
        kind = lambda words: re.split(r" (?:of|\()", words)[0].replace("reduce_scatter", "all_reduce")
        root = lambda words: words.partition(" with root ")[2]
        return kind(one) != kind(other) or (len(channel.members) == 2 and root(one) != root(other))

    def _count(self, channel: Channel, rank: int) -> int:
        return self.begun[rank].get(sides_of(channel)[rank], Begun()).count

    def _signature(self, operation: Operation, rank: int) -> str | None:
        """The signature of a rank's side of the operation, if it is known."""
        its = sides_of(operation.channel).get(rank, operation.channel)
        return self.begun[rank].get(its, Begun()).signature(operation.number)


def _shortest_cycle(waits: list[Wait]) -> list[Wait]:
    """The waits of the fewest ranks such that each waits for the next, and the last for the first."""
    of_rank: dict[int, list[Wait]] = {}
    for wait in waits:
        of_rank.setdefault(wait.rank, []).append(wait)
    return min(filter(None, (_back_to(start, of_rank) for start in sorted(of_rank))), key=len)


def _back_to(start: int, waits: Mapping[int, list[Wait]]) -> list[Wait]:
    """The shortest path of waits from a rank to itself; [] if there is none. waits: of each rank."""
    paths: list[list[Wait]] = [[]]
    seen: set[int] = set()
    for path in paths:  # the list grows in the loop, so shorter paths come first
        at = path[-1].other if path else start
        if path and at == start:
            return path
        if at not in seen:
            seen.add(at)
            paths += [[*path, wait] for wait in waits[at]]
    return []
