"""A call whose ranks wait for each other for ever is over now, and not when its time is."""

from __future__ import annotations

import time

from three_axes.count.deadlock import Deadlock, prove
from three_axes.count.moves import Look

from .processes import Processes

FIRST, EVERY = 0.1, 0.2  # seconds from the call's begin to the first look at its ranks, and from look to look
ANSWER = 0.5  # for all to answer; who does not is busy, or stopped


class Standstill:
    """Looks at a call's ranks from time to time. found: why none of them can go on, where that is proven."""

    def __init__(self, ranks: Processes, number: int):
        self._ranks, self._number, self._next = ranks, number, time.monotonic() + FIRST
        self.found: Deadlock | None = None

    def is_proven(self, done: dict[int, tuple], captured) -> bool:
        """Look again, if it is time. done: the answers of ranks that have ended the call; more may come."""
        if time.monotonic() < self._next:
            return False
        seen, ended = self._look(done, captured), set(done)
        found = prove(seen, [r for r in ended if not done[r][2].has_help])
        # Where those that stood stand still at a second look, all that was seen held at one moment between.
        if found and all(
            look is None or look.stands is None or (again is not None and again.moves == look.moves)
            for look, again in zip(seen, self._look(done, captured))
        ):
            self.found = found
        self._next = time.monotonic() + EVERY
        return self.found is not None

    def _look(self, done: dict[int, tuple], captured) -> list[Look | None]:
        question = next(self._ranks.calls)
        busy = [r for r in range(len(self._ranks.processes)) if r not in done]
        self._ranks.tell("moves", question, self._number, to=busy)
        late = (self._number, done)
        answers = self._ranks.collect("moves", question, busy, ANSWER, captured, late=late)
        looks = {r: look for r, (look,) in answers.items()}
        looks |= {r: Look(0, report.begun, None) for r, (_, _, report, _) in done.items()}
        return [looks.get(r) for r in range(len(self._ranks.processes))]
