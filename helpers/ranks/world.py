"""A world of ranks: n real processes beside the notebook's own (Jupyter's kernel), in a real process group.

    world = World(4)
    world.run(fn, *args)        every rank calls fn(*args); the list of their results
    %%ranks                     a notebook cell that every rank runs

On Linux the processes are forked from a small server that has imported torch already
(`multiprocessing`'s forkserver), and not from the kernel. So they start in a tenth of a
second, also if the kernel has used CUDA or OpenMP. On macOS each is spawned, which takes
seconds, so a few spare processes are spawned in advance (`ranks.server`).
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import weakref
from multiprocessing.connection import wait

from three_axes import devices, nccl
from three_axes.count import Deadlock, Timeline, Traffic
from three_axes.paper import Network

from . import arguments, current, failure, folders, output, server
from .failure import ALIVE, FRESH, KEPT, RankError, RanksInterrupted, RankStatus
from .messages import Setup, dumps
from .polls import QUIET, Polls
from .processes import START_SECONDS, Processes, WorldClosed

# Time limits.
REJOIN_SECONDS = 60.0  # for all ranks to form the group again, on a busy machine
MEET_SECONDS = 60.0  # for the first all-reduce of ranks that share GPUs
# For a rank to leave the operation that blocks it, else all ranks are started afresh. Key: whether on GPUs.
ABORT_SECONDS = {False: 0.5, True: 10.0}
CLOSE_SECONDS = 60.0  # for a call's thread to notice that its world is closed; usually 0.2 s are enough
# Seconds before a call shows output while it runs.
STREAM_AFTER = float(os.environ.get("THREE_AXES_STREAM_AFTER", 2))

_WORLDS = object()  # the default timeout of a call: the timeout of its world
_world_numbers = itertools.count(1)
_open: weakref.WeakSet[World] = weakref.WeakSet()


def open_worlds() -> list[World]:
    """The open worlds, in the order in which they were made: %%ranks uses the last one."""
    return sorted((w for w in _open if w.is_open), key=lambda w: w.number)


class World:
    """n ranks beside the kernel, alive until `close()`, the end of a `with` block, or the end of the kernel.

    n: number of processes, 1 to 64. timeout: seconds after which a call counts as hung
    (None: never); `run(..., timeout=)` sets it for one call. counted: whether bytes are counted
    (`traffic`); if not, an error's message cannot name the collective in which a rank was. fabric: a network
    to emulate: each collective then takes as long as on that network (see `emulate.fabric`). memory: bytes
    of tensors that each rank may hold; beyond that a rank raises an out-of-memory error (see
    `emulate.budget`).

    Ranks compute on the CPU and communicate over gloo on the loopback interface. They see no GPU, so that
    code that asks for one behaves as on a laptop. Results are returned on the CPU.

    gpus=True gives each rank a GPU; in a cell the variable `device` names it. Its tensors are sent over NCCL,
    and the operating system does not count those bytes. With fewer GPUs than ranks, and NCCL 2.30 or newer,
    ranks share GPUs: results and counted bytes are the same, but measured seconds mean nothing. Raises
    RuntimeError if ranks share GPUs and their first all-reduce fails. A call returns when the GPUs have done
    all the work that it launched, so a collective that hangs is reported for its own call. To free ranks that
    hang, NCCL's communicators are aborted and made anew. Variables are kept if that frees every rank within
    10 seconds; otherwise all ranks are started afresh, without them. They are also started afresh after an
    error of CUDA, which leaves a GPU unusable for its process.
    """

    def __init__(
        self,
        n: int = 4,
        *,
        gpus: bool = False,
        timeout: float | None = 30.0,
        counted: bool = True,
        fabric: Network | None = None,
        memory: float | None = None,
    ):
        if current.rank:
            raise RuntimeError(
                f"this is rank {current.rank.setup.rank} already: "
                "a world is made in the notebook, not inside a rank"
            )
        if multiprocessing.current_process().daemon:
            raise RuntimeError(
                "a daemonic process of multiprocessing may start no ranks: make the World in its parent, or"
                " start this process with daemon=False"
            )
        arguments.check(n, gpus, counted, fabric, memory)
        self.n, self.number, self._counted = n, next(_world_numbers), counted
        self.timeout = arguments.seconds(timeout)
        self.quiet = QUIET  # seconds; less for a program of the course, which nothing else can free
        self.fabric, self.memory = fabric, memory
        self.gpus = gpus
        self._devices = arguments.devices_of(n) if gpus else ["cpu"] * n
        self._in_use = len({*self._devices}) if gpus else 0  # GPUs
        self.traffic: Traffic | None = None  # of the last run() or cell
        self.timeline: Timeline | None = None  # of the same
        self._generation = 0
        # True from a call's start until it has ended or the ranks were mended. If it still is True at the
        # next call, all ranks are started afresh first.
        self._broken = False
        # Only the thread that holds the lock uses the processes: that of the running call, or of `close()`.
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread of the call under way
        with server.refusal_explained():
            self._folder = tempfile.mkdtemp(prefix="world-", dir=folders.home())
        self._ranks = Processes(self._folder)
        self._finalizer = weakref.finalize(self, self._ranks.end, folder=True)
        self._finalizer.atexit = False  # at exit `_end_all` closes the open worlds
        self._library = nccl.newer() or "" if self.shared and not nccl.shares() else ""
        self._start()
        if self.shared:
            self._meet()
        _open.add(self)

    # -- calls -----------------------------------------------------------------------

    def run(self, fn, *args, timeout: float | None = _WORLDS, **kwargs) -> list:
        """Call `fn(*args, **kwargs)` on every rank and return the results, rank 0's first.

        What the ranks print appears here, in rank order. `fn` may be defined in the notebook: it is sent by
        value. Functions of a module are sent by name, and a rank keeps the module that it imported first:
        after editing a file, make a new World. A program that `fn` starts continues after the call. On Linux
        it is ended with the ranks; elsewhere `fn` must end it. Raises RankError when a rank raises or dies,
        when no rank has moved for two seconds and each waits for another or has ended, or after `timeout`
        seconds; raises RanksInterrupted when you press stop.
        """
        if not callable(fn):
            raise TypeError(f"run() takes a function and its arguments, not {fn!r}")
        try:
            job = dumps((fn, args, kwargs))
        except Exception as e:
            raise TypeError(
                f"{getattr(fn, '__name__', fn)} or one of its arguments cannot be sent "
                f"to the ranks ({e}); pass numbers, strings and tensors"
            ) from None
        return self._call("function", job, timeout=timeout)

    def cell(self, source: str, file: str = "<cell>", timeout: float | None = _WORLDS) -> list[str | None]:
        """Run the text `source` in every rank's namespace, as %%ranks does.

        Variables keep their values from call to call; `rank`, `world_size`, `device`, `torch` and `dist` are
        there. Returns, per rank, the repr of the last line's value (None where it has none).
        """
        return self._call("cell", source, file, timeout=timeout)

    def push(self, **names) -> None:
        """Set variables in every rank's namespace: `world.push(lr=0.1)`."""
        self._call("push", dumps(names), keep_traffic=False)

    def pull(self, name: str) -> list:
        """A variable's value on every rank, rank 0's first."""
        return self._call("pull", name, keep_traffic=False)

    # -- life ------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """False once `close()` has ended the ranks."""
        return self._finalizer.alive and not self._ranks.closing

    @property
    def pids(self) -> list[int]:
        """Process ids, rank 0's first."""
        return [p.pid for p in self._ranks.processes]

    def close(self) -> None:
        """End the ranks. Closing twice does no harm. A call of another thread ends with an error."""
        self._ranks.closing = True
        if self._caller == threading.get_ident():
            return  # close() was called inside a call, which ends the ranks when it returns
        owned = self._lock.acquire(timeout=CLOSE_SECONDS)
        try:
            self._finalizer()
        finally:
            if owned:
                self._lock.release()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __reduce__(self):
        raise TypeError(
            "a World belongs to the notebook and cannot be sent to a rank; "
            "on a rank, use dist.get_rank() and dist.get_world_size()"
        )

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        if not self.is_open:
            return f"World({self.n}), closed"
        pids = ", ".join(map(str, self.pids))
        where = devices.placed(self.n, self._in_use)
        if self.fabric is not None:
            where += (
                f" on an emulated network ({self.fabric.name}, {self.fabric.gpus_per_node} ranks to a node)"
            )
        return f"World({self.n}): {where}, processes {pids}"

    @property
    def shared(self) -> bool:
        """Whether some ranks share a GPU, so that seconds mean nothing."""
        return 0 < self._in_use < self.n

    def _meet(self) -> None:
        """Print that ranks share GPUs, after an all-reduce has shown that they can. Raises RuntimeError."""
        try:
            self.run(current.meet, timeout=MEET_SECONDS)
        except RankError as e:
            self.close()
            raise RuntimeError(failure.not_shared(e, self.n, self._in_use)) from None
        except BaseException:
            self.close()
            raise
        self.traffic = self.timeline = None
        output.say(devices.placed(self.n, self._in_use))

    def _start(self) -> None:
        """Fresh processes in a fresh group."""
        environ = dict(os.environ, GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0")
        if self.shared:
            environ = devices.SHARED | environ
        environ |= devices.NCCL if self.gpus else devices.NO_GPUS
        os.makedirs(self._folder, exist_ok=True)
        captured = [output.Captured() for _ in range(self.n)]
        try:
            for r in range(self.n):
                own = r, self.n, self._devices[r], self._folder, environ, server.cwd(), sys.path
                with server.refusal_explained():
                    self._ranks.add(Setup(*own, self._counted, self.fabric, self.memory), self._library)
            formed = self._join(START_SECONDS, captured)
        except BaseException:
            self.close()
            raise
        if not formed:
            self.close()
            raise RuntimeError(
                f"the {self.n} ranks could not start. They printed:\n{output.fold(map(str, captured))}"
            )
        self._broken = False
        server.warm(self.n)  # where ranks are spawned: start spare processes, in case these are lost

    def _join(self, seconds: float, captured=None) -> bool:
        """Have every rank form the group anew. Returns False if a rank did not."""
        self._generation += 1
        number = next(self._ranks.calls)
        self._ranks.tell("join", number, self._generation)
        joined = self._ranks.collect("joined", number, range(self.n), seconds, captured)
        self._left_groups = any(had_groups for (had_groups,) in joined.values())
        return len(joined) == self.n

    def _restart(self) -> None:
        self._ranks.end()
        self._start()

    # -- one call --------------------------------------------------------------------

    def _call(self, kind: str, *details, timeout: float | None = _WORLDS, keep_traffic: bool = True) -> list:
        self._check_open()
        timeout = self.timeout if timeout is _WORLDS else arguments.seconds(timeout)
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this world is busy with a call from another thread; make a second World for it"
            )
        self._caller = threading.get_ident()
        try:
            self._check_open()
            return self._locked_call(kind, details, timeout, keep_traffic)
        except WorldClosed:
            raise RuntimeError(f"this World({self.n}) was closed while its call ran") from None
        finally:
            if self._ranks.closing:
                self._finalizer()
            self._caller = None
            self._lock.release()

    def _locked_call(self, kind: str, details: tuple, timeout: float | None, keep_traffic: bool) -> list:
        if self._broken:
            self._restart()
            print("note: the last call was broken off. " + FRESH)
        number = next(self._ranks.calls)
        captured = [output.Captured() for _ in range(self.n)]
        view = output.View(captured, STREAM_AFTER, timeout)
        self._broken = True  # if anything below raises what is not foreseen, the next call starts afresh
        try:
            done, left = self._ask(kind, details, number, timeout, captured, view)
        except KeyboardInterrupt:
            with server.undisturbed(again=False):  # ignore a second press of stop
                raise self._interrupted(number, captured) from None
        finally:
            view.end()
        self._broken = False
        reports = [done[r][2] for r in range(self.n)]
        traffic = Traffic(reports)
        if keep_traffic:
            self._keep(traffic, reports)
        # A rank is not in the group any more if its code has destroyed it, if an operation of it failed and
        # the code continued, or if the rank was freed above. Then form it again.
        state = ALIVE if all(joined for *_, joined in done.values()) else self._mend([])
        if left:
            output.say(failure.left_behind(*left, state))
        elif state != ALIVE:
            output.say(
                "note: during this call the process group was destroyed, or a collective failed. " + state
            )
        self._check_agreement(traffic, state)
        return [self._result(r, done[r][1]) for r in range(self.n)]

    def _ask(self, kind: str, details: tuple, number: int, timeout: float | None, captured, view):
        """Send the call to all ranks, and wait for their answers. Returns (rank -> its answer, what
        `_free_unawaited` returned). Raises RankError, after the ranks were mended, and KeyboardInterrupt.
        """
        payload = pickle.dumps(details)
        if slow := self._ranks.tell(kind, number, payload, sys.path, seconds=timeout):
            self._restart()
            text = failure.not_taken(slow, self.n, len(payload), timeout, FRESH)
            raise self._error(text, "timeout", slow, FRESH)
        polls = Polls(self._ranks, number, view.set_places, self.quiet)

        def tick(answers: dict, progress: dict) -> bool:
            ends = polls.end(answers, captured) or not all(ok for ok, *_ in answers.values())
            view.tick(progress, self.n)
            return ends

        done = self._ranks.collect("done", number, range(self.n), timeout, captured, tick)
        left = self._free_unawaited(number, done, captured) if polls.nobody_waits else None
        if len(done) < self.n or not all(ok for ok, *_ in done.values()):
            raise self._fail(number, done, captured, timeout, polls.found)
        return done, left

    def _error(self, text: str, kind: str, at_fault: list[int], state: str, ended: bool = False) -> RankError:
        """An error for which no rank is asked where it was. ended: whether all ranks have ended the call."""
        seen = [RankStatus(finished=ended) for _ in range(self.n)]
        return RankError(text, kind, at_fault, state != FRESH, seen)

    def _keep(self, traffic: Traffic, reports: list) -> None:
        """Keep what the ranks counted in the last call."""
        spans, levels, streams = (
            [getattr(report, what) for report in reports] for what in ("spans", "levels", "streams")
        )
        self.traffic, self.timeline = traffic, Timeline(spans, levels, streams, shared=self.shared)

    def _check_agreement(self, traffic: Traffic, state: str) -> None:
        """Raises RankError if two ranks called one collective with arguments that do not match. Prints a
        warning if one of them has not called it.
        """
        if wrong := traffic.disagreement(both=True):
            pair, text = wrong
            raise self._error(f"{text}\n{state}", "disagree", pair, state, ended=True)
        if wrong := traffic.disagreement():
            output.say(f"warning: {wrong[1]}")

    def _result(self, rank: int, pickled: bytes):
        """A rank's result. Raises RankError if it cannot be read here."""
        try:
            return pickle.loads(pickled)
        except (Exception, SystemExit) as e:  # unpickling runs the reader's code
            text = failure.unreadable(rank, e, ALIVE)
            raise self._error(text, "result", [rank], ALIVE, ended=True) from None

    def _check_open(self) -> None:
        if self._ranks.owner != os.getpid():
            raise RuntimeError(
                f"this World({self.n}) belongs to process {self._ranks.owner}, of which this one is a fork;"
                " make a new one here"
            )
        if current.rank:
            raise RuntimeError("a world cannot be used inside a rank: call it from the notebook")
        if not self.is_open:
            raise RuntimeError(f"this World({self.n}) is closed; make a new one with World({self.n})")

    # -- when a call fails -----------------------------------------------------------

    def _fail(self, number: int, done: dict, captured, timeout, deadlock: Deadlock | None) -> RankError:
        """Find the cause, free the ranks, mend the world, and return the error with its message."""
        if self._ranks.dead() or not all(ok for ok, *_ in done.values()):
            # Wait for the answers of ranks that fail at the same moment.
            done |= self._ranks.collect_rest(number, done, 0.1, captured)
            if done and all(ok or pickle.loads(error).follows for ok, error, *_ in done.values()):
                # All of these ranks lost a connection, so another rank has probably died. Its process ends
                # soon.
                wait([p.sentinel for p in self._ranks.processes], 1)
        seen = self._ranks.look(number, done, captured)
        missing = [r for r in range(self.n) if r not in done]
        mend = lambda: self._mend(missing, number, captured, seen)
        return failure.explain(seen, timeout, deadlock, mend, self.quiet)

    def _free_unawaited(self, number: int, done: dict, captured) -> tuple[list[RankStatus], list[int]] | None:
        """If the reader's code has returned on all ranks, free the ranks that are blocked in an operation
        which this code started and never waited for. Their answers are added to `done`. Returns the status of
        all ranks and the list of ranks that were to be freed; None if a rank has an error, or its code has
        not returned.
        """
        seen = self._ranks.look(number, done, captured)
        freed = [r for r in range(self.n) if r not in done]
        if any(s.error or not (s.finished or s.where and s.where["returned"]) for s in seen):
            return None
        self._ranks.tell("abort", number, to=freed)
        done |= self._ranks.collect_rest(number, done, ABORT_SECONDS[self.gpus], captured)
        return seen, freed

    def _interrupted(self, number: int, captured) -> RanksInterrupted:
        if self._ranks.midway:  # half a message is in a pipe: nothing after it could be understood
            self._ranks.midway = False
            self._restart()
            return RanksInterrupted("stopped, as you asked, while data was on its way.\n" + FRESH)
        done: dict[int, tuple] = {}
        seen = self._ranks.look(number, done, captured)
        busy = [
            r
            for r, s in enumerate(seen)
            if r not in done and (s.where is None or s.where["running"] == number)
        ]
        return RanksInterrupted(failure.interrupted(seen, self._mend(busy, number, captured, seen)))

    def _mend(
        self, busy: list[int], number: int = 0, captured=None, seen: list[RankStatus] | None = None
    ) -> str:
        """Free the `busy` ranks from call `number`, then form the group again. If a rank is lost, all ranks
        are started afresh.

        Returns the sentence on the ranks' variables: ALIVE, KEPT or FRESH.
        """
        freed = {}
        if busy and not self._ranks.dead():
            self._ranks.tell("abort", number, to=busy)
            freed = self._ranks.collect_rest(
                number, {r: () for r in range(self.n) if r not in busy}, ABORT_SECONDS[self.gpus], captured
            )
        for r in self._ranks.dead():
            if seen and seen[r].exit is None:  # the rank died while it was asked or freed
                seen[r].exit = self._ranks.processes[r].exitcode
                seen[r].said = str(captured[r]) if captured else ""
        spoilt = seen and any(s.error and s.error.spoils for s in seen)
        if spoilt or len(freed) < len(busy) or self._ranks.dead() or not self._join(REJOIN_SECONDS):
            self._restart()
            return FRESH
        self._broken = False
        return KEPT if self._left_groups else ALIVE


def _forget_in_fork() -> None:
    server.forget()
    for w in list(_open):
        w._ranks.forget()
        w._lock, w._caller = threading.Lock(), None  # a call's thread is not in this process


os.register_at_fork(after_in_child=_forget_in_fork)


@atexit.register
def _end_all() -> None:
    for w in list(_open):
        w.close()
