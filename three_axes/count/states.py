"""The states that the ranks of a watched job write for each other, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .. import lines
from ..table import ranks
from .moves import Ahead, Begun, Channel, Look, sides_of
from .standstill import Reading

Words = tuple[str, str]  # a description of what a rank does, and the same in the plural
SILENT = "does not answer", "do not answer"


class State(NamedTuple):
    """The state that a rank has written. beat: how often it has written the same look. line: where its main
    thread is. last: the collective that it waits in, or else the one that it began last, as written to the
    box. ahead: how far its GPU is, and begun: what it has begun last, both for NCCL.
    """

    beat: int
    look: Look
    line: lines.Line | None = None
    last: dict | None = None
    ahead: Ahead | None = None
    begun: dict[Channel, list[tuple[int, str]]] = {}

    @property
    def gone(self) -> bool:
        """Whether its script is over, with all functions registered for its end."""
        return self.look.ended

    def does(self) -> Words:
        """A description of what the rank does."""
        at = lines.show(self.line) if self.line else "code that is not the script's"
        last = f"began {collective(self.last)} last" if self.last else "began no collective"
        if self.gone:
            after = f"after {collective(self.last)}" if self.last else "before any collective"
            return (f"ended its script {after}", f"ended their scripts {after}")
        if self.look.stands and self.last:
            where = f"in {collective(self.last)}: {at}"
            return (f"waits {where}", f"wait {where}")
        if self.ahead and (oldest := self.ahead.oldest):
            line = f" ({lines.place(lines.Line(*oldest['line']))})" if oldest["line"] else ""
            last = f"began {self.ahead.begun} on the GPU, {self.ahead.complete} of them complete, the next"
            last += f" {collective(oldest)}{line}"
        return (f"{last}, and is in {at}", f"{last}, and are in {at}")

    def recently(self, channel: Channel) -> dict[int, str]:
        """Number -> what the rank passed: its last few calls, and the oldest that its GPU has not
        completed.
        """
        recent = dict(self.begun.get(channel, ()))
        oldest = self.ahead.oldest if self.ahead else None
        if oldest and Channel(*oldest["channel"]) == channel:
            recent[oldest["nth"]] = oldest["brought"]
        return recent

    def reading(self) -> Reading:
        """The state, in the form in which states of ranks are compared."""
        moves = self.gone, self.look.moves, self.ahead and self.ahead.complete
        return Reading(moves, math.inf if self.gone else self.beat, self.look)


def collective(last: dict) -> str:
    """'all_reduce number 6 of dp, float32[3]'"""
    to = {"send": " to", "recv": " from"}.get(last["op"])
    peer = f"{to} rank {last['needs'][0]}" if to and len(last["needs"]) == 1 else ""
    of = f", {last['dtype']}{last['shape']}" if last["shape"] is not None else ""
    return f"{last['op']} number {last['nth']}{peer} of {last['axis']}{of}"


def in_box(last: dict) -> Words:
    """What a rank has done of which the box alone is known: where it is by now is not."""
    at = f", in {lines.show(lines.Line(*last['line']))}" if last["line"] else ""
    return (f"began {collective(last)} last{at}",) * 2


def places(does: Mapping[int, Words]) -> list[str]:
    """A line for each group of ranks that do the same."""
    groups: dict[Words, list[int]] = {}
    for rank, words in sorted(does.items()):
        groups.setdefault(words, []).append(rank)
    return [f"    {ranks(who)} {words[len(who) > 1]}" for words, who in groups.items()]


def absent(last: dict | None, states: Mapping[int, State]) -> list[int]:
    """The ranks that have ended their scripts and never began their side of a rank's last collective."""
    if last is None:
        return []
    sides = sides_of(Channel(*last["channel"]))
    count = lambda rank: states[rank].look.begun.get(sides[rank], Begun()).count
    ended = [rank for rank, state in states.items() if state.gone and rank in sides]
    return [rank for rank in ended if count(rank) < last["nth"]]


def hopeless(states: Mapping[int, State]) -> list[str]:
    """Descriptions of collectives on a GPU that a rank never called, although its script has ended."""
    missing: dict[str, list[int]] = {}
    for state in states.values():
        if state.ahead and state.ahead.oldest and (ended := absent(state.ahead.oldest, states)):
            missing[collective(state.ahead.oldest)] = ended
    return [f"{ranks(who)} never came to {what}." for what, who in missing.items()]


def may_be_freed(states: Mapping[int, State]) -> bool:
    """Whether the end of a process whose script is over can make gloo raise in a rank that waits, because a
    connection between the two closes then.
    """
    gone = {rank for rank, state in states.items() if state.gone}
    waits = (state.look.stands for state in states.values() if state.look.stands and not state.gone)
    operations = [operation for waiting in waits for operation in waiting.operations if operation.marked]
    ends = lambda channel: channel.members if channel.kind == "recv_any" else sides_of(channel)
    return any(not gone.isdisjoint(ends(operation.channel)) for operation in operations)


def unlike(states: Mapping[int, State]) -> Iterable[str]:
    """Descriptions of collectives of a group to which ranks passed different kinds or sizes. Compared are the
    last few that each rank has begun, and the oldest that its GPU has not completed.
    """
    for channel in dict.fromkeys(channel for state in states.values() for channel in state.begun):
        sides = sides_of(channel).items()
        its = {rank: states[rank].recently(side) for rank, side in sides if rank in states}
        for number in sorted({number for recent in its.values() for number in recent}):
            brought = {rank: recent[number] for rank, recent in its.items() if number in recent}
            if len(set(brought.values())) > 1:
                each = "; ".join(f"rank {rank}: {what}" for rank, what in brought.items())
                yield f"collective number {number} of {ranks([*channel.members])} is not alike: {each}"
                break
