"""The proof that ranks wait for each other for ever.

A rank leaves a collective when those whose data it needs, and those who need its data, have begun theirs of
the same number (`paper.collectives.needs`). A receive ends when the message has begun, and a send when
its receive has: gloo holds the sender until then, whatever the size. A rank that does not stand in such an
operation may still begin one. So these can go on: who does not stand, and who stands in what has begun on all
sides that it needs, or may begin there because that rank can go on. The others never can. Where that is all
who have not finished, the call is over, though nobody has failed.

What is not seen is taken for movement: a computation, a lock, a store's wait, another program, an operation
that ends after a time of its own, a message from anybody. So nothing is proven that may still end.

So T. Hilbrich et al. prove it for MPI: "MPI Runtime Error Detection with MUST: Advances in Deadlock
Detection" (2012). `tools/deadlocks.py` holds this against all that can happen, and against real ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..table import ranks
from .moves import Begun, Look, Operation, brought_to, from_anybody, sides_of


class Wait(NamedTuple):
    """A rank waits in an operation for another rank, which has not begun its own side of it."""

    rank: int
    other: int
    operation: Operation
    brought: str  # in words

    def told(self, lines: Mapping[int, int]) -> str:
        """'rank 0 waits to send to rank 1 (line 4)'"""
        kind = self.operation.channel.kind
        does = {"send": "send to", "recv": "receive from"}.get(kind, f"meet in {self.brought} with")
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
    have finished; 'cycle', each waits for another of them. waits: who waits for whom, of the smallest such
    set; every: of all ranks. lines: rank -> the number of the line where it stands, where it is known.
    """

    kind: str
    waits: list[Wait]
    every: list[Wait]
    finished: list[int]
    lines: dict[int, int] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """Those that are stuck."""
        stuck = {wait.rank for wait in self.waits} | {wait.other for wait in self.waits}
        return sorted(stuck - set(self.finished))

    def __str__(self) -> str:
        if self.kind == "cycle":
            kinds = frozenset(wait.operation.channel.kind for wait in self.waits)
            why = CYCLES.get(kinds, "each waits for what the next would do later")
            return "; ".join(wait.told(self.lines) for wait in self.waits) + f": {why}."
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


def prove(looks: Sequence[Look | None], finished: Collection[int]) -> Deadlock | None:
    """Why no rank can go on, None where that is not proven.

    looks[r]: rank r as it was seen, all at one moment; None where it was not. finished: ranks that have ended
    the call; their looks say what they had begun.
    """
    begun = [look.begun if look else {} for look in looks]
    standing = {r: look for r, look in enumerate(looks) if look and look.stands and r not in finished}
    if found := _disagreement(standing, {*standing, *finished}, begun):
        return Deadlock("disagree", found, found, sorted(finished))
    if not standing or any(r not in standing and r not in finished for r in range(len(looks))):
        return None
    waits = {r: [list(_missing(r, o, begun)) for o in look.stands or ()] for r, look in standing.items()}
    free: set[int] = set()
    while more := {r for r in waits if r not in free and _may_go_on(waits[r], standing[r].every, free)}:
        free |= more
    if free:
        return None
    edges = [wait for of_rank in waits.values() for missing in of_rank for wait in missing]
    if absent := [wait for wait in edges if wait.other in finished]:
        return Deadlock("absent", absent, edges, sorted(finished))
    return Deadlock("cycle", _shortest_cycle(edges), edges, sorted(finished))


def _may_go_on(waits: list[list[Wait]], every: bool, free: set[int]) -> bool:
    each = [all(wait.other in free for wait in missing) for missing in waits]
    return all(each) if every else any(each)


def _missing(rank: int, operation: Operation, begun: Sequence[Mapping]) -> Iterator[Wait]:
    """For each rank that has not begun its side of the operation: that this one waits for it."""
    channel, number = operation.channel, operation.number
    if channel.kind == "send" and from_anybody(channel, begun):
        return  # it may be taken by that
    brought = begun[rank][channel].brought(number) or "a collective"
    for other in operation.needs:
        if begun[other].get(sides_of(channel)[other], Begun()).count < number:
            yield Wait(rank, other, operation, brought)


def _disagreement(
    standing: Mapping[int, Look], still: Collection[int], begun: Sequence[Mapping]
) -> list[Wait]:
    """Two ranks that brought to an operation what does not fit, of which one stands in it. still: ranks whose
    last operation has begun for good; PyTorch may refuse another's.
    """
    for rank, look in standing.items():
        for operation in look.stands or ():
            channel, number = operation.channel, operation.number
            if from_anybody(channel, begun):
                continue
            sides, brought = sides_of(channel), brought_to(channel, number, begun)
            mine = brought[rank]
            for other, told in brought.items():
                for_good = other in still or begun[other].get(sides[other], Begun()).count > number
                if for_good and told is not None and mine is not None and told != mine:
                    return [Wait(rank, other, operation, mine), Wait(other, rank, operation, told)]
    return []


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
