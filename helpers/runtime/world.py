"""A world of ranks: n real processes beside the kernel, joined in a real process group.

    world = World(4)
    world.run(fn, *args)        every rank calls fn(*args); the list of their results
    %%ranks                     a notebook cell that every rank runs

The processes are forked from a small server that has imported torch already
(`multiprocessing`'s forkserver), so they are there in a tenth of a second and never
descend from the kernel: a kernel that has touched CUDA or OpenMP can still start them.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import pickle
import shutil
import sys
import tempfile
import time
import weakref
from multiprocessing.connection import wait

import cloudpickle

from . import failure, output, server, worker
from .failure import RankError, RanksInterrupted, Seen
from .meter import BOX_BYTES
from .traffic import Traffic

START_SECONDS = 60  # for the fork server's imports on a slow machine
ANSWER_SECONDS = 0.2  # for a rank to say where it is
ABORT_SECONDS = 0.5  # for a rank to leave what it is in; then its process is ended
STREAM_AFTER = float(os.environ.get("THREE_AXES_STREAM_AFTER", 2))  # seconds before a call shows output while it runs

_OWN = object()  # as a call's timeout: the world's own
_numbers = itertools.count(1)
_open: weakref.WeakSet[World] = weakref.WeakSet()


def latest() -> World | None:
    """The open world made last: the one that %%ranks means."""
    return max((w for w in _open if w.is_open), key=lambda w: w.number, default=None)


class World:
    """n ranks beside the kernel, alive until `close()`, the end of a `with` block, or the end of the kernel.

    n: number of processes, 1 to 64. timeout: seconds after which a call counts as hung
    (None: never); `run(..., timeout=)` sets it for one call. counted: whether bytes are counted
    (`traffic`); without, collectives run untouched and failures cannot name them.
    Ranks talk over gloo on the loopback interface, and over NCCL as well where the
    machine has a GPU for each.
    """

    def __init__(self, n: int = 4, *, timeout: float | None = 30.0, counted: bool = True):
        if worker.here:
            raise RuntimeError(f"this is rank {worker.here.setup.rank} already: "
                               "a world is made in the notebook, not inside a rank")
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"World({n!r}): the number of ranks is a whole number from 1 to 64, such as World(4)")
        if not 1 <= n <= 64:
            raise ValueError(f"World({n}): the number of ranks is a whole number from 1 to 64, such as World(4)")
        self.n, self.timeout, self.number, self._counted = n, timeout, next(_numbers), counted
        self.traffic: Traffic | None = None  # of the last run() or cell
        self._calls = itertools.count(1)
        self._generation = 0
        self._broken = False  # a call was left in a way that only fresh ranks can mend
        self._receiving = False  # an answer is being read
        self._folder = tempfile.mkdtemp(prefix="three-axes-")
        self._ranks = _Ranks(self._folder)
        self._finalizer = weakref.finalize(self, self._ranks.end, folder=True)
        self._start()
        _open.add(self)

    # -- calls -----------------------------------------------------------------------

    def run(self, fn, *args, timeout: float | None = _OWN, **kwargs) -> list:
        """Call `fn(*args, **kwargs)` on every rank and return the results, rank 0's first.

        What the ranks print appears here, in rank order. `fn` may be defined in the notebook:
        it travels by value. Raises RankError when a rank raises, dies, or the call takes
        longer than `timeout` seconds, and RanksInterrupted when you press stop.
        """
        if not callable(fn):
            raise TypeError(f"run() takes a function and its arguments, not {fn!r}")
        try:
            job = cloudpickle.dumps((fn, args, kwargs))
        except Exception as e:
            raise TypeError(f"{getattr(fn, '__name__', fn)} or one of its arguments cannot be sent "
                            f"to the ranks ({e}); pass numbers, strings and tensors") from None
        return self._call("function", job, timeout=timeout)

    def cell(self, source: str, file: str = "<cell>", timeout: float | None = _OWN) -> list[str | None]:
        """Run the text `source` in every rank's namespace, as %%ranks does.

        Names stay from call to call; `rank`, `world_size`, `device`, `torch` and `dist` are there.
        Returns, per rank, the repr of the last line's value (None where it has none).
        """
        return self._call("cell", source, file, timeout=timeout)

    def push(self, **names) -> None:
        """Set variables in every rank's namespace: `world.push(lr=0.1)`."""
        self._call("push", cloudpickle.dumps(names), keep_traffic=False)

    def pull(self, name: str) -> list:
        """A variable's value on every rank, rank 0's first."""
        return self._call("pull", name, keep_traffic=False)

    # -- life ------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._finalizer.alive

    @property
    def pids(self) -> list[int]:
        """Process ids, rank 0's first."""
        return [p.pid for p in self._ranks.processes]

    def close(self) -> None:
        """End the ranks. Closing twice does no harm."""
        self._finalizer()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        if not self.is_open:
            return f"World({self.n}), closed"
        pids = ", ".join(map(str, self.pids))
        return f"World({self.n}): {self.n} ranks over {self._backend}, processes {pids}"

    def _start(self) -> None:
        """Fresh processes in a fresh group."""
        import torch
        cuda = torch.cuda.is_available() and torch.cuda.device_count() >= self.n
        self._backend, device = ("cpu:gloo,cuda:nccl", "cuda") if cuda else ("gloo", "cpu")
        environ = dict(os.environ, GLOO_SOCKET_IFNAME="lo" if sys.platform == "linux" else "lo0")
        server.warm()
        with server.main_hidden():
            for r in range(self.n):
                self._ranks.add(worker.Setup(r, self.n, self._backend, device, self._folder, environ,
                                              self._counted))
        captured = [output.Captured() for _ in range(self.n)]
        try:
            formed = self._join(START_SECONDS, captured)
        except BaseException:
            self.close()
            raise
        if not formed:
            self.close()
            raise RuntimeError(f"the {self.n} ranks could not start. They said:\n{output.fold(map(str, captured))}")
        self._broken = False

    def _join(self, seconds: float, captured=None) -> bool:
        """Have every rank form the group anew. False if one did not."""
        self._generation += 1
        number = next(self._calls)
        self._send("join", number, self._generation)
        joined, _ = self._collect("joined", number, range(self.n), seconds, captured)
        return len(joined) == self.n

    def _dead(self) -> list[int]:
        return [r for r, p in enumerate(self._ranks.processes) if p.exitcode is not None]

    def _restart(self) -> None:
        self._ranks.end()
        self._start()

    # -- one call --------------------------------------------------------------------

    def _call(self, kind: str, *details, timeout: float | None = _OWN, keep_traffic: bool = True) -> list:
        self._check_open()
        timeout = self.timeout if timeout is _OWN else timeout
        if self._broken:
            self._restart()
        number = next(self._calls)
        captured = [output.Captured() for _ in range(self.n)]
        view = _View(captured)
        try:
            self._send(kind, number, pickle.dumps(details))
            done, progress = self._collect("done", number, range(self.n), timeout, captured, view)
            failed = len(done) < self.n or not all(ok for ok, *_ in done.values())
            trouble = self._fail(number, done, captured, timeout) if failed else None
        except KeyboardInterrupt:
            if self._receiving:  # half an answer is in the pipe: nothing after it can be read
                self._restart()
            self._broken = True  # unless the ranks can be freed in good order, here
            trouble = self._interrupted(number, captured)
        finally:
            view.end()
        if trouble is not None:
            raise trouble
        if keep_traffic:
            self.traffic = Traffic([done[r][2] for r in range(self.n)])
        if not all(joined for *_, joined in done.values()):  # the reader destroyed the group: mend it
            self._mend([])
        return [pickle.loads(done[r][1]) for r in range(self.n)]

    def _check_open(self) -> None:
        if worker.here:
            raise RuntimeError("a world cannot be used inside a rank: call it from the notebook")
        if not self.is_open:
            raise RuntimeError(f"this World({self.n}) is closed; make a new one with World({self.n})")

    def _send(self, *message, to=None) -> None:
        data = pickle.dumps(message)
        for r in range(self.n) if to is None else to:
            try:
                self._ranks.controls[r].send_bytes(data)
            except OSError:
                pass  # it is gone, as its closed pipe will say

    def _collect(self, kind: str, number: int, members, seconds: float | None,
                 captured=None, view=None) -> tuple[dict[int, tuple], dict]:
        """Wait for the answers `kind` to call `number`, and read the ranks' output meanwhile.

        Returns early, with fewer answers, when one says that its rank failed, when a process ends,
        or after `seconds`. `captured` takes the output.
        """
        captured = captured or [output.Captured() for _ in range(self.n)]
        answers: dict[int, tuple] = {}
        progress: dict[int, tuple] = {}
        deadline = None if seconds is None else time.monotonic() + seconds
        of_control = {self._ranks.controls[r]: r for r in members}
        of_output = {self._ranks.outputs[r]: r for r in members}
        of_end = {self._ranks.processes[r].sentinel: r for r in members}
        while len(answers) < len(members):
            left = 0.25 if deadline is None else min(0.25, deadline - time.monotonic())
            if left <= 0:
                break
            ready = wait([*of_control, *of_output, *of_end], left)
            ended = False
            for item in ready:
                if item in of_output:
                    if not output.drain(item.fileno(), captured[of_output[item]]):
                        del of_output[item]
                elif item in of_control:
                    r = of_control[item]
                    try:
                        self._receiving = True
                        answer, its_number, *rest = pickle.loads(item.recv_bytes())
                        self._receiving = False
                    except (EOFError, OSError):
                        self._receiving = False
                        wait([self._ranks.processes[r].sentinel], 1)  # its pipe closes before its end is known
                        del of_control[item]
                        ended = True
                        continue
                    if its_number != number:
                        continue  # from a call that was given up
                    if answer == "progress":
                        progress[r] = tuple(rest)
                    elif answer == kind:
                        answers[r] = tuple(rest)
                        ended |= kind == "done" and not rest[0]
                else:
                    ended = True
            if view:
                view.tick(progress, self.n)
            if ended:
                break
        for r in members:  # all that was printed before the answer is in the pipe by now
            output.drain(self._ranks.outputs[r].fileno(), captured[r])
        return answers, progress

    # -- when a call fails -----------------------------------------------------------

    def _fail(self, number: int, done: dict, captured, timeout) -> RankError:
        """Find out what happened, free the ranks, mend the world, and say it all."""
        if self._dead() or not all(ok for ok, *_ in done.values()):  # let those who fail at the same moment say so
            done |= self._collect_rest(number, done, 0.05, captured)
            if done and all(ok or pickle.loads(error).follows for ok, error, *_ in done.values()):
                wait([p.sentinel for p in self._ranks.processes], 1)  # they lost a rank that is about to be known dead
        seen = self._look(number, done, captured)
        raised = [r for r, s in enumerate(seen) if s.error and not s.error.aborted]
        raised = [r for r in raised if not seen[r].error.follows] or raised
        dead = [r for r, s in enumerate(seen) if s.exit is not None]
        state = self._mend([r for r in range(self.n) if r not in done], number, captured, seen)
        dead = [r for r, s in enumerate(seen) if s.exit is not None] if dead else dead
        if dead:
            return RankError(failure.died(seen, dead, state), "died", dead, False, seen)
        if not raised:
            stuck = [r for r, s in enumerate(seen) if not s.finished]
            return RankError(failure.timeout(seen, timeout, state), "timeout", stuck, not self._lost, seen)
        if all(seen[r].error.cause == "result" for r in raised):
            return RankError(failure.result(seen, raised, state), "result", raised, not self._lost, seen)
        raised = [r for r in raised if not seen[r].error.cause]
        return RankError(failure.raised(seen, raised, state), "raised", raised, not self._lost, seen)

    def _interrupted(self, number: int, captured) -> RanksInterrupted:
        seen = self._look(number, {}, captured)
        busy = [r for r, s in enumerate(seen) if s.where is None or s.where["running"] == number]
        state = self._mend(busy, number, captured, seen)
        return RanksInterrupted(failure.interrupted(seen, state))

    def _collect_rest(self, number, done, seconds, captured) -> dict:
        """More answers within `seconds`, whether they tell of success or not."""
        found, until = {}, time.monotonic() + seconds
        while time.monotonic() < until:
            missing = [r for r in range(self.n) if r not in done and r not in found and r not in self._dead()]
            if not missing:
                break
            more, _ = self._collect("done", number, missing, until - time.monotonic(), captured)
            found |= more
            if not more:
                break
        return found

    def _look(self, number: int, done: dict, captured) -> list[Seen]:
        """What is known of every rank, asking those that are still in the call."""
        seen = [Seen() for _ in range(self.n)]
        for r, (ok, payload, *_) in done.items():
            seen[r].finished = ok
            seen[r].error = None if ok else pickle.loads(payload)
        asked = [r for r in range(self.n) if r not in done and r not in self._dead()]
        question = next(self._calls)
        self._send("where", question, to=asked)
        answers, _ = self._collect("where", question, asked, ANSWER_SECONDS, captured) if asked else ({}, None)
        for r in range(self.n):
            seen[r].exit = self._ranks.processes[r].exitcode
            seen[r].box = self._ranks.box(r)
            seen[r].said = str(captured[r])
            if r in answers:
                seen[r].where, = answers[r]
        return seen

    def _mend(self, busy: list[int], number: int = 0, captured=None, seen: list[Seen] | None = None) -> str:
        """Free `busy` ranks from call `number`, then form the group again; with fresh ranks where one is lost.

        Returns the sentence that tells what became of the ranks' variables.
        """
        freed = {}
        if busy and not self._dead():
            self._send("abort", number, to=busy)
            freed = self._collect_rest(number, {r: () for r in range(self.n) if r not in busy}, ABORT_SECONDS, captured)
        for r in self._dead():
            if seen and seen[r].exit is None:  # it died of being freed, or while it was asked
                seen[r].exit = self._ranks.processes[r].exitcode
                seen[r].said = str(captured[r]) if captured else ""
        self._lost = len(freed) < len(busy) or bool(self._dead()) or not self._join(5)
        if self._lost:
            self._restart()
            return "All ranks were started afresh: the variables of earlier cells are gone, so run those cells again."
        self._broken = False
        return ("The ranks are alive and keep their variables; their groups were formed anew."
                if self.n > 1 else "The rank is alive and keeps its variables.")


class _Ranks:
    """The processes of one world and the pipes to them. Holds no World, so that a forgotten World can end."""

    def __init__(self, folder: str):
        self.folder, self.owner = folder, os.getpid()
        self.processes, self.controls, self.outputs, self.leashes = [], [], [], []

    def add(self, setup: worker.Setup) -> None:
        context = server.context()
        mine, its = context.Pipe()
        printed, printing = context.Pipe(duplex=False)
        leashed, leash = context.Pipe(duplex=False)
        os.set_blocking(printed.fileno(), False)
        process = context.Process(target=worker.main, args=(setup, its, printing, leashed), daemon=True)
        self.processes.append(process)
        self.controls.append(mine)
        self.outputs.append(printed)
        self.leashes.append(leash)
        process.start()
        for end in (its, printing, leashed):
            end.close()

    def box(self, rank: int) -> dict | None:
        """The last collective that a rank entered in this call, also when its process is gone."""
        try:
            with open(os.path.join(self.folder, f"box-{rank}"), "rb") as f:
                return json.loads(f.read(BOX_BYTES).rstrip(b"\0"))
        except (OSError, ValueError):
            return None

    def end(self, folder: bool = False) -> None:
        """Kill the processes and close the pipes. Killing is safe: ranks own nothing that outlives them."""
        if os.getpid() != self.owner:
            return  # a fork of the kernel that ends: the ranks are not its own
        for p in self.processes:
            if p.pid is not None:
                p.kill()
        for p in self.processes:
            if p.pid is not None:
                p.join()
                p.close()
        for pipe in (*self.controls, *self.outputs, *self.leashes):
            pipe.close()
        self.processes, self.controls, self.outputs, self.leashes = [], [], [], []
        if folder:
            shutil.rmtree(self.folder, ignore_errors=True)


class _View:
    """What the reader sees of a call: its output at the end, and of a long one also on the way."""

    def __init__(self, captured):
        self.stream = output.Stream(captured)
        self.started = self.shown = time.monotonic()
        self.bar = None

    def tick(self, progress: dict[int, tuple[int, int | None]], n: int) -> None:
        now = time.monotonic()
        if now - self.started < STREAM_AFTER or now - self.shown < 0.2:
            return
        self.shown = now
        if text := self.stream.new():
            print(text, flush=True)
        if len(progress) == n:  # the slowest rank is how far the call is
            from tqdm.auto import tqdm
            done, total = min(progress.values(), key=lambda p: p[0])
            self.bar = self.bar or tqdm(total=total, leave=False)
            self.bar.update(done - self.bar.n)

    def end(self) -> None:
        if self.bar is not None:
            self.bar.close()
        if text := self.stream.rest():
            print(text, flush=True)


@atexit.register
def _end_all() -> None:
    for w in list(_open):
        w.close()
