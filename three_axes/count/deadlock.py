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
from dataclasses import dataclass
from typing import NamedTuple

from ..table import ranks
from .moves import Begun, Look, Operation, sides_of


class Wait(NamedTuple):
    """A rank waits in an operation for another rank, which has not begun its own side of it."""

    rank: int
    other: int
    operation: Operation
    brought: str  # in words

    def told(self, line: int | None) -> str:
        """'rank 0 waits to send to rank 1 (line 4)'"""
        kind = self.operation.channel.kind
        does = {"send": "send to", "recv": "receive from"}.get(kind, f"meet in {self.brought} with")
        at = "" if line is None else f" (line {line})"
        return f"rank {self.rank} waits to {does} rank {self.other}{at}"


@dataclass
class Deadlock:
    """Ranks that can never go on. kind: 'disagree', they meet in one operation and brought what does not
    fit; 'absent', they wait for ranks that have finished; 'cycle', each waits for another of them. waits: who
    waits for whom, of the smallest such set.
    """

    kind: str
    waits: list[Wait]
    finished: list[int]

    @property
    def ranks(self) -> list[int]:
        """Those that are stuck."""
        stuck = {wait.rank for wait in self.waits} | {wait.other for wait in self.waits}
        return sorted(stuck - set(self.finished))

    def why(self, lines: Mapping[int, int]) -> str:
        """Why nobody can go on, for the reader. lines: rank -> the number of the line where it stands."""
        if self.kind == "cycle":
            return self._cycle(lines)
        return self._absent() if self.kind == "absent" else self._disagree()

    def _disagree(self) -> str:
        one, other = self.waits[:2]
        number = one.operation.number
        if one.operation.channel.kind == "collective":
            rule = (
                "All ranks of a group must call the same collectives in the same order, with tensors alike."
            )
            which = f"collective number {number} of their group"
        else:
            rule, which = "Both sides must name the same size and type.", f"message number {number} of theirs"
        return (
            f"rank {one.rank} and rank {other.rank} do not agree on {which}: rank {one.rank} brought"
            f" {one.brought}, rank {other.rank} {other.brought}. {rule}"
        )

    def _absent(self) -> str:
        waiting = sorted({wait.rank for wait in self.waits})
        absent = sorted({wait.other for wait in self.waits})
        has = "it has" if len(absent) == 1 else "they have"
        return (
            f"{ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {ranks(absent)}, which never"
            f" came: {has} finished."
        )

    def _cycle(self, lines: Mapping[int, int]) -> str:
        kinds = {wait.operation.channel.kind for wait in self.waits}
        why = {
            frozenset({"send"}): "everybody sends before anybody receives",
            frozenset({"recv"}): "everybody receives before anybody sends",
            frozenset(
                {"collective"}
            ): "each is in another collective. All ranks of a group must call the same"
            " collectives in the same order",
        }.get(frozenset(kinds), "each waits for what the next would do later")
        return "; ".join(wait.told(lines.get(wait.rank)) for wait in self.waits) + f": {why}."


def prove(looks: Sequence[Look | None], finished: Collection[int]) -> Deadlock | None:
    """Why no rank can go on, None where that is not proven.

    looks[r]: rank r as it was seen, all at one moment; None where it was not. finished: ranks that have ended
    the call; their looks say what they had begun.
    """
    standing = {r: look for r, look in enumerate(looks) if look and look.stands and r not in finished}
    if found := _disagreement(looks, {*standing, *finished}):
        return Deadlock("disagree", found, sorted(finished))
    if not standing or any(r not in standing and r not in finished for r in range(len(looks))):
        return None
    waits = {r: [list(_missing(r, o, looks)) for o in look.stands] for r, look in standing.items()}
    free: set[int] = set()
    while more := {r for r in waits if r not in free and _may_go_on(waits[r], standing[r].every, free)}:
        free |= more
    if free:
        return None
    edges = [wait for of_rank in waits.values() for missing in of_rank for wait in missing]
    if absent := [wait for wait in edges if wait.other in finished]:
        return Deadlock("absent", absent, sorted(finished))
    return Deadlock("cycle", _shortest_cycle(edges), sorted(finished))


def _may_go_on(waits: list[list[Wait]], every: bool, free: set[int]) -> bool:
    each = [all(wait.other in free for wait in missing) for missing in waits]
    return all(each) if every else any(each)


def _missing(rank: int, operation: Operation, looks: Sequence[Look | None]) -> Iterator[Wait]:
    """For each rank that has not begun its side of the operation: that this one waits for it."""
    channel, number = operation.channel, operation.number
    brought = looks[rank].begun[channel].brought(number) or "a collective"
    for other in operation.needs:
        theirs = looks[other].begun if looks[other] else {}
        may_be_taken = channel.kind == "send" and channel.from_anybody in theirs
        if not may_be_taken and theirs.get(sides_of(channel)[other], Begun()).count < number:
            yield Wait(rank, other, operation, brought)


def _disagreement(looks: Sequence[Look | None], still: Collection[int]) -> list[Wait]:
    """Two ranks that brought to an operation what does not fit, of which one stands in it. still: ranks whose
    last operation has begun for good.
    """
    for rank in (r for r in still if looks[r].stands):
        for operation in looks[rank].stands:
            channel, number = operation.channel, operation.number
            mine = looks[rank].begun[channel].brought(number)
            for other, its in sides_of(channel).items():
                theirs = looks[other].begun.get(its, Begun()) if looks[other] else Begun()
                told = theirs.brought(number) if other in still or theirs.count > number else None
                if None not in (mine, told) and told != mine:
                    return [Wait(rank, other, operation, mine), Wait(other, rank, operation, told)]
    return []


def _shortest_cycle(waits: list[Wait]) -> list[Wait]:
    """The fewest ranks of which each waits for the next, and the last for the first."""
    best: list[Wait] | None = None
    for start in sorted({wait.rank for wait in waits}):
        paths, seen = [[]], {start}
        while paths and (best is None or len(paths[0]) + 1 < len(best)):
            found = None
            longer = []
            for path in paths:
                at = path[-1].other if path else start
                for wait in (w for w in waits if w.rank == at):
                    if wait.other == start:
                        found = found or [*path, wait]
                    elif wait.other not in seen:
                        seen.add(wait.other)
                        longer.append([*path, wait])
            if found:
                best = found
                break
            paths = longer
    return best
