"""`Report`: what one rank did during one call of a World, or during a script: collectives, bytes, spans."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .clock import Span
from .moves import Begun, Channel

SUMMED = ("calls", "payload", "algorithmic", "waited")  # fields that `plus` adds; and `wire`, if it is known


@dataclass
class CollectiveCount:
    """A row: all calls of one kind of collective on one axis, as one rank counted them."""

    op: str  # 'all_reduce', 'send', … (`operators.OPERATORS`)
    axis: str
    calls: int = 0
    payload: float = 0  # bytes of the whole tensors
    algorithmic: float = 0  # bytes that this rank must send for them by the formula
    wire: float | None = 0  # bytes that it sent by the operating system's count; None: not known
    waited: float = 0.0  # seconds for which this rank was blocked in it
    members: tuple[int, ...] = ()  # ranks of the group of the last call
    types: set[str] = field(default_factory=set)  # of the tensors: 'float32'

    def plus(self, other: CollectiveCount, sign: int = 1) -> CollectiveCount:
        """The sum of both counts; with a sign of -1, their difference."""
        sums = {name: getattr(self, name) + sign * getattr(other, name) for name in SUMMED}
        mine, its = self.wire, other.wire
        sums["wire"] = None if mine is None or its is None else mine + sign * its
        members, types = self.members or other.members, self.types | other.types
        return replace(self, **sums, members=members, types=types)

    def part(self, n: int) -> CollectiveCount:
        """The count, divided by n."""
        parts = {name: getattr(self, name) / n for name in SUMMED}
        return replace(self, **parts, wire=None if self.wire is None else self.wire / n)


def alike(rows: list[CollectiveCount], others: list[CollectiveCount]) -> bool:
    """Whether both lists have the same calls with the same bytes."""
    one, other = ({(r.op, r.axis): (r.calls, r.payload) for r in part} for part in (rows, others))
    return one == other


@dataclass(kw_only=True)
class Report:
    """What one rank did during one call of a World, or during a script."""

    rows: list[CollectiveCount] = field(default_factory=list)
    wire: dict[tuple, int] | None = None  # (local end, remote end) -> bytes sent; None: not known
    peak_in_flight: int = 0  # largest number of bytes of tensors that collectives held at one time
    not_waited: int = 0  # how many collectives were begun for which no Python code waited
    under_way: int = 0  # how many collectives had not ended when counting ended
    begun: dict[Channel, Begun] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)  # computations and waits
    streams: list[Span] = field(default_factory=list)  # collectives, each until its end was noticed
    # (when, bytes of activations held from then on; under `count`, bytes of memory)
    levels: list[tuple[float, int]] = field(default_factory=list)
    late: int = 0  # operations that took longer on this machine than on the emulated network
