"""End a call at once when its ranks wait for each other for ever, instead of at its timeout."""

from __future__ import annotations

import time
from collections.abc import Callable

from three_axes import lines
from three_axes.count import Deadlock, Look, prove

from .failure import standing
from .processes import Processes

FIRST, EVERY = 0.1, 0.2  # seconds before the first poll of a call's ranks, and between polls
ANSWER = 0.5  # seconds for all ranks to answer; a rank that does not is busy or stopped


class Standstill:
    """Polls a call's ranks from time to time. found: the proof that no rank can ever continue, once there is
    one. nobody_waits: whether the reader's code has returned on all ranks, and they are blocked only in
    operations that this code started and never waited for. note: is called with the positions of all ranks
    as text when nothing has moved for some seconds, and with '' when a rank has moved again.
    """

    def __init__(self, ranks: Processes, number: int, note: Callable[[str], None] = lambda places: None):
        self._ranks, self._number, self._next = ranks, number, time.monotonic() + FIRST
        self.found: Deadlock | None = None
        self.nobody_waits = False
        self._moves: list[int | None] = []  # of each rank at the last poll; None: it did not answer
        self._since, self._is_noted = time.monotonic(), False  # since when `_moves` is unchanged
        self._note = note

    def is_proven(self, done: dict[int, tuple], captured) -> bool:
        """Poll the ranks if it is time. done: answers of ranks that have ended the call; may get more."""
        if time.monotonic() < self._next:
            return False
        seen, returned = self._look(done, captured)
        self._compare(seen)
        found = prove(seen, course=True)
        # Ranks whose code has returned block nobody. Operations that they never waited for are ended later.
        nobody_waits = found is not None and len(returned | done.keys()) == len(seen)
        # If no rank has moved by a second poll, all that was polled held at one moment between the two.
        if found and self._are_still(seen, self._look(done, captured)[0]):
            self.found, self.nobody_waits = found, nobody_waits
        if not self.found and not self._is_noted and time.monotonic() - self._since > lines.STILL:
            self._is_noted = True
            self._note(standing(self._ranks.look(self._number, done, captured)))
        self._next = time.monotonic() + EVERY
        return self.found is not None

    def _compare(self, seen: list[Look | None]) -> None:
        """Note if a rank has moved. A rank that does not answer is busy in a long operation: no movement."""
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
        """Each rank's state now, and the ranks on which the reader's code has returned."""
        question = next(self._ranks.calls)
        everybody = range(len(self._ranks.processes))
        self._ranks.tell("moves", question, self._number)
        late = (self._number, done)
        answers = self._ranks.collect("moves", question, everybody, ANSWER, captured, late=late)
        looks = [answers[r][0] if r in answers else None for r in everybody]
        return looks, {r for r, (_, returned) in answers.items() if returned}
