"""Starts and ends the processes of one world, and exchanges messages with them."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

from three_axes import cpython_private

from . import output, server
from .failure import RankStatus
from .messages import Setup

ANSWER_SECONDS = 1.0  # for a rank to answer where it is, also on a busy machine
READ_BYTES = 1 << 20  # bytes that are read from a rank at a time
TICK = 0.1  # seconds between two polls of a call
UNKNOWN_EXIT = 255  # multiprocessing's exit code of a process whose fork server ended before the process did
START_SECONDS = 180  # for a rank's imports on a slow or busy machine


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:  # it has ended
        return False


class WorldClosed(Exception):
    """Another thread has closed the world whose call runs here."""


class Inbox:
    """The messages of one rank. `read` never waits for the rest of a message, which may never arrive."""

    def __init__(self, connection: Connection):
        self._connection, self._received = connection, bytearray()

    def read(self) -> list[bytes] | None:
        """The messages that have arrived whole, from a connection with data to read. None: it is closed."""
        try:
            data = os.read(self._connection.fileno(), READ_BYTES)
        except OSError:
            data = b""
        self._received += data
        return cpython_private.whole_messages(self._received) if data else None


class _Heard:
    """What ranks have sent since the kernel began to wait for their answers. The arguments are those of
    `Processes.collect`.
    """

    def __init__(self, ranks: Processes, kind: str, number: int, members, captured, late):
        self.answers: dict[int, tuple] = {}
        self.progress: dict[int, tuple] = {}
        self._ranks, self._kind, self._number = ranks, kind, number
        self._captured, self._late = captured, late
        # What can be read or has ended -> (the method that reads it, its rank).
        self._sources: dict[Any, tuple[Callable[[Any, int], bool], int]] = {}
        for r in members:
            self._sources[ranks.controls[r]] = self._read_messages, r
            self._sources[ranks.outputs[r]] = self._read_output, r
            self._sources[ranks.processes[r].sentinel] = lambda sentinel, rank: True, r

    def hear(self, seconds: float) -> bool:
        """Read what arrives within `seconds`. Returns whether a rank has failed or a process has ended."""
        has_ended = False
        for source in wait([*self._sources], seconds):
            read, rank = self._sources[source]
            has_ended |= read(source, rank)
        return has_ended

    def _read_output(self, pipe: Connection, rank: int) -> bool:
        if not output.drain(pipe.fileno(), self._captured[rank]):
            del self._sources[pipe]
        return False

    def _read_messages(self, pipe: Connection, rank: int) -> bool:
        self._ranks.midway = True
        messages = self._ranks.inboxes[rank].read()
        self._ranks.midway = False
        if messages is None:
            wait([self._ranks.processes[rank].sentinel], 1)  # a dying process closes its pipe first
            del self._sources[pipe]
            return True
        return any([self._take(rank, message) for message in messages])

    def _take(self, rank: int, message: bytes) -> bool:
        kind, number, *rest = pickle.loads(message)
        if self._late and (kind, number) == ("done", self._late[0]):
            self._late[1][rank] = tuple(rest)
        if number == self._number and kind == "progress":
            self.progress[rank] = tuple(rest)
        elif number == self._number and kind == self._kind:  # other answers are to what was given up
            self.answers[rank] = tuple(rest)
            return kind == "done" and not rest[0]
        return False


class Processes:
    """The processes of one world and the pipes to them. It holds no reference to its World, so a World that
    the reader no longer refers to is freed, and its ranks end.
    """

    def __init__(self, folder: str):
        self.folder, self.owner = folder, os.getpid()
        self._clear()
        self.midway = False  # a message is being sent or read
        self.closing = False  # the world is closed: nothing is started or waited for any more
        self.calls = itertools.count(1)  # numbers for calls, and for questions to the ranks

    def _clear(self) -> None:
        self.processes, self.controls, self.inboxes, self.outputs, self.leashes = [], [], [], [], []
        self.servers: list[int | None] = []  # pid of the server that forked each process

    def add(self, setup: Setup, library: str = "") -> None:
        """Add a rank: take a process from `server`, and send it `setup`. library: the path of a library that
        the process loads before PyTorch. Raises WorldClosed, and OSError if no process can be started.
        """
        self.check_open()
        new = server.take(library)
        os.set_blocking(new.output.fileno(), False)
        self.processes.append(new.process)
        self.servers.append(server.server_pid())
        self.controls.append(new.control)
        self.inboxes.append(Inbox(new.control))
        self.outputs.append(new.output)
        self.leashes.append(new.leash)
        self._deliver(len(self.processes) - 1, pickle.dumps(setup))

    def check_open(self) -> None:
        """Raises WorldClosed."""
        if self.closing:
            raise WorldClosed

    def forget(self) -> None:
        """In a fork of the kernel: close its copies of the pipes, or ranks would not notice a dead kernel."""
        for process, *pipes in zip(self.processes, self.controls, self.outputs, self.leashes):
            server.disown(process, *pipes)
        self._clear()

    def box(self, rank: int) -> dict | None:
        """The last collective that a rank entered in this call; works even when the process is dead."""
        try:
            with open(os.path.join(self.folder, f"box-{rank}"), "rb") as f:
                return json.loads(f.read().rstrip(b"\0"))
        except (OSError, ValueError):
            return None

    # -- messages --------------------------------------------------------------------

    def tell(self, *message, to=None, seconds: float | None = START_SECONDS) -> list[int]:
        """Send a message to the ranks `to` (None: to all).

        A rank that does not receive a long message within `seconds` is killed, because its pipe then holds
        half of the message. Returns the killed ranks. Raises WorldClosed.
        """
        data = pickle.dumps(message)
        members = range(len(self.processes)) if to is None else to
        if len(data) < 1 << 14:  # so short a message fits into the pipe, whatever the rank is doing
            for r in members:
                self._deliver(r, data)
            return []
        self.midway = True
        threads = {r: threading.Thread(target=self._deliver, args=(r, data), daemon=True) for r in members}
        for thread in threads.values():
            thread.start()
        deadline = None if seconds is None else time.monotonic() + seconds
        slow = []
        for r, thread in threads.items():
            while thread.is_alive() and not self.closing and (deadline or math.inf) > time.monotonic():
                thread.join(TICK)
            if thread.is_alive():
                self.processes[r].kill()
                thread.join()  # ends, because the other end of the pipe is closed
                slow.append(r)
        self.midway = False
        self.check_open()
        return slow

    def _deliver(self, rank: int, data: bytes) -> None:
        try:
            self.controls[rank].send_bytes(data)
        except OSError:
            pass  # the rank is dead; `collect` notices that

    def collect(
        self,
        kind: str,
        number: int,
        members,
        seconds: float | None,
        captured=None,
        tick: Callable[[dict, dict], bool] | None = None,
        late: tuple[int, dict] | None = None,
    ) -> dict[int, tuple]:
        """Wait for the answers of type `kind` to call or question `number`, and read the ranks' output
        meanwhile. Returns a dict, rank -> the contents of its answer.

        Returns early, with fewer answers, when an answer reports that its rank failed, when a process ends,
        after `seconds`, or when tick(answers, progress), which is called again and again, returns True.
        progress: rank -> (steps done, of how many). captured: receives the output, a `Captured` for each
        rank. late: (the number of an earlier call, a dict to which answers to that call are added if they
        arrive now). Raises WorldClosed.
        """
        captured = captured or [output.Captured() for _ in range(len(self.processes))]
        heard = _Heard(self, kind, number, members, captured, late)
        deadline = None if seconds is None else time.monotonic() + seconds
        while len(heard.answers) < len(members):
            self.check_open()
            left = TICK if deadline is None else min(TICK, deadline - time.monotonic())
            if left <= 0 or heard.hear(left) or (tick and tick(heard.answers, heard.progress)):
                break
        for r in members:  # what a rank printed before its answer is in its pipe by now
            output.drain(self.outputs[r].fileno(), captured[r])
        return heard.answers

    def collect_rest(self, number, done, seconds, captured) -> dict:
        """Answers, also of failure, of living ranks outside `done`. Ends after `seconds`, or if one dies."""
        more_done, until = {}, time.monotonic() + seconds
        while time.monotonic() < until:
            missing = [
                r
                for r in range(len(self.processes))
                if r not in done and r not in more_done and r not in self.dead()
            ]
            if not missing:
                break
            more = self.collect("done", number, missing, until - time.monotonic(), captured)
            more_done |= more
            if not more:
                break
        return more_done

    def look(self, number: int, done: dict, captured) -> list[RankStatus]:
        """The status of every rank in call `number`. Answers to the call that arrive meanwhile are added to
        `done`. All living ranks are asked, even those that have ended the call, because each may have to
        write its flight record (`flight`).
        """
        seen = [RankStatus() for _ in range(len(self.processes))]
        asked = [r for r in range(len(self.processes)) if r not in self.dead()]
        question = next(self.calls)
        self.tell("where", question, to=asked)
        answers = (
            self.collect("where", question, asked, ANSWER_SECONDS, captured, late=(number, done))
            if asked
            else {}
        )
        for r, (ok, payload, *_) in done.items():
            seen[r].finished = ok
            seen[r].error = None if ok else pickle.loads(payload)
        for r in range(len(self.processes)):
            seen[r].exit = self.processes[r].exitcode
            seen[r].orphaned = seen[r].exit == UNKNOWN_EXIT and server.has_ended(self.servers[r])
            seen[r].stopped = r not in answers and _is_stopped(self.processes[r].pid)
            seen[r].box = self.box(r)
            seen[r].said = str(captured[r])
            if r in answers and r not in done:
                (seen[r].where,) = answers[r]
        return seen

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        for p in self.processes:
            if wait([p.sentinel], 0):
                p.join(1)  # a spawned process closes its sentinel just before its exit status is known
        return [r for r, p in enumerate(self.processes) if p.exitcode is not None]

    # -- the end ---------------------------------------------------------------------

    def end(self, folder: bool = False) -> None:
        """Kill the processes, which own nothing that outlives them. folder: delete the world's folder too."""
        if os.getpid() != self.owner:
            return  # this process is a fork of the kernel: the ranks are not its own
        for leash in self.leashes:  # first, since this also ends the processes that a rank has started
            leash.close()
        for p in self.processes:
            if p.pid is not None:
                p.kill()
        for p in self.processes:
            if p.pid is not None:
                p.join()  # a killed process ends; if the fork server is dead, the process's pipe reports it
                p.close()
        for pipe in (*self.controls, *self.outputs):
            pipe.close()
        self._clear()
        if folder:
            shutil.rmtree(self.folder, ignore_errors=True)
