"""`State`: what each rank of a job under `count --watch` writes for the others; sentences on all states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .. import lines
from ..table import ranks
from .moves import Begun, Channel, GpuProgress, Snapshot, sides_of

Words = tuple[str, str]  # a description of what a rank does, for one rank and for several: (waits, wait)
SILENT: Words = "does not answer", "do not answer"


class State(NamedTuple):
    """The state that a rank has written."""

    beat: int  # how often it has written this state again since its last move
    snapshot: Snapshot
    line: lines.Line | None = None  # the script's line in which its main thread is
    # The collective that it waits in, or else the one that it began last, in the form of `Recorder.last`.
    last: dict | None = None
    gpu: GpuProgress | None = None  # on NCCL
    begun: dict[Channel, list[tuple[int, str]]] = {}  # on NCCL: (number, signature) of its last operations
    raised: str = ""  # the exception that has ended its script: 'KeyError: 3, in train.py, line 7:  x = y[3]'

    @property
    def has_ended(self) -> bool:
        """Whether its script is over, with all functions registered for its end."""
        return self.snapshot.ended

    def does(self) -> Words:
        """A description of what the rank does."""
        at = lines.show(self.line) if self.line else "code that is not the script's"
        last = f"began {collective(self.last)} last" if self.last else "began no collective"
        if self.raised:
            return (f"raised {self.raised}",) * 2
        if self.has_ended:
            after = f"after {collective(self.last)}" if self.last else "before any collective"
            return (f"ended its script {after}", f"ended their scripts {after}")
        if self.snapshot.waiting and self.last:
            where = f"in {collective(self.last)}: {at}"
            return (f"waits {where}", f"wait {where}")
        if self.gpu and (oldest := self.gpu.oldest):
            line = f" ({lines.place(lines.Line(*oldest['line']))})" if oldest["line"] else ""
            last = f"began {self.gpu.begun} on the GPU, {self.gpu.complete} of them complete, the next"
            last += f" {collective(oldest)}{line}"
        return (f"{last}, and is in {at}", f"{last}, and are in {at}")

    def recently(self, channel: Channel) -> dict[int, str]:
        """Number -> signature, of the rank's last few operations and of the oldest one open on its GPU."""
        recent = dict(self.begun.get(channel, ()))
        oldest = self.gpu.oldest if self.gpu else None
        if oldest and Channel(*oldest["channel"]) == channel:
            recent[oldest["nth"]] = oldest["signature"]
        return recent


def collective(last: dict) -> str:
    """A collective in words: 'all_reduce number 6 of dp, float32[3]'. last: as `Recorder.last`."""
    to = {"send": " to", "recv": " from"}.get(last["op"])
    peer = f"{to} rank {last['needs'][0]}" if to and len(last["needs"]) == 1 else ""
    of = f", {last['dtype']}{last['shape']}" if last["shape"] is not None else ""
    return f"{last['op']} number {last['nth']}{peer} of {last['axis']}{of}"


def from_box(last: dict) -> Words:
    """A description of a rank of which only the box is known: what it began last, but not where it is now."""
    at = f", in {lines.show(lines.Line(*last['line']))}" if last["line"] else ""
    return (f"began {collective(last)} last{at}",) * 2


def places(does: Mapping[int, Words]) -> list[str]:
    """A line of text for each group of ranks that do the same, those that raised an exception first. does:
    rank -> `State.does()`.
    """
    groups: dict[Words, list[int]] = {}
    for rank, words in sorted(does.items(), key=lambda one: (not one[1][0].startswith("raised"), one[0])):
        groups.setdefault(words, []).append(rank)
    return [f"    {ranks(group)} {words[len(group) > 1]}" for words, group in groups.items()]


def absent(last: dict | None, states: Mapping[int, State]) -> list[int]:
    """The ranks that have ended their scripts without beginning the collective `last` of another rank."""
    if last is None:
        return []
    sides = sides_of(Channel(*last["channel"]))
    count = lambda rank: states[rank].snapshot.begun.get(sides[rank], Begun()).count
    ended = [rank for rank, state in states.items() if state.has_ended and rank in sides]
    return [rank for rank in ended if count(rank) < last["nth"]]


def never_completed(states: Mapping[int, State]) -> list[str]:
    """Sentences on collectives that no GPU can complete, because a rank has ended its script without them."""
    missing: dict[str, list[int]] = {}
    for state in states.values():
        if state.gpu and state.gpu.oldest and (ended := absent(state.gpu.oldest, states)):
            missing[collective(state.gpu.oldest)] = ended
    return [f"{ranks(ended)} did not come to {what}." for what, ended in missing.items()]


def mismatched(states: Mapping[int, State]) -> Iterable[str]:
    """Sentences on operations whose signatures differ between ranks. Compared are the last few that each rank
    has begun, and the oldest that its GPU has not completed.
    """
    for channel in dict.fromkeys(channel for state in states.values() for channel in state.begun):
        sides = sides_of(channel).items()
        its = {rank: states[rank].recently(side) for rank, side in sides if rank in states}
        for number in sorted({number for recent in its.values() for number in recent}):
            signatures = {rank: recent[number] for rank, recent in its.items() if number in recent}
            if len(set(signatures.values())) > 1:
                each = "; ".join(f"rank {rank}: {signature}" for rank, signature in signatures.items())
                yield f"collective number {number} of {ranks([*channel.members])} is not alike: {each}"
                break
