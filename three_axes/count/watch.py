"""`count --watch`: prints where each rank is when none has moved for 5 s, and who waits for whom.

On each rank a thread writes the rank's state to the store (PyTorch's key-value server) with which the ranks
formed their group. The lowest rank whose script has not ended reads all states, and compares them with those
of its last poll (`deadlock.Stillness`).

gloo may end a process in the middle of a collective, and other ranks then raise. So each rank also writes its
last collective to a file in the folder that torchrun made for it: its box, which outlives the process.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from .. import lines, pytorch_private
from ..foreign import DataUnpickler
from ..table import ranks
from .counter import Counter, is_of_reports
from .deadlock import Stillness
from .meter import Queue
from .moves import OwnThread, Snapshot
from .states import SILENT, State, absent, from_box, mismatched, never_completed, places

EVERY = 0.15  # least seconds between two polls of all states
MANY = 300  # most states that one rank reads in a second: in a large job polls are less frequent
SELDOM = 1.0  # seconds between the states that a rank writes while it is in no collective
RECENT = 8  # operations of each channel whose signatures a rank on NCCL writes, to be compared
AGAIN = 60.0  # seconds after which the same positions of all ranks are printed again
LONG = (
    60.0  # seconds without a movement, while each rank waits for another, after which `--exit` ends the job
)
ON_NCCL = """\
watching ranks on NCCL, where the host does not wait for its GPU. Known are the collectives that each rank has
begun, those that its GPU has completed, and the line of its main thread. --exit ends the job only if a rank
has ended its script; at NCCL's own timeout, 10 minutes, its flight recorder (torchfrtrace) has more."""
BOX = "last-collective"  # file name of the box


class Watch:
    """Writes this rank's state until `leave`, and judges those of all ranks if this is the lowest one left.

    say: prints a text. end: ends the job; is called after a text says why.
    """

    def __init__(self, counter: Counter, say: Callable[[str], None], end: Callable[[], None] | None):
        self._counter, self._say, self._end_job = counter, say, end
        self._queue = counter.queue = Queue()
        self._main = threading.main_thread().ident or 0
        self._mine, self._written_at = State(0, Snapshot(())), 0.0  # the state written last, and when
        self._last_moves: tuple[int, ...] = ()  # `moves` of the last snapshot
        self._lowest = 0  # the scripts of all lower ranks have ended
        self._stillness, self._is_printed = Stillness(), False  # whether this stillness was printed
        # Seconds for which polls have found each rank waiting for another, and no movement; the last poll.
        self._waited, self._polled_at = 0.0, time.monotonic()
        self._last_read: dict[int, tuple[State, float]] = {}  # rank -> its last state, and when it was read
        self._printed: dict[tuple, float] = {}  # the ranks' positions that were printed, and when
        self._mismatched: set[str] = set()  # what was printed about collectives that do not match
        self._store: dist.Store | None = None
        self._over = threading.Event()
        self._thread = OwnThread(self._run)
        self._thread.start()

    def leave(self) -> None:
        """Write that this rank has ended: the script is over, and all functions registered for its end."""
        self.stop()
        with suppress(OSError):
            if folder := _folder():
                os.remove(folder / BOX)
        if self._store is not None:
            with suppress(RuntimeError):  # the store ended with the process that held it
                begun = dict(self._counter.moves.begun)
                snapshot = self._counter.moves.snapshot(ended=True) or Snapshot((), ended=True, begun=begun)
                self._write(State(0, snapshot, last=self._counter.last))
                self._store.set(f"ended/{self._counter.rank}", "")

    def stop(self) -> None:
        """Stop the thread. (If it used the store while Python ends, the process would end with an error.)
        Wait for it, but not for ever: the process that holds the store may be stopped.
        """
        self._over.set()
        self._thread.join(10)
        self._counter.find_store()
        self._store = self._store or self._counter.store  # a short script may end before the first poll

    def explain(self, error: BaseException) -> bool:
        """Let the other ranks know that this one raised `error`. If it lost a connection, or waited for a
        rank that had ended, print where all ranks were. Returns whether it waited for a rank that had ended.
        """
        self.stop()
        if (store := self._store) is None:
            return False
        with suppress(RuntimeError):
            follows = isinstance(error, RuntimeError) and pytorch_private.is_lost(str(error))
            if not follows and not self._counter.has_failed:
                self._write(self._mine._replace(raised=_in_words(error)))
            if not isinstance(error, RuntimeError):
                return False
            states = {r: one for r, one in enumerate(self._read(store)) if one}
            ended = {r: one for r, one in states.items() if one.has_ended}
            missing, does = absent(self._counter.last, ended), {r: one.does() for r, one in states.items()}
            for note in _boxes():
                rank, its = note["rank"], states.get(note["rank"], State(0, Snapshot(())))
                is_its_last = its.last is not None and its.last["number"] == note["number"]
                # The state says more only of another rank that did not wait, and has begun nothing since.
                at = lines.Line(*note["line"]) if note["line"] else None
                is_elsewhere = is_its_last and its.line not in (None, at) and not its.snapshot.waiting
                is_over = its.has_ended or its.raised
                if not is_over and (rank == self._counter.rank or not is_elsewhere):
                    does[rank] = from_box(note)
            if follows or self._counter.has_failed or ended:
                has = "it has" if len(missing) == 1 else "they have"
                never = [f"{ranks(missing)} did not come, for {has} ended."] if missing else []
                unknown = sorted(set(range(self._counter.size)) - does.keys())
                silent = [f"    of {ranks(unknown)} nothing is known"] if unknown else []
                head = f"rank {self._counter.rank} raised {type(error).__name__}. The ranks, as known last"
                self._say_once(head, [*places(does), *silent, *never])
            return bool(missing)
        return False

    def _run(self) -> None:
        with suppress(RuntimeError):
            while not self._over.wait(max(EVERY, self._counter.size / MANY)):
                self._counter.find_store()  # here too, for a rank that calls no collective at all
                if self._store is None and self._counter.store is not None:
                    # A clone has a connection of its own: the script may be waiting on the other one.
                    self._store = self._counter.store.clone()  # type: ignore[attr-defined]
                    if "nccl" in self._counter.backend and self._counter.rank == 0:
                        self._say(ON_NCCL)
                if self._store is not None:
                    self._write_state()
                    if self._is_lowest(self._store) and self._judge(self._read(self._store)):
                        break

    def _is_lowest(self, store) -> bool:
        while self._lowest < self._counter.rank and store.check([f"ended/{self._lowest}"]):
            self._lowest += 1
        return self._lowest == self._counter.rank

    def _write_state(self) -> None:
        """Write this rank's state, unless it is busy elsewhere and wrote one less than `SELDOM` ago."""
        mine, before = self._mine, self._last_moves
        snapshot, now = self._counter.moves.snapshot(), time.monotonic()
        self._last_moves = snapshot.moves if snapshot else ()
        if snapshot is None:
            return
        has_moved = snapshot.moves != mine.snapshot.moves
        # A rank that computes writes at once after the first of several moves in a row, and after the last.
        is_first_or_last = has_moved and (mine.beat or before == snapshot.moves)
        if not snapshot.waiting and not is_first_or_last and now - self._written_at < SELDOM:
            return
        if has_moved or not snapshot.waiting:
            at = lines.innermost(lines.frames_of_threads().get(self._main))
            last = (self._counter.pending() if snapshot.waiting else None) or self._counter.last
            mine = State(mine.beat, snapshot, at, last)
        self._written_at = now
        if (gpu := self._queue.progress()).begun:
            begun = dict(self._counter.moves.begun)
            recent = {channel: [*its.last.copy()][-RECENT:] for channel, its in begun.items()}
            mine = mine._replace(gpu=gpu, begun=recent)
        self._write(mine._replace(beat=0 if has_moved else mine.beat + 1, snapshot=snapshot))

    def _write(self, state: State) -> None:
        self._mine = state
        assert self._store is not None
        self._store.set(f"state/{self._counter.rank}", pickle.dumps(state))  # type: ignore[arg-type]

    def _read(self, store) -> list[State | None]:
        """The last state that each rank has written; None for a rank that has written none."""
        keys = [f"state/{rank}" for rank in range(self._counter.size)]
        there = keys if store.check(keys) else [key for key in keys if store.check([key])]
        values = dict(zip(there, store.multi_get(there))) if there else {}
        return [DataUnpickler(values[key], is_of_reports).load() if key in values else None for key in keys]

    def _judge(self, states: Sequence[State | None]) -> bool:
        """Print where all ranks are if none moves. Returns whether the job was said to be over."""
        now, known = time.monotonic(), {r: one for r, one in enumerate(states) if one}
        for new in set(mismatched(known)) - self._mismatched:
            self._mismatched.add(new)
            self._say("\n".join([f"\nin this job {new}. The ranks:", *_table(known)]))
        silent = self._silent(known, now)
        self._stillness.add([None if r in silent else _moving(known[r]) for r in range(len(states))])
        # A process that was stopped for a while has polled nothing meanwhile.
        since, self._polled_at = min(now - self._polled_at, SELDOM), now
        self._waited = self._waited + since if self._stillness.polls else 0.0
        if self._end_job and self._waited > LONG:
            return self._end(f"no rank has moved for {LONG:g} s", [*_table(known), *self._reading(known)])
        if self._stillness.seconds < lines.STILL:
            self._is_printed = False
        elif not self._is_printed:
            if sentences := never_completed(known):
                return self._end("a collective stays incomplete", [*_table(known), *sentences])
            where = tuple((one.has_ended, bool(one.snapshot.waiting), one.line) for one in known.values())
            if self._stillness.seconds > AGAIN or now - self._printed.get(where, -AGAIN) > AGAIN:
                self._is_printed, self._printed[where] = True, now
                head = f"\nin this job {self._stillness}:"
                more = [] if silent else self._reading(known)
                self._say("\n".join([head, *_table(known, silent), *more]))
        return False

    def _silent(self, known: dict[int, State], now: float) -> list[int]:
        """The ranks that have written no state, or none for some seconds."""
        for r, state in known.items():
            if r not in self._last_read or self._last_read[r][0] != state:
                self._last_read[r] = state, now
        late = lambda r: not known[r].has_ended and now - self._last_read[r][1] > 2 * SELDOM
        return [r for r in range(self._counter.size) if r not in known or late(r)]

    def _reading(self, known: dict[int, State]) -> list[str]:
        """Sentences: who waits for whom, and what may still act."""
        sentences = []
        if deadlock := self._stillness.reading:
            at_work = {r: one.line for r, one in known.items() if not one.has_ended}
            deadlock.lines = {r: line.number for r, line in at_work.items() if line}
            sentences.append(str(deadlock))
        may = {r: one.snapshot.may_end or one.snapshot.thread for r, one in known.items()}
        return sentences + [f"rank {r} {what}, so it may still go on." for r, what in may.items() if what][:3]

    def _end(self, head: str, more: Iterable[str]) -> bool:
        self._say_once(head, more)
        if self._end_job:
            self._end_job()
        return True

    def _say_once(self, head: str, more: Iterable[str]) -> None:
        """Print the last text of the job, unless another rank has printed one. All ranks wait for it, so it
        is printed above their tracebacks.
        """
        assert (store := self._store) is not None
        if store.add("said", 1) == 1:
            self._say("\n".join([f"\nin this job {head}:", *more]))
            store.set("is said", "")
        store.wait(["is said"], timedelta(seconds=1))


def _moving(state: State) -> Snapshot:
    """The state's snapshot. What its GPU has completed counts as a movement too."""
    complete = (state.gpu.complete,) if state.gpu else ()
    return state.snapshot._replace(moves=(*state.snapshot.moves, *complete))


def _in_words(error: BaseException) -> str:
    """'KeyError: 3, in train.py, line 7:  x = y[3]'."""
    walked = traceback.walk_tb(error.__traceback__)
    frames = [lines.Line(f.f_code.co_filename, number, f.f_code.co_name) for f, number in walked]
    at = f", in {lines.show(frames[-1])}" if (frames := lines.readers(frames)) else ""
    return f"{type(error).__name__}: {str(error)[:200]}{at}"


def _table(known: dict[int, State], silent: Sequence[int] = ()) -> list[str]:
    return places({r: one.does() for r, one in known.items()} | dict.fromkeys(silent, SILENT))


def box() -> int | None:
    """A descriptor of this rank's new box, which its recorder writes; None without torchrun."""
    with suppress(OSError):
        return os.open(folder / BOX, os.O_RDWR | os.O_CREAT, 0o600) if (folder := _folder()) else None
    return None


def _folder() -> Path | None:
    """This rank's folder for this start of the job, if torchrun made one; other ranks' are beside it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parent if file else None


def _boxes() -> list[dict]:
    """The last operation that each rank of this host has begun."""
    notes, folder = [], _folder()
    for file in folder.parent.glob(f"*/{BOX}") if folder else ():
        with suppress(OSError, ValueError):  # the rank has begun nothing, or the text did not fit
            notes.append(json.loads(file.read_bytes().rstrip(b"\0")))
    return notes
