"""Whether the ranks stand still. Compares successive states of all ranks, however these were collected."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .deadlock import Deadlock, prove
from .moves import Look


class Reading(NamedTuple):
    """The state of one rank. moves: changes with every movement. turn: a state whose turn is higher by 2 was
    made after the earlier one had been read.
    """

    moves: Hashable
    turn: float
    look: Look


class Standstill:
    """course: as for `prove`. suspected: what the last states prove, if all of them held at one moment."""

    def __init__(self, course: bool = False):
        self._course = course
        self._first: dict[int, Reading] = {}  # rank -> the first state that was read since a rank had moved
        self._since, self._is_whole = time.monotonic(), True
        self.suspected: Deadlock | None = None

    @property
    def seconds(self) -> float:
        """Seconds since a rank was last seen to have moved; 0 if nothing is known of any rank."""
        return time.monotonic() - self._since if self._first else 0.0

    def judge(self, seen: Sequence[Reading | None]) -> Deadlock | None:
        """The proof that no rank can ever continue; None if there is none. seen[r]: the state of rank r; None
        if it does not answer, and then it has not moved as far as is known.
        """
        known = {rank: one for rank, one in enumerate(seen) if one}
        self._is_whole, first = len(known) == len(seen), self._first
        if any(rank not in first or first[rank].moves != one.moves for rank, one in known.items()):
            self._first, self._since = first | known, time.monotonic()
        self.suspected = prove([one and one.look for one in seen], self._course)
        # If every rank has been read again, all states held when the first ones had been read.
        is_again = all(one.turn >= self._first[rank].turn + 2 for rank, one in known.items())
        return self.suspected if is_again else None

    def __str__(self) -> str:
        """What was measured since the last movement."""
        said = f"no counted operation has begun and no counted wait has ended for {int(self.seconds)} s"
        return said if self._is_whole else f"{said}, as far as ranks answer"
