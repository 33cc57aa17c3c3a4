"""`count --watch`: prints where each rank of a job is when nothing moves, and whether a hang is proven.

On each rank a thread writes the rank's state to the store with which the ranks formed their group. The lowest
rank that is alive reads the states of all, and `standstill` compares them. A state that was written twice
since the last reading was made after it. If nothing is proven, the positions of all ranks are printed once.

gloo may end a process in the middle of a collective, and other ranks then raise. So each recorder also writes
to its box (`meter`), a file in the folder that torchrun made for the rank, which outlives the process.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from .. import lines
from ..foreign import DataUnpickler
from ..table import ranks
from .counter import Counter, is_of_reports
from .meter import Queue
from .moves import Ahead, Begun, Channel, Look, sides_of
from .standstill import Seen, Standstill
from .threads import OwnThread

EVERY = 0.15  # seconds
MANY = 300  # ranks for each second of longer waiting, because one rank reads the states of all
SELDOM = 1.0  # seconds between the messages of a rank that is in no collective
AGAIN = 60.0  # the same if these positions were printed before: in a slow step that is no news
ON_NCCL = """\
watching ranks on NCCL, where the host does not wait for its GPU. Known are the collectives that each rank has
begun, those that its GPU has completed, and the line of its main thread. A hang is proven only if a rank has
ended its script; at NCCL's own timeout, 10 minutes, its flight recorder (torchfrtrace) has more."""
BOX = "last-collective"


class Told(NamedTuple):
    """The state that a rank has written. beat: how often it has written the same look. gone: its script is
    over, with all functions registered for its end. line: where its main thread is. last: the collective that
    it waits in, or else the one that it began last, as written to the box. why: a description of what forbids
    a proof. ahead: how far its GPU is, and begun: what it has begun last, both for NCCL.
    """

    beat: int
    gone: bool
    look: Look
    line: lines.Line | None = None
    last: dict | None = None
    why: str = ""
    ahead: Ahead | None = None
    begun: dict[Channel, list[tuple[int, str]]] = {}

    def does(self) -> tuple[str, str]:
        """(a description of what it does, the same in the plural)."""
        at = lines.show(self.line) if self.line else "code that is not the script's"
        last = f"began {_collective(self.last)} last" if self.last else "began no collective"
        if self.gone:
            after = f"after {_collective(self.last)}" if self.last else "before any collective"
            return (f"ended its script {after}", f"ended their scripts {after}")
        if self.look.stands and self.last:
            where = f"in {_collective(self.last)}: {at}"
            return (f"waits {where}", f"wait {where}")
        if self.ahead and (oldest := self.ahead.oldest):
            line = f" ({lines.place(lines.Line(*oldest['line']))})" if oldest["line"] else ""
            last = f"began {self.ahead.begun} on the GPU, {self.ahead.complete} of them complete, the next"
            last += f" {_collective(oldest)}{line}"
        return (f"{last}, and is in {at}", f"{last}, and are in {at}")

    def recently(self, channel: Channel) -> dict[int, str]:
        """Number -> what the rank passed: its last few calls, and the oldest that its GPU has not
        completed.
        """
        recent = dict(self.begun.get(channel, ()))
        oldest = self.ahead.oldest if self.ahead else None
        if oldest and Channel(*oldest["channel"]) == channel:
            recent[oldest["nth"]] = oldest["brought"]
        return recent

    def seen(self) -> Seen:
        """The state, in the form in which states of ranks are compared."""
        moves = self.gone, self.look.moves, self.ahead and self.ahead.complete
        return Seen(moves, math.inf if self.gone else self.beat, self.look)


class Noted(Told):
    """What is known of a rank by its box alone: where it is by now is not."""

    def does(self) -> tuple[str, str]:
        """In words."""
        assert self.last is not None
        at = f", in {lines.show(lines.Line(*self.last['line']))}" if self.last["line"] else ""
        began = f"began {_collective(self.last)} last{at}"
        return began, began


def _collective(last: dict) -> str:
    """'all_reduce number 6 of dp, float32[3]'"""
    to = {"send": " to", "recv": " from"}.get(last["op"])
    peer = f"{to} rank {last['needs'][0]}" if to and len(last["needs"]) == 1 else ""
    of = f", {last['dtype']}{last['shape']}" if last["shape"] is not None else ""
    return f"{last['op']} number {last['nth']}{peer} of {last['axis']}{of}"


def places(told: Mapping[int, Told], silent: Collection[int] = ()) -> list[str]:
    """A line for each group of ranks that do the same. silent: ranks that have written nothing lately."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank in sorted({*told, *silent}):
        does = ("does not answer", "do not answer") if rank in silent else told[rank].does()
        groups.setdefault(does, []).append(rank)
    return [f"    {ranks(who)} {does[len(who) > 1]}" for does, who in groups.items()]


def absent(last: dict | None, told: Mapping[int, Told]) -> list[int]:
    """The ranks that have ended their scripts and never began their side of a rank's last collective."""
    if last is None:
        return []
    sides = sides_of(Channel(*last["channel"]))
    count = lambda rank: told[rank].look.begun.get(sides[rank], Begun()).count
    return [rank for rank, one in told.items() if one.gone and rank in sides and count(rank) < last["nth"]]


def may_be_freed(told: Mapping[int, Told]) -> bool:
    """Whether the end of a process whose script is over can make gloo raise in a rank that waits, because a
    connection between the two closes then.
    """
    gone = {rank for rank, one in told.items() if one.gone}
    waits = (one.look.stands for one in told.values() if one.look.stands and not one.gone)
    operations = [operation for waiting in waits for operation in waiting.operations if operation.marked]
    ends = lambda channel: channel.members if channel.kind == "recv_any" else sides_of(channel)
    return any(not gone.isdisjoint(ends(operation.channel)) for operation in operations)


def unlike(told: Mapping[int, Told]) -> list[str]:
    """Descriptions of collectives of a group to which ranks passed different kinds or sizes. Compared are the
    last few that each rank has begun, and the oldest that its GPU has not completed.
    """
    found = []
    for channel in dict.fromkeys(channel for one in told.values() for channel in one.begun):
        its = {rank: told[rank].recently(side) for rank, side in sides_of(channel).items() if rank in told}
        for number in sorted({number for recent in its.values() for number in recent}):
            brought = {rank: recent[number] for rank, recent in its.items() if number in recent}
            if len(set(brought.values())) > 1:
                each = "; ".join(f"rank {rank}: {what}" for rank, what in brought.items())
                found.append(
                    f"collective number {number} of {ranks([*channel.members])} is not alike: {each}"
                )
                break
    return found


def _hopeless(told: Mapping[int, Told]) -> list[str]:
    """Descriptions of collectives on a GPU that a rank never called, although its script has ended."""
    missing: dict[str, list[int]] = {}
    for one in told.values():
        if one.ahead and one.ahead.oldest and (ended := absent(one.ahead.oldest, told)):
            missing[_collective(one.ahead.oldest)] = ended
    return [f"{ranks(who)} never came to {what}." for what, who in missing.items()]


class Watch:
    """Watches this rank until `leave`, and the others if it is the lowest that is alive. say: prints a block.
    proven: called when it is printed that no rank can ever continue.
    """

    def __init__(self, counter: Counter, say: Callable[[str], None], proven: Callable[[], None]):
        self._counter, self._say, self._proven = counter, say, proven
        self._queue = counter.queue = Queue()
        self._main = threading.main_thread().ident or 0
        self._mine, self._told_at, self._seen = Told(0, False, Look(0)), 0.0, -1
        self._lowest = 0  # no lower rank is alive
        self._standstill, self._is_noted = Standstill(), False
        self._heard: dict[int, tuple[Told, float]] = {}  # each rank's last state, and when it was first read
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
                self._put(Told(0, True, look._replace(why=""), last=self._counter.last))
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
            told = {r: one for r, one in enumerate(self._read(store)) if one}
            gone = {r: one for r, one in told.items() if one.gone}
            for note in _boxes():
                its = told.get(note["rank"], Told(0, False, Look(0)))
                is_its_last = its.last is not None and its.last["number"] == note["number"]
                # A rank that waited, or that raised, is told by what it began.
                is_elsewhere = is_its_last and its.line and not its.look.stands
                if not its.gone and (note["rank"] == self._counter.rank or not is_elsewhere):
                    told[note["rank"]] = Noted(0, False, Look(0), last=note)
            missing = absent(self._counter.last, gone)
            if self._counter.has_failed or gone:
                has = "it has" if len(missing) == 1 else "they have"
                never = [f"{ranks(missing)} never came, for {has} ended."] if missing else []
                unknown = sorted(set(range(self._counter.size)) - told.keys())
                silent = [f"    of {ranks(unknown)} nothing is known"] if unknown else []
                head = f"rank {self._counter.rank} raised {type(error).__name__}. The ranks, as known last"
                self._say_once(head, [*places(told), *silent, *never])
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
        has_moved = look.moves != mine.look.moves  # told at once if it is the first movement, or the last
        if not (
            look.stands or now - self._told_at > SELDOM or has_moved and (mine.beat or before == look.moves)
        ):
            return
        if not (look.stands and mine.look.is_still_in(look)):
            at = lines.innermost(lines.of_threads(sys._current_frames).get(self._main))
            why = self._counter.moves.why(is_placed=True) if look.why else ""
            last = (self._counter.pending() if look.stands else None) or self._counter.last
            mine = Told(mine.beat, False, look, at, last, why)
        self._told_at = now
        if (ahead := self._queue.now()).begun:
            begun = dict(self._counter.moves.begun)
            recent = {channel: list(its.last.copy()) for channel, its in begun.items()}
            mine = mine._replace(ahead=ahead, begun=recent)
        self._put(mine._replace(beat=0 if has_moved else mine.beat + 1, look=look))

    def _put(self, told: Told) -> None:
        self._mine = told
        assert self._store is not None
        self._store.set(f"look/{self._counter.rank}", pickle.dumps(told))  # type: ignore[arg-type]

    def _read(self, store) -> list[Told | None]:
        """The last state that each rank has written; None for a rank that has written none."""
        keys = [f"look/{rank}" for rank in range(self._counter.size)]
        there = keys if store.check(keys) else [key for key in keys if store.check([key])]
        values = dict(zip(there, store.multi_get(there))) if there else {}
        return [DataUnpickler(values[key], is_of_reports).load() if key in values else None for key in keys]

    def _judge(self, told: Sequence[Told | None]) -> bool:
        """Print what is proven, or else, once, where all ranks are. Returns whether something was proven."""
        now, known = time.monotonic(), {r: one for r, one in enumerate(told) if one}
        for new in set(unlike(known)) - self._unlike:
            self._unlike.add(new)
            self._say("\n".join([f"\nin this job {new}. The ranks:", *places(known)]))
        for r, one in known.items():
            if r not in self._heard or self._heard[r][0] != one:
                self._heard[r] = one, now
        answers = {r: one for r, one in known.items() if one.gone or now - self._heard[r][1] < 2 * SELDOM}
        everybody = range(len(told))
        deadlock = self._standstill.judge([answers[r].seen() if r in answers else None for r in everybody])
        if deadlock and not may_be_freed(known):
            deadlock.lines = {r: one.line.number for r, one in known.items() if one.line and not one.gone}
            return self._end("no rank can ever go on", [*places(known), str(deadlock)])
        if self._standstill.seconds < lines.STILL:
            self._is_noted = False
        elif not self._is_noted:
            if gone := _hopeless(known):
                return self._end("a collective can never be completed", [*places(known), *gone])
            where = tuple((one.gone, bool(one.look.stands), one.line) for one in known.values())
            if self._standstill.seconds > AGAIN or now - self._noted.get(where, -AGAIN) > AGAIN:
                self._is_noted, self._noted[where] = True, now
                self._note(known, set(everybody) - answers.keys())
        return False

    def _end(self, head: str, more: list[str]) -> bool:
        self._say_once(head, more)
        self._proven()
        return True

    def _note(self, known: dict[int, Told], silent: set[int]) -> None:
        settled = not silent and all(one.gone or one.look.stands for one in known.values())
        why = [f"rank {r} {one.why}" for r, one in known.items() if one.why and settled]
        more = [f"That is no proof of a hang: {'; '.join(why[:3])}."] if why else []
        self._say("\n".join([f"\nin this job {self._standstill}:", *places(known, silent), *more]))

    def _say_once(self, head: str, more: list[str]) -> None:
        """Print a job's last block, unless another rank has. It then comes before the tracebacks of
        all ranks.
        """
        assert (store := self._store) is not None
        if store.add("said", 1) == 1:
            self._say("\n".join([f"\nin this job {head}:", *more]))
            store.set("is said", "")
        store.wait(["is said"], timedelta(seconds=1))


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
