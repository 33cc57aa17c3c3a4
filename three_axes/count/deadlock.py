"""The proof that ranks wait for each other for ever.

A rank leaves a collective when the ranks whose data it needs, and the ranks that need its data, have begun
theirs of the same number (`paper.collectives.needs`). A receive ends when the message has begun, and a send
when its receive has begun: gloo blocks the sender until then, whatever the size. A deadlock is proven only if
three things hold. Each rank has ended, or its main thread is blocked in such an operation, in which another
rank is missing. No operation that was begun is about to end. Nothing else in any process can act (`threads`).
Then nobody can begin what is missing.

T. Hilbrich et al. prove deadlocks of MPI in this way: "MPI Runtime Error Detection with MUST: Advances in
Deadlock Detection" (2012). `tests/count/test_deadlock.py` compares this proof with all possible events, and
with real ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..table import ranks
from .moves import Begun, Channel, Look, Operation, Waiting, from_anybody, sides_of


class Wait(NamedTuple):
    """A rank waits in an operation for another rank, which has not begun its side of the operation. instead:
    a description of what the other rank has begun instead, so that it never begins this.
    """

    rank: int
    other: int
    operation: Operation
    brought: str  # description of what the rank passed to the operation
    instead: str = ""

    def in_words(self, lines: Mapping[int, int]) -> str:
        """'rank 0 waits to send to rank 1 (line 4)'"""
        kind = self.operation.channel.kind
        does = {
            "send": "send to",
            "recv": "receive from",
            "recv_any": "receive from anybody, and so from",
        }.get(kind, f"meet in {self.brought} with")
        at = f" (line {lines[self.rank]})" if self.rank in lines else ""
        return f"rank {self.rank} waits to {does} rank {self.other}{at}"


CYCLES = {
    frozenset({"send"}): "everybody sends before anybody receives",
    frozenset({"recv"}): "everybody receives before anybody sends",
    frozenset({"collective"}): "each is in another collective. All ranks must call the collectives of their"
    " groups in the same order",
}


@dataclass
class Deadlock:
    """All ranks have ended, or can never go on. `str` says why, for the reader.

    kind: 'disagree', two ranks passed to one operation what does not match; 'absent', some wait for ranks
    that have ended; 'cycle', each waits for another of them. waits: which rank waits for which, in the
    smallest such set; every: the same for all blocked ranks. lines: rank -> the number of the line where it
    is, if known.
    """

    kind: str
    waits: list[Wait]
    every: list[Wait]
    finished: list[int]
    lines: dict[int, int] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the smallest set."""
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
            f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {ranks(absent)}, which never"
            f" came: {'it has' if len(absent) == 1 else 'they have'} finished."
        )

    def _disagree(self) -> str:
        one, other = self.waits
        which, rule = (
            f"message number {one.operation.number} of theirs",
            "Both sides must name one size and type",
        )
        if one.operation.channel.kind == "collective":
            which = f"collective number {one.operation.number} of their group"
            rule = "All ranks of a group must call the same collectives in the same order, with tensors alike"
        return (
            f"rank {one.rank} and rank {other.rank} do not agree on {which}: rank {one.rank} brought"
            f" {one.brought}, rank {other.rank} {other.brought}. {rule}."
        )


def _apart(one: Channel, other: Channel) -> str:
    """A description of why two operations that look alike never match; '' if they do not look alike."""
    if sides_of(one).keys() != sides_of(other).keys() or one.source != other.source:
        return ""
    differ = [name for name in ("group", "tag") if getattr(one, name) != getattr(other, name)]
    return f"these never match, because they differ in {' and '.join(differ)}" if differ else ""


def prove(looks: Sequence[Look | None], course: bool = False) -> Deadlock | None:
    """The proof that no rank can ever continue; None if there is none.

    looks[r]: the state of rank r, all at one moment; None if it is not known. course: whether it is a call of
    the course, where data that does not match is an error, even if PyTorch would exchange it and continue.
    """
    known = [look for look in looks if look and not look.why and (look.stands or look.ended)]
    if len(known) < len(looks):
        return None
    seen, finished = _Seen(known, course), [r for r, look in enumerate(known) if look.ended]
    waits = {r: seen.waits(r, waiting) for r, waiting in seen.standing.items()}
    if not waits or any(_may_go_on(*of) for of in waits.values()) or seen.is_under_way():
        return None
    edges = [wait for operations, _ in waits.values() for missing in operations for wait in missing]
    if found := next((wait for wait in edges if wait.instead), None):
        other = found._replace(rank=found.other, other=found.rank, brought=found.instead)
        return Deadlock("disagree", [found, other], edges, finished)
    if absent := [wait for wait in edges if wait.other in finished]:
        return Deadlock("absent", absent, edges, finished)
    return Deadlock("cycle", _shortest_cycle(edges), edges, finished)


def _may_go_on(operations: list[list[Wait]], every: bool) -> bool:
    """Whether a rank may continue. operations: for each, the waits. every: whether all of these must end."""
    each = [not missing for missing in operations]
    return all(each) if every else any(each)


class _Seen:
    """The state of all ranks at one moment."""

    def __init__(self, looks: Sequence[Look], course: bool):
        self._course = course
        self.begun = [look.begun for look in looks]
        self.open = [look.open for look in looks]
        self.standing = {r: look.stands for r, look in enumerate(looks) if look.stands and not look.ended}

    def is_under_way(self) -> bool:
        """Whether an operation that nobody waits for now has begun on all sides, and will end. A message of
        gloo's has no future, so no function is called when it ends; only a rank that waits for it notices.
        """
        each = [(rank, operation) for rank, operations in enumerate(self.open) for operation in operations]
        each = [(rank, o) for rank, o in each if o.channel.kind == "collective" or not o.marked]
        return any(not any(self.missing(rank, operation)) for rank, operation in each)

    def waits(self, rank: int, waiting: Waiting) -> tuple[list[list[Wait]], bool]:
        """(the waits of the rank in each of its operations, whether all of these operations must end)."""
        if len(waiting.operations) == 1 and waiting.operations[0].channel.kind == "recv_any":
            return self._from_any(rank, waiting.operations[0]), False
        return [list(self.missing(rank, o)) for o in waiting.operations], waiting.every

    def _from_any(self, rank: int, operation: Operation) -> list[list[Wait]]:
        """The waits of a receive from any rank: one of these must send, unless a message may be on
        its way.
        """
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
        if channel.kind == "send" and from_anybody(channel, self.begun):
            return  # the operation may be matched with that receive
        mine = self._brought(operation, rank)
        for other in operation.needs:
            wait = Wait(rank, other, operation, mine or "a collective")
            if self._count(channel, other) < number:
                yield wait
            elif mine and (its := self._brought(operation, other)) and self._never_meet(operation, mine, its):
                yield wait._replace(instead=its)

    def _never_meet(self, operation: Operation, one: str, other: str) -> bool:
        """Whether what two ranks passed to an operation, as described, does not match. For gloo, kinds of
        collectives do not: it sends the messages of each kind under a tag of their own, except a
        reduce-scatter's, which it makes of an all-reduce. With two ranks and two roots, each rank does what
        the other expects to do.
        """
        channel = operation.channel
        if self._course:
            return one != other and not from_anybody(channel, self.begun)
        if channel.kind != "collective" or not operation.marked:
            return False
        kind = lambda words: re.split(r" (?:of|\()", words)[0].replace("reduce_scatter", "all_reduce")
        root = lambda words: words.partition(" with root ")[2]
        return kind(one) != kind(other) or (len(channel.members) == 2 and root(one) != root(other))

    def _count(self, channel: Channel, rank: int) -> int:
        return self.begun[rank].get(sides_of(channel)[rank], Begun()).count

    def _brought(self, operation: Operation, rank: int) -> str | None:
        """A description of what a rank passed to its side, if that is known."""
        its = sides_of(operation.channel).get(rank, operation.channel)
        return self.begun[rank].get(its, Begun()).brought(operation.number)


def _shortest_cycle(waits: list[Wait]) -> list[Wait]:
    """The fewest ranks such that each waits for the next, and the last for the first."""
    of_rank: dict[int, list[Wait]] = {}
    for wait in waits:
        of_rank.setdefault(wait.rank, []).append(wait)
    return min(filter(None, (_back_to(start, of_rank) for start in sorted(of_rank))), key=len)


def _back_to(start: int, waits: Mapping[int, list[Wait]]) -> list[Wait]:
    """The shortest path from a rank to itself; [] if there is none."""
    ways: list[list[Wait]] = [[]]
    seen: set[int] = set()
    for way in ways:  # the list grows in the loop, so shorter paths come first
        at = way[-1].other if way else start
        if way and at == start:
            return way
        if at not in seen:
            seen.add(at)
            ways += [[*way, wait] for wait in waits[at]]
    return []
