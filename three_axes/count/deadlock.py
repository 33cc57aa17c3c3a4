"""The proof that ranks wait for each other for ever.

A rank leaves a collective when those whose data it needs, and those who need its data, have begun theirs of
the same number (`paper.collectives.needs`). A receive ends when the message has begun, and a send when
its receive has: gloo holds the sender until then, whatever the size. A rank that does not stand in such an
operation may still begin one. So these can go on: who does not stand, and who stands in what has begun on all
sides that it needs, or may begin there because that rank can go on. The others never can: they wait for each
other, or for ranks that have ended the call. The call is over, whatever the rest of the ranks still does.

A rank stands where each of its threads does, or is asleep until another of them wakes it (`threads`). What is
not seen is taken for movement: a computation, a timer, a store's wait, another program, an operation with a
limit of its own, a thread of C's that is not asleep. An operation whose error would be caught may end by one
as long as a rank of its group can still leave it. So nothing is proven that may still end.

So T. Hilbrich et al. prove it for MPI: "MPI Runtime Error Detection with MUST: Advances in Deadlock
Detection" (2012). `tests/count/test_deadlock.py` holds this against all that can happen, and against real
ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..table import ranks
from .moves import ASLEEP, Begun, Channel, Look, Operation, Waiting, from_anybody, sides_of


class Wait(NamedTuple):
    """A rank waits in an operation for another rank, which has not begun its own side of it. instead: what
    the other has begun in its place, in words, so that it never comes.
    """

    rank: int
    other: int
    operation: Operation
    brought: str  # in words
    instead: str = ""

    def told(self, lines: Mapping[int, int]) -> str:
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
    """Ranks that can never go on. `str` says why, for the reader.

    kind: 'disagree', two ranks brought to one operation what does not fit; 'absent', they wait for ranks that
    have finished; 'asleep', for those in `asleep`, which nothing wakes; 'cycle', each waits for another of
    them. waits: who waits for whom, of the smallest such set; every: of all that can never go on, the ranks
    `stuck`. lines: rank -> the number of the line where it stands, where it is known.
    """

    kind: str
    waits: list[Wait]
    every: list[Wait]
    finished: list[int]
    stuck: list[int]
    asleep: list[int] = field(default_factory=list)
    lines: dict[int, int] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the smallest set."""
        stuck = {wait.rank for wait in self.waits} | {wait.other for wait in self.waits}
        return sorted((stuck | {*self.asleep}) - set(self.finished))

    def tells_of_all(self, n: int) -> bool:
        """Whether all of n ranks have finished, or can never go on."""
        return len({*self.stuck, *self.finished}) == n

    def of(self, n: int) -> str:
        """'no rank can ever go on', or which of n ranks cannot."""
        if self.tells_of_all(n):
            return "no rank can ever go on"
        return f"{ranks(self.stuck)} can never go on"

    def __str__(self) -> str:
        if self.kind == "cycle":
            channels = [wait.operation.channel for wait in self.waits]
            usual = CYCLES.get(
                frozenset(c.kind for c in channels), "each waits for what the next would do later"
            )
            why = _apart(channels) or usual
            return "; ".join(wait.told(self.lines) for wait in self.waits) + f": {why}."
        of_kind = {"absent": self._absent, "asleep": self._asleep, "disagree": self._disagree}
        return of_kind[self.kind]()

    def _absent(self) -> str:
        waiting = sorted({wait.rank for wait in self.waits})
        absent = sorted({wait.other for wait in self.waits})
        return (
            f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {ranks(absent)}, which never"
            f" came: {'it has' if len(absent) == 1 else 'they have'} finished."
        )

    def _asleep(self) -> str:
        said = [
            f"rank {r}{f' (line {self.lines[r]})' if r in self.lines else ''} waits for another thread of its"
            " own, and none is there that will wake it."
            for r in self.asleep
        ]
        if waiting := sorted({wait.rank for wait in self.waits}):
            said.append(
                f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {ranks(self.asleep)}."
            )
        return " ".join(said)

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


def _apart(channels: list[Channel]) -> str:
    """Why operations never meet that look as if they did, in words; '' where they do not look so."""
    one, other = channels[0], channels[-1]
    if {one.kind, other.kind} == {"send", "recv"} and sides_of(one).keys() == sides_of(other).keys():
        sends, receives = (one, other) if one.kind == "send" else (other, one)
        if sends.source != receives.source:
            return ""
        if sends.group != receives.group:
            return (
                f"the one sends in a group of {ranks([*sends.members])}, the other receives in another, of"
                f" {ranks([*receives.members])}. Both must name one group"
            )
        return f"the one sends with tag {sends.tag}, the other receives with tag {receives.tag}"
    if {c.kind for c in channels} == {"collective"} and len({c.members for c in channels}) == 1:
        if len({c.group for c in channels}) > 1:
            return (
                "these are collectives of two groups that have the same ranks. All must call the collectives"
                " of both groups in one order"
            )
    return ""


def prove(looks: Sequence[Look | None], finished: Collection[int], course: bool = False) -> Deadlock | None:
    """Why some ranks can never go on, None where that is not proven.

    looks[r]: rank r as it was seen, all at one moment; None where it was not. finished: ranks that have ended
    the call, and have no thread that may do more; their looks say what they had begun. course: it is a call
    of the course's: what does not fit is an error, also where PyTorch would exchange the bytes and go on, and
    who has finished keeps its connections.
    """
    seen = _Seen(looks, finished)
    if course and (pair := seen.disagreement()):
        return Deadlock("disagree", pair, pair, sorted(finished), [wait.rank for wait in pair])
    waits = {r: [seen.waits(r, thread) for thread in look.stands or ()] for r, look in seen.standing.items()}
    free = set(range(len(looks))) - set(waits) - set(finished)
    gone = set() if course else set(finished)

    def may_go_on(rank: int) -> bool:
        return any(_may_go_on(*wait, free) for wait in waits[rank]) or seen.may_lose(rank, free | gone)

    while more := {r for r in waits if r not in free and may_go_on(r)}:
        free |= more
    stuck = sorted(set(waits) - free)
    if not stuck:
        return None
    missing = [
        wait for r in stuck for operations, _ in waits[r] for waits_of in operations for wait in waits_of
    ]
    edges = [wait for wait in missing if wait.instead or wait.other not in free]
    if found := next((wait for wait in edges if wait.instead), None):
        other = found._replace(rank=found.other, other=found.rank, brought=found.instead)
        return Deadlock("disagree", [found, other], edges, sorted(finished), stuck)
    if absent := [wait for wait in edges if wait.other in finished]:
        return Deadlock("absent", absent, edges, sorted(finished), stuck)
    asleep = [r for r in stuck if seen.is_asleep(r)]
    if asleep:
        waiting = [wait for wait in edges if wait.other in asleep]
        return Deadlock("asleep", waiting, edges, sorted(finished), stuck, asleep)
    return Deadlock("cycle", _shortest_cycle(edges), edges, sorted(finished), stuck)


def _may_go_on(operations: list[list[Wait]], every: bool, free: set[int]) -> bool:
    """Whether a thread may. operations: whom it waits for in each. every: all of these must end."""
    each = [all(wait.other in free and not wait.instead for wait in missing) for missing in operations]
    return all(each) if every else any(each)


class _Seen:
    """All ranks at one moment."""

    def __init__(self, looks: Sequence[Look | None], finished: Collection[int]):
        self.begun = [look.begun if look else {} for look in looks]
        self.made = [look.made if look else {} for look in looks]
        self.standing = {
            r: look for r, look in enumerate(looks) if look and look.stands and r not in finished
        }
        # Ranks whose last operation has begun for good: PyTorch may refuse another's.
        self.still = {*self.standing, *finished}

    def is_asleep(self, rank: int) -> bool:
        """Whether nothing but a thread of its own could wake the rank, and none will."""
        return self.standing[rank].stands == [ASLEEP]

    def may_lose(self, rank: int, ending: set[int]) -> bool:
        """Whether one of the ending ranks may end a group, or its process, so that an operation of this
        rank's raises, and its code goes on from there.
        """
        stands = self.standing[rank].stands or ()
        channels = [o.channel for thread in stands if thread.caught for o in thread.operations]
        others = (
            c.members if c.kind == "recv_any" else sides_of(c) for c in channels
        )  # of a message its peer
        return any(map(ending.intersection, others))

    def waits(self, rank: int, thread: Waiting) -> tuple[list[list[Wait]], bool]:
        """(whom the thread waits for in each of its operations, whether all of these must end)."""
        if len(thread.operations) == 1 and thread.operations[0].channel.kind == "recv_any":
            return self._from_any(rank, thread.operations[0]), False
        return [list(self.missing(rank, o)) for o in thread.operations], thread.every

    def _from_any(self, rank: int, operation: Operation) -> list[list[Wait]]:
        """Any one of these must send, unless a message may be on its way."""
        channel = operation.channel
        others = [other for other in channel.members if other != rank]
        made = [self.made[other].get(channel.group, channel.made) == channel.made for other in others]
        sends = [channel._replace(kind="send", source=other) for other in others]
        sent = sum(self.begun[s.source].get(s, Begun()).count for s in sends if s.source is not None)
        if operation.received is None or sent > operation.received or not all(made):
            return [[]]
        return [[Wait(rank, other, operation, "a message")] for other in others]

    def missing(self, rank: int, operation: Operation) -> Iterator[Wait]:
        """For each rank that has not begun its side of the operation: that this one waits for it."""
        channel, number = operation.channel, operation.number
        if channel.kind == "send" and from_anybody(channel, self.begun):
            return  # it may be taken by that
        brought = self.begun[rank][channel].brought(number)
        is_pair = len(channel.members) == 2
        for other in operation.needs:
            if self.made[other].get(channel.group, channel.made) != channel.made:
                continue  # it has made the group more often, or less: whether it will come is not known
            if self._count(channel, other) < number:
                yield Wait(rank, other, operation, brought or "a collective")
            elif (
                channel.kind == "collective"
                and operation.marked
                and brought
                and (its := self._for_good(operation, other))
            ):
                if _never_meet(brought, its, is_pair):
                    yield Wait(rank, other, operation, brought, its)

    def disagreement(self) -> list[Wait]:
        """Two ranks that brought to an operation what does not fit, of which one stands in it."""
        for rank, look in self.standing.items():
            for operation in (o for thread in look.stands or () for o in thread.operations):
                mine = self.begun[rank][operation.channel].brought(operation.number)
                if mine is None or from_anybody(operation.channel, self.begun):
                    continue
                for other in sides_of(operation.channel):
                    its = self._for_good(operation, other)
                    if its is not None and its != mine:
                        return [Wait(rank, other, operation, mine), Wait(other, rank, operation, its)]
        return []

    def _count(self, channel: Channel, rank: int) -> int:
        return self.begun[rank].get(sides_of(channel)[rank], Begun()).count

    def _for_good(self, operation: Operation, rank: int) -> str | None:
        """What a rank brought to its side, in words, where that is known and PyTorch has not refused it."""
        channel, number = operation.channel, operation.number
        if rank not in self.still and self._count(channel, rank) <= number:
            return None
        return self.begun[rank].get(sides_of(channel)[rank], Begun()).brought(number)


def _never_meet(one: str, other: str, is_pair: bool) -> bool:
    """Whether gloo exchanges nothing between two collectives of one number, whose words these are. It sends
    each kind's messages under a mark of its own, but a reduce-scatter's, which it makes of an all-reduce. Of
    two ranks with two roots, each does what the other must have done to it.
    """
    marks = [
        re.split(r" (?:of|\()", words)[0].replace("reduce_scatter", "all_reduce") for words in (one, other)
    ]
    roots = [words.partition(" with root ")[2] for words in (one, other)]
    return marks[0] != marks[1] or (is_pair and roots[0] != roots[1])


def _shortest_cycle(waits: list[Wait]) -> list[Wait]:
    """The fewest ranks of which each waits for the next, and the last for the first."""
    of_rank: dict[int, list[Wait]] = {}
    for wait in waits:
        of_rank.setdefault(wait.rank, []).append(wait)
    return min(filter(None, (_back_to(start, of_rank) for start in sorted(of_rank))), key=len)


def _back_to(start: int, waits: Mapping[int, list[Wait]]) -> list[Wait]:
    """The shortest way from a rank to itself; empty where there is none."""
    ways: list[list[Wait]] = [[]]
    seen: set[int] = set()
    for way in ways:  # which grows, the shorter ones first
        at = way[-1].other if way else start
        if way and at == start:
            return way
        if at not in seen:
            seen.add(at)
            ways += [[*way, wait] for wait in waits[at]]
    return []
