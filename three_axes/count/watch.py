"""`count --watch`: prints where each rank is when none has moved for 5 s, and whether a hang is proven.

On each rank a thread writes the rank's state to the store with which the ranks formed their group. The lowest
rank that is alive reads the states of all, and `standstill` compares them. A state that was written twice
since the last reading was made after it. If nothing is proven, the positions of all ranks are printed once.

gloo may end a process in the middle of a collective, and other ranks then raise. So each recorder also writes
to its box (`meter`), a file in the folder that torchrun made for the rank, which outlives the process.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from .. import lines
from ..foreign import DataUnpickler
from ..table import ranks
from .counter import Counter, is_of_reports
from .meter import Queue
from .moves import Look
from .standstill import Reading, Standstill
from .states import SILENT, State, absent, hopeless, in_box, may_be_freed, places, unlike
from .threads import OwnThread

EVERY = 0.15  # seconds
MANY = 300  # ranks for each second of longer waiting, because one rank reads the states of all
SELDOM = 1.0  # seconds between the messages of a rank that is in no collective
RECENT = 8  # operations of each channel that a rank on NCCL writes, to be compared
AGAIN = 60.0  # the same if these positions were printed before: in a slow step that is no news
ON_NCCL = """\
watching ranks on NCCL, where the host does not wait for its GPU. Known are the collectives that each rank has
begun, those that its GPU has completed, and the line of its main thread. A hang is proven only if a rank has
ended its script; at NCCL's own timeout, 10 minutes, its flight recorder (torchfrtrace) has more."""
BOX = "last-collective"


class Watch:
    """Watches this rank until `leave`, and the others if it is the lowest that is alive. say: prints a block.
    proven: called when it is printed that no rank can ever continue.
    """

    def __init__(self, counter: Counter, say: Callable[[str], None], proven: Callable[[], None]):
        self._counter, self._say, self._proven = counter, say, proven
        self._queue = counter.queue = Queue()
        self._main = threading.main_thread().ident or 0
        self._mine, self._written_at, self._seen = State(0, Look(0)), 0.0, -1
        self._lowest = 0  # no lower rank is alive
        self._standstill, self._is_noted = Standstill(), False
        self._heard: dict[
            int, tuple[Reading, float]
        ] = {}  # each rank's last state, and when it was first read
        self._noted: dict[tuple, float] = {}  # the ranks' positions in printed notes, and when
        self._unlike: set[str] = set()  # what was printed about collectives that do not match
        self._store: dist.Store | None = None
        self._over = threading.Event()
        self._thread = OwnThread(self._run)
        self._thread.start()

    def leave(self) -> None:
        """The script and the functions registered for its end are over: this rank begins nothing more."""
        self.stop()
        with suppress(OSError):
            if folder := _folder():
                os.remove(folder / BOX)
        if self._store is not None:
            with suppress(RuntimeError):  # the store ended with the process that held it
                begun = dict(self._counter.moves.begun)
                look = self._counter.moves.look(ended=True) or Look(0, ended=True, begun=begun)
                self._put(State(0, look._replace(why=""), last=self._counter.last))
                self._store.set(f"gone/{self._counter.rank}", "")

    def stop(self) -> None:
        """Stop watching. (If the thread used the store while Python ends, it would end the process with an
        error.) Does not wait for a store whose process is stopped.
        """
        self._over.set()
        self._thread.join(10)
        self._counter.meet()
        self._store = self._store or self._counter.store  # a short script may end before the first poll

    def explain(self, error: BaseException) -> bool:
        """Print where all ranks were when this rank raised, if a collective has failed or a rank had ended.
        Returns whether this rank waited for a rank that had ended.
        """
        self.stop()
        if (store := self._store) is None or not isinstance(error, RuntimeError):
            return False
        with suppress(RuntimeError):
            states = {r: one for r, one in enumerate(self._read(store)) if one}
            gone = {r: one for r, one in states.items() if one.gone}
            missing, does = absent(self._counter.last, gone), {r: one.does() for r, one in states.items()}
            for note in _boxes():
                rank, its = note["rank"], states.get(note["rank"], State(0, Look(0)))
                is_its_last = its.last is not None and its.last["number"] == note["number"]
                # Of a rank that waited, or that raised, the box says more: what it has begun.
                is_elsewhere = is_its_last and its.line and not its.look.stands
                if not its.gone and (rank == self._counter.rank or not is_elsewhere):
                    does[rank] = in_box(note)
            if self._counter.has_failed or gone:
                has = "it has" if len(missing) == 1 else "they have"
                never = [f"{ranks(missing)} never came, for {has} ended."] if missing else []
                unknown = sorted(set(range(self._counter.size)) - does.keys())
                silent = [f"    of {ranks(unknown)} nothing is known"] if unknown else []
                head = f"rank {self._counter.rank} raised {type(error).__name__}. The ranks, as known last"
                self._say_once(head, [*places(does), *silent, *never])
            return bool(missing)
        return False

    def _run(self) -> None:
        with suppress(RuntimeError):
            while not self._over.wait(max(EVERY, self._counter.size / MANY)):
                self._counter.meet()  # a rank that calls no collective at all is waited for too
                if self._store is None and self._counter.store is not None:
                    # The script may wait for the other one.
                    self._store = self._counter.store.clone()  # type: ignore[attr-defined]
                    if "nccl" in self._counter.backend and self._counter.rank == 0:
                        self._say(ON_NCCL)
                if self._store is not None:
                    self._tell()
                    if self._is_lowest(self._store) and self._judge(self._read(self._store)):
                        break

    def _is_lowest(self, store) -> bool:
        while self._lowest < self._counter.rank and store.check([f"gone/{self._lowest}"]):
            self._lowest += 1
        return self._lowest == self._counter.rank

    def _tell(self) -> None:
        mine, before = self._mine, self._seen
        look, now = self._counter.moves.look(), time.monotonic()
        self._seen = look.moves if look else -1
        if look is None:
            return
        has_moved = look.moves != mine.look.moves
        is_first_or_last = has_moved and (mine.beat or before == look.moves)  # of its movements
        if not look.stands and not is_first_or_last and now - self._written_at < SELDOM:
            return
        if has_moved or not look.stands:
            at = lines.innermost(lines.of_threads(sys._current_frames).get(self._main))
            last = (self._counter.pending() if look.stands else None) or self._counter.last
            mine = State(mine.beat, look, at, last)
        self._written_at = now
        if (ahead := self._queue.now()).begun:
            begun = dict(self._counter.moves.begun)
            recent = {channel: [*its.last.copy()][-RECENT:] for channel, its in begun.items()}
            mine = mine._replace(ahead=ahead, begun=recent)
        self._put(mine._replace(beat=0 if has_moved else mine.beat + 1, look=look))

    def _put(self, state: State) -> None:
        self._mine = state
        assert self._store is not None
        self._store.set(f"look/{self._counter.rank}", pickle.dumps(state))  # type: ignore[arg-type]

    def _read(self, store) -> list[State | None]:
        """The last state that each rank has written; None for a rank that has written none."""
        keys = [f"look/{rank}" for rank in range(self._counter.size)]
        there = keys if store.check(keys) else [key for key in keys if store.check([key])]
        values = dict(zip(there, store.multi_get(there))) if there else {}
        return [DataUnpickler(values[key], is_of_reports).load() if key in values else None for key in keys]

    def _judge(self, states: Sequence[State | None]) -> bool:
        """Print what is proven, or else, once, where all ranks are. Returns whether something was proven."""
        now, known = time.monotonic(), {r: one for r, one in enumerate(states) if one}
        for new in set(unlike(known)) - self._unlike:
            self._unlike.add(new)
            self._say("\n".join([f"\nin this job {new}. The ranks:", *_table(known)]))
        readings = {r: one.reading() for r, one in known.items()}
        for r, reading in readings.items():
            if r not in self._heard or self._heard[r][0] != reading:
                self._heard[r] = reading, now
        late = lambda r: not known[r].gone and now - self._heard[r][1] > 2 * SELDOM
        silent = [r for r in range(len(states)) if r not in known or late(r)]
        heard = [None if r in silent else readings[r] for r in range(len(states))]
        deadlock = self._standstill.judge(heard)
        if deadlock and not may_be_freed(known):
            deadlock.lines = {r: one.line.number for r, one in known.items() if one.line and not one.gone}
            return self._end("no rank can ever go on", [*_table(known), str(deadlock)])
        if self._standstill.seconds < lines.STILL:
            self._is_noted = False
        elif not self._is_noted:
            if gone := hopeless(known):
                return self._end("a collective can never be completed", [*_table(known), *gone])
            where = tuple((one.gone, bool(one.look.stands), one.line) for one in known.values())
            if self._standstill.seconds > AGAIN or now - self._noted.get(where, -AGAIN) > AGAIN:
                self._is_noted, self._noted[where] = True, now
                wait = not silent and all(one.gone or one.look.stands for one in known.values())
                why = [f"rank {r} {one.look.why}" for r, one in known.items() if one.look.why and wait]
                more = [f"That is no proof of a hang: {'; '.join(why[:3])}."] if why else []
                head = f"\nin this job {self._standstill}:"
                self._say("\n".join([head, *_table(known, silent), *more]))
        return False

    def _end(self, head: str, more: Iterable[str]) -> bool:
        self._say_once(head, more)
        self._proven()
        return True

    def _say_once(self, head: str, more: Iterable[str]) -> None:
        """Print a job's last block, unless another rank has. It then comes before the tracebacks of
        all ranks.
        """
        assert (store := self._store) is not None
        if store.add("said", 1) == 1:
            self._say("\n".join([f"\nin this job {head}:", *more]))
            store.set("is said", "")
        store.wait(["is said"], timedelta(seconds=1))


def _table(known: dict[int, State], silent: Sequence[int] = ()) -> list[str]:
    return places({r: one.does() for r, one in known.items()} | dict.fromkeys(silent, SILENT))


def box() -> int | None:
    """A descriptor of this rank's new box, which its recorder writes; None without torchrun."""
    with suppress(OSError):
        return os.open(folder / BOX, os.O_RDWR | os.O_CREAT, 0o600) if (folder := _folder()) else None
    return None


def _folder() -> Path | None:
    """The folder of this rank in this start of the job, if torchrun made one. The folders of the host's other
    ranks are beside it.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parent if file else None


def _boxes() -> list[dict]:
    """The last operation that each rank of this host has begun."""
    notes, folder = [], _folder()
    for file in folder.parent.glob(f"*/{BOX}") if folder else ():
        with suppress(OSError, ValueError):  # it has begun nothing, or the text did not fit into the box
            notes.append(json.loads(file.read_bytes().rstrip(b"\0")))
    return notes
