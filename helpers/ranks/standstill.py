"""A call whose ranks wait for each other for ever is over now, and not when its time is."""

from __future__ import annotations

import time

from three_axes.count import Deadlock, Look, prove

from .processes import Processes

FIRST, EVERY = 0.1, 0.2  # seconds from the call's begin to the first look at its ranks, and from look to look
ANSWER = 0.5  # for all to answer; who does not is busy, or stopped
# Proofs that must tell of the same ranks, where others may go on: of these, some may be about to stand too.
SETTLED = 3


class Standstill:
    """Looks at a call's ranks from time to time. found: why some of them can never go on, where that is
    proven. nobody_waits: whether they only stand in what their code, which has ended, began.
    """

    def __init__(self, ranks: Processes, number: int):
        self._ranks, self._number, self._next = ranks, number, time.monotonic() + FIRST
        self.found: Deadlock | None = None
        self.nobody_waits = False
        self._told: list[list[int]] = []  # of each proof so far, the ranks that can never go on

    def is_proven(self, done: dict[int, tuple], captured) -> bool:
        """Look again, if it is time. done: the answers of ranks that have ended the call; more may come."""
        if time.monotonic() < self._next:
            return False
        seen, returned = self._look(done, captured)
        found = prove(seen, [r for r in done if (look := seen[r]) and look.stands == []], course=True)
        # Ranks whose code has ended stop nobody: what they began and wait for nowhere is left to the last.
        nobody_waits = found is not None and returned.issuperset(found.stuck)
        is_early = nobody_waits and len(returned | done.keys()) < len(seen)
        # Where the ranks that it tells of are still at a second look, all of it held at one moment between.
        if found and not is_early and self._is_still(found, seen, self._look(done, captured)[0]):
            self._told.append(found.stuck)
            if found.tells_of_all(len(seen)) or self._told[-SETTLED:] == [found.stuck] * SETTLED:
                self.found, self.nobody_waits = found, nobody_waits
        self._next = time.monotonic() + EVERY
        return self.found is not None

    @staticmethod
    def _is_still(found: Deadlock, seen: list[Look | None], again: list[Look | None]) -> bool:
        ranks = {*found.stuck, *(wait.other for wait in found.every)}
        return all((look := seen[r]) is not None and look.is_still_in(again[r]) for r in ranks)

    def _look(self, done: dict[int, tuple], captured) -> tuple[list[Look | None], set[int]]:
        """Each rank as it is now; and those whose code of the reader's has ended."""
        question = next(self._ranks.calls)
        everybody = range(len(self._ranks.processes))
        self._ranks.tell("moves", question, self._number)
        late = (self._number, done)
        answers = self._ranks.collect("moves", question, everybody, ANSWER, captured, late=late)
        looks = [answers[r][0] if r in answers else None for r in everybody]
        return looks, {r for r, (_, returned) in answers.items() if returned}
