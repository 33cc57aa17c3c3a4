"""A call whose ranks wait for each other for ever is over now, and not when its time is."""

from __future__ import annotations

import time
from collections.abc import Callable

from three_axes.count import Deadlock, Look, prove

from .failure import standing
from .processes import Processes

FIRST, EVERY = 0.1, 0.2  # seconds from the call's begin to the first look at its ranks, and from look to look
ANSWER = 0.5  # for all to answer; who does not is busy, or stopped
STILL = 5.0  # seconds without a movement of any rank, after which it is said where each is


class Standstill:
    """Looks at a call's ranks from time to time. found: why none of them can ever go on, where that is
    proven. nobody_waits: whether they only stand in what their code, which has ended, began. note: is called
    with the places of all ranks, in words, when nothing has moved for some seconds; with '' when it has.
    """

    def __init__(self, ranks: Processes, number: int, note: Callable[[str], None] = lambda places: None):
        self._ranks, self._number, self._next = ranks, number, time.monotonic() + FIRST
        self.found: Deadlock | None = None
        self.nobody_waits = False
        self._moves: list[int | None] = []  # of each rank at the last look, None of one that did not answer
        self._since, self._is_noted = time.monotonic(), False  # since when they are the same
        self._note = note

    def is_proven(self, done: dict[int, tuple], captured) -> bool:
        """Look again, if it is time. done: the answers of ranks that have ended the call; more may come."""
        if time.monotonic() < self._next:
            return False
        seen, returned = self._look(done, captured)
        self._compare(seen)
        found = prove(seen, course=True)
        # Ranks whose code has ended stop nobody: what they began and wait for nowhere is left to the last.
        nobody_waits = found is not None and len(returned | done.keys()) == len(seen)
        # Where all are still at a second look, all of it held at one moment between.
        if found and self._are_still(seen, self._look(done, captured)[0]):
            self.found, self.nobody_waits = found, nobody_waits
        if not self.found and not self._is_noted and time.monotonic() - self._since > STILL:
            self._is_noted = True
            self._note(standing(self._ranks.look(self._number, done, captured)))
        self._next = time.monotonic() + EVERY
        return self.found is not None

    def _compare(self, seen: list[Look | None]) -> None:
        """Who does not answer is busy in one long operation, and has moved nothing."""
        now = [look.moves if look else None for look in seen]
        both = [pair for pair in zip(now, self._moves) if None not in pair]
        if len(now) != len(self._moves) or any(a != b for a, b in both):
            self._since, self._is_noted = time.monotonic(), False
            self._note("")
        self._moves = now

    @staticmethod
    def _are_still(seen: list[Look | None], again: list[Look | None]) -> bool:
        return all(look is not None and look.is_still_in(later) for look, later in zip(seen, again))

    def _look(self, done: dict[int, tuple], captured) -> tuple[list[Look | None], set[int]]:
        """Each rank as it is now; and those whose code of the reader's has ended."""
        question = next(self._ranks.calls)
        everybody = range(len(self._ranks.processes))
        self._ranks.tell("moves", question, self._number)
        late = (self._number, done)
        answers = self._ranks.collect("moves", question, everybody, ANSWER, captured, late=late)
        looks = [answers[r][0] if r in answers else None for r in everybody]
        return looks, {r for r, (_, returned) in answers.items() if returned}
