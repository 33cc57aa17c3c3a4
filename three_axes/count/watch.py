"""`count --watch`: the proof of a hang in somebody's own job, through the store where its ranks met.

On each rank a thread tells the store where it stands, twice a second, while it stands still. The thread of
rank 0 reads what all have told. A proof counts when every rank has told the same once more: then all of it
held at one moment between.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..foreign import DataUnpickler
from . import lines
from .counter import Counter, is_of_reports
from .deadlock import Deadlock, prove
from .moves import OWN_THREAD, Look

EVERY = 0.5  # seconds


class Told(NamedTuple):
    """What a rank has told of itself. beat: how often the same. ended: its script is over. line: its line."""

    beat: int
    ended: bool
    look: Look
    line: lines.Line | None


class Watch:
    """Watches this rank, and on rank 0 the others, until `end`. found: what is done with a proof, and the
    lines of the ranks.
    """

    def __init__(self, counter: Counter, found: Callable[[Deadlock, dict[int, lines.Line]], None]):
        self._counter, self._found, self._script = counter, found, threading.main_thread().ident or 0
        self._ended = False
        self._mine: Told | None = None
        self._before: list[Told] = []
        threading.Thread(target=self._run, name=OWN_THREAD, daemon=True).start()

    def end(self) -> None:
        """The script is over on this rank: what others wait for from it will never come."""
        self._ended = True
        if self._counter.store is not None:
            self._tell(self._counter.store)

    def _run(self) -> None:
        store, proven = None, False
        with suppress(RuntimeError):  # the store went with the process that had it
            while not proven and not (self._ended and self._counter.rank):
                time.sleep(EVERY)
                if store is None and self._counter.store is not None:
                    # The script may wait for the other one.
                    store = self._counter.store.clone()  # type: ignore[attr-defined]
                if store is not None:
                    self._tell(store)
                    proven = self._counter.rank == 0 and self._prove(store)

    def _tell(self, store) -> None:
        look, mine, ended = self._counter.moves.look(), self._mine, self._ended
        if look is None or look.stands is None and not ended:
            return
        if mine is None or mine.look.moves != look.moves:
            mine = Told(0, ended, look, lines.innermost(sys._current_frames().get(self._script)))
        self._mine = mine._replace(beat=mine.beat + 1, ended=ended)
        store.set(f"look/{self._counter.rank}", pickle.dumps(self._mine))

    def _prove(self, store) -> bool:
        keys = [f"look/{rank}" for rank in range(self._counter.size)]
        if not store.check(keys):
            return False
        told: list[Told] = [DataUnpickler(value, is_of_reports).load() for value in store.multi_get(keys)]
        deadlock = prove([one.look for one in told], {r for r, one in enumerate(told) if one.ended})
        if deadlock is None:
            return False
        if [one.look.moves for one in told] != [one.look.moves for one in self._before]:
            self._before = told
            return False
        if any(one.beat <= before.beat and not one.ended for one, before in zip(told, self._before)):
            return False
        places = {r: one.line for r, one in enumerate(told) if one.line and not one.ended}
        deadlock.lines = {r: line.number for r, line in places.items()}
        self._found(deadlock, places)
        return True
