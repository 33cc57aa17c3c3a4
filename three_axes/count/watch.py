"""`count --watch`: the proof of a hang in somebody's own job, through the store where its ranks met.

On each rank a thread tells the store where it stands, some times a second, while it stands still. The thread
of rank 0 reads what all have told. A proof counts when every rank that it tells of has told the same twice
more: the second time it has looked after that reading, so all of it held at that moment.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from .. import lines
from ..foreign import DataUnpickler
from .counter import Counter, is_of_reports
from .deadlock import Deadlock, prove
from .moves import Look
from .threads import OwnThread

EVERY = 0.15  # seconds
MANY = 300  # ranks to a second of waiting more, since rank 0 reads what all have told


class Told(NamedTuple):
    """What a rank has told of itself. beat: how often the same. ended: its script is over. gone: so are its
    other threads, and what it has registered for its end: nothing will come from it any more. line: its
    line.
    """

    beat: int
    ended: bool
    gone: bool
    look: Look
    line: lines.Line | None


class Watch:
    """Watches this rank, and on rank 0 the others, until the process ends. found: what is done with a proof,
    the lines of the ranks, and how many these are.
    """

    def __init__(self, counter: Counter, found: Callable[[Deadlock, dict[int, lines.Line], int], None]):
        self._counter, self._found, self._script = counter, found, threading.main_thread().ident or 0
        self._ended, self._has_help, self._owner = False, False, os.getpid()
        self._mine: Told | None = None
        self._before: dict[int, Told] = {}
        self._store, self._over = None, threading.Event()
        self._thread = OwnThread(self._run)
        self._thread.start()
        atexit.register(self._leave)  # before the script's own, so that it comes after them

    def end(self) -> None:
        """The script is over on this rank. Its other threads may go on."""
        self._ended, self._has_help = True, bool(self._counter.moves.help())
        if self._counter.store is not None:
            self._tell(self._counter.store)

    def _leave(self) -> None:
        """The process ends: what others wait for from it will never come. A thread that were in the store
        while Python ends would end the process with an error.
        """
        if os.getpid() != self._owner:
            return
        self._over.set()
        self._thread.join()
        # What a thread did since the script's end was not counted.
        if self._ended and not self._has_help and self._store is not None:
            with suppress(RuntimeError):
                self._tell(self._store, gone=True)

    def _run(self) -> None:
        proven = False
        with suppress(RuntimeError):  # the store went with the process that had it
            while not proven and not self._over.wait(max(EVERY, self._counter.size / MANY)):
                self._counter.meet()  # a rank that calls no collective at all is waited for too
                if self._store is None and self._counter.store is not None:
                    # The script may wait for the other one.
                    self._store = self._counter.store.clone()  # type: ignore[attr-defined]
                if self._store is not None:
                    self._tell(self._store)
                    proven = self._counter.rank == 0 and self._prove(self._store)

    def _tell(self, store, gone: bool = False) -> None:
        ended, mine = self._ended, self._mine
        look = self._counter.moves.look(ended)
        if look is None or (look.stands is None and not ended):
            return
        if mine is None or not mine.look.is_still_in(look):
            frame = lines.of_threads(sys._current_frames).get(self._script)
            mine = Told(0, ended, gone, look, lines.innermost(frame))
        self._mine = mine._replace(beat=mine.beat + 1, ended=ended, gone=gone, look=look)
        store.set(f"look/{self._counter.rank}", pickle.dumps(self._mine))

    def _read(self, store) -> list[Told | None]:
        """What each rank has told last, None of one that never has."""
        keys = [f"look/{rank}" for rank in range(self._counter.size)]
        there = keys if store.check(keys) else [key for key in keys if store.check([key])]
        values = dict(zip(there, store.multi_get(there))) if there else {}
        return [DataUnpickler(values[key], is_of_reports).load() if key in values else None for key in keys]

    def _prove(self, store) -> bool:
        told = self._read(store)
        finished = {r for r, one in enumerate(told) if one and one.gone}
        deadlock = prove([one.look if one else None for one in told], finished)
        if deadlock is None:
            return False
        ranks = {*deadlock.stuck, *(wait.other for wait in deadlock.every)}
        pairs = [(before, one) for r in ranks if (before := self._before.get(r)) and (one := told[r])]
        if len(pairs) < len(ranks) or not all(before.look.is_still_in(one.look) for before, one in pairs):
            self._before = {r: one for r, one in enumerate(told) if one}
            return False
        if not all(one.gone or one.beat >= before.beat + 2 for before, one in pairs):
            return False
        places = {r: one.line for r, one in enumerate(told) if one and one.line and not one.ended}
        deadlock.lines = {r: line.number for r, line in places.items()}
        self._found(deadlock, places, self._counter.size)
        return True
