"""Polls the ranks during a call, so that a call in which nobody moves ends soon, and not at its timeout."""

from __future__ import annotations

import time
from collections.abc import Callable

from three_axes import lines
from three_axes.count import Deadlock, Stillness

from .failure import standing
from .processes import Processes

FIRST, EVERY = 0.1, 0.2  # seconds before the first poll of a call's ranks, and between polls
QUIET = 2.0  # seconds in which polls find every rank waiting, and no movement, after which a call is ended
ANSWER = 0.5  # seconds for all ranks to answer; a rank that does not is busy or stopped
AGAIN = 1.0  # seconds between two calls of `note`: a rank that computes may be at another line by then


class Polls:
    """Polls a call's ranks from time to time. number: the call's number.

    found: who waits for whom, once no rank has moved for `quiet` seconds. nobody_waits: whether the user's
    code has returned on all ranks, and they are blocked only in operations that this code started and never
    waited for. note is called with the positions of all ranks as text when none has moved for some seconds,
    with '' when a rank has moved.
    """

    def __init__(
        self,
        ranks: Processes,
        number: int,
        note: Callable[[str], None] = lambda places: None,
        quiet: float = QUIET,
    ):
        self._ranks, self._number, self._next = ranks, number, time.monotonic() + FIRST
        self._enough = round(quiet / EVERY)  # polls in a row, after the first that finds a reading
        self.found: Deadlock | None = None
        self.nobody_waits = False
        self._stillness, self._polls = Stillness(course=True), 0
        self._note, self._due = note, lines.STILL  # `note` is called after `_due` seconds without a move

    def end(self, done: dict[int, tuple], captured) -> bool:
        """Poll the ranks if it is time. Returns whether the call is to be ended. done, captured: answers of
        ranks that have ended the call, and what the ranks have printed; both may get more.
        """
        if time.monotonic() < self._next:
            return False
        self._poll(done, captured)
        seconds = self._stillness.seconds
        if self._due > lines.STILL > seconds:
            self._due = lines.STILL
            self._note("")
        if not self.found and seconds > self._due:
            self._due = seconds + AGAIN
            self._note(f"{self._stillness}. {standing(self._ranks.look(self._number, done, captured))}")
        self._next = time.monotonic() + EVERY
        return self.found is not None

    def _poll(self, done: dict[int, tuple], captured) -> None:
        question, everybody = next(self._ranks.calls), range(len(self._ranks.processes))
        self._ranks.tell("moves", question, self._number)
        late = (self._number, done)
        answers = self._ranks.collect("moves", question, everybody, ANSWER, captured, late=late)
        states = {r: snapshot for r, (snapshot, _) in answers.items() if snapshot}
        self._stillness.add([states.get(r) for r in everybody])
        # As `Stillness.polls`, but as long as a thread of the reader's may act, no poll counts.
        may_act = any(state.thread for state in states.values())
        self._polls = -1 if may_act else min(self._polls + 1, self._stillness.polls)
        if self._polls < self._enough:
            return
        self.found = self._stillness.reading
        # Ranks whose code has returned block nobody. Operations that they never waited for are ended later.
        returned = done.keys() | {r for r, (_, has_returned) in answers.items() if has_returned}
        self.nobody_waits = len(returned) == len(everybody)
