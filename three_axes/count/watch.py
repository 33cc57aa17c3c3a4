"""`count --watch`: the proof of a hang in somebody's own job, through the store where its ranks met.

On each rank a thread tells the store where it stands, twice a second, while it stands still. The thread of
rank 0 reads what all have told. A proof counts when every rank has told the same once more: then all of it
held at one moment between.
"""

from __future__ import annotations

import pickle
import sys
import threading
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
    """What a rank has told of itself. beat: how often. ended: its script is over. line: where it was."""

    beat: int
    ended: bool
    look: Look
    line: lines.Line | None


class Watch:
    """Watches this rank, and on rank 0 the others, until `end`. found: what is done with a proof, and the
    lines of the ranks.
    """

    def __init__(self, counter: Counter, found: Callable[[Deadlock, dict[int, lines.Line]], None]):
        self._counter, self._found, self._script = counter, found, threading.main_thread().ident
        self._told, self._first = None, {}
        self._over = threading.Event()
        threading.Thread(target=self._quietly, name=OWN_THREAD, daemon=True).start()

    def end(self) -> None:
        """The script is over on this rank: what others wait for from it will never come."""
        self._over.set()
        if self._counter.store is not None:
            self._tell(self._counter.store, ended=True)

    def _quietly(self) -> None:
        with suppress(RuntimeError):  # the store went with the process that had it
            self._run()

    def _run(self) -> None:
        store, proven = None, False
        while not (self._over.wait(EVERY) and self._counter.rank) and not proven:
            if store is None and self._counter.store is not None:
                store = self._counter.store.clone()  # the script may wait for the other one
            if store is not None:
                if not self._over.is_set():
                    self._tell(store)
                proven = self._counter.rank == 0 and self._prove(store)

    def _tell(self, store, ended: bool = False) -> None:
        look, before = self._counter.moves.look(), self._told
        if look is None or look.stands is None and not ended:
            return
        frame = sys._current_frames().get(self._script)
        same = before is not None and before.look.moves == look.moves
        line = before.line if same else lines.innermost(frame)
        self._told = Told(before.beat + 1 if before else 1, ended, look, line)
        store.set(f"look/{self._counter.rank}", pickle.dumps(self._told))

    def _prove(self, store) -> bool:
        keys = [f"look/{rank}" for rank in range(self._counter.size)]
        if not store.check(keys):
            return False
        told: list[Told] = [DataUnpickler(value, is_of_reports).load() for value in store.multi_get(keys)]
        ended = {rank for rank, one in enumerate(told) if one.ended}
        deadlock = prove([one.look for one in told], ended)
        if deadlock is None:
            return False
        first = self._first = {r: self._first.get(r, one) for r, one in enumerate(told)}
        if any(one.look.moves != first[r].look.moves for r, one in enumerate(told)):
            self._first = dict(enumerate(told))
            return False
        if any(one.beat <= first[r].beat and r not in ended for r, one in enumerate(told)):
            return False
        places = {r: one.line for r, one in enumerate(told) if one.line and r not in ended}
        deadlock.lines = {r: line.number for r, line in places.items()}
        self._found(deadlock, places)
        return True
