"""Finds out whether no rank moves, and whether none ever can again, from successive states of all ranks."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .deadlock import Deadlock, prove
from .moves import Snapshot


class Reading(NamedTuple):
    """The state of one rank, as one poll has found it."""

    moves: Hashable  # has another value whenever the rank has begun or ended something
    turn: float  # if a later state's turn is higher by 2, that state was made after this one was read
    snapshot: Snapshot


class Standstill:
    """Compares the states of all ranks that `judge` gets, poll after poll. suspected: what the last states
    prove if all of them held at the same moment. course: whether a World runs the ranks, see `prove`.
    """

    def __init__(self, course: bool = False):
        self._course = course
        self._first: dict[int, Reading] = {}  # rank -> the first state that was read since a rank had moved
        self._since, self._is_whole = time.monotonic(), True
        self.suspected: Deadlock | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the last poll that found a movement; 0 if no rank has answered yet."""
        return time.monotonic() - self._since if self._first else 0.0

    def judge(self, states: Sequence[Reading | None]) -> Deadlock | None:
        """The proof that no rank can ever continue; None if there is none. states[r]: the state of rank r;
        None if it does not answer. Then it counts as not moved.
        """
        known = {rank: one for rank, one in enumerate(states) if one}
        self._is_whole, first = len(known) == len(states), self._first
        if any(rank not in first or first[rank].moves != one.moves for rank, one in known.items()):
            self._first, self._since = first | known, time.monotonic()
        self.suspected = prove([one and one.snapshot for one in states], self._course)
        # If every rank was read again without a movement, all states held at the end of the first reading.
        is_again = all(one.turn >= self._first[rank].turn + 2 for rank, one in known.items())
        return self.suspected if is_again else None

    def __str__(self) -> str:
        """A sentence on the seconds since the last movement."""
        still = f"no counted operation has begun and no counted wait has ended for {int(self.seconds)} s"
        return still if self._is_whole else f"{still}, as far as ranks answer"
