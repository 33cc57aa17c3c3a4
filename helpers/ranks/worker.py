"""One rank: a process that joins the group, waits for calls, runs them, and answers.

Two threads. The main thread runs the reader's code. The other one listens to the
kernel all the time, so that a rank stuck in a collective can still say where it is
and can be freed. The two pipes to the kernel are not TCP: freeing a rank cuts all TCP.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import multiprocessing
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from datetime import timedelta

import cloudpickle
import numpy
import torch
import torch.distributed as dist

from three_axes import cpython_private, devices, lines, pytorch_private
from three_axes.count import OwnThread, Report, interposer, meter, wire

from ..emulate import Budget, Fabric
from . import current, flight
from .lifetime import end_with_kernel, name_process
from .messages import Error, Setup, dumps_result, shown

NOT_FORKED = (
    "A process with a GPU may not be forked, so a loader's workers import what they load: define the Dataset"
    " in a file and import it, or write num_workers=0."
)
ABORTS = 2.0  # seconds for NCCL to abort its communicators before connections are cut
HEARS = 1.0  # seconds within which every rank that the kernel frees has received that message


class Aborted(BaseException):
    """Raised in the reader's code when the kernel ends the call.

    Not an Exception: `except Exception` lets it pass.
    """


def main(control, output, leash) -> None:
    """Body of a rank's process. The first message says which rank it is.

    control: a two-way pipe to the kernel. output: takes what is printed. leash: closes with the kernel.
    """
    end_with_kernel(leash)
    name_process("a spare rank")
    try:
        setup: Setup = pickle.loads(control.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)  # the kernel has ended, and did not need this spare
    name_process(f"rank {setup.rank} of {setup.size}")
    os.environ.clear()
    os.environ.update(setup.environ)
    sys.path[:] = setup.path
    with suppress(OSError):  # a spare started in the kernel's folder of that time
        os.chdir(setup.cwd or ".")
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    torch.set_num_threads(1)  # ranks share the machine's cores: more threads only get in each other's way
    # Forked from one process, all ranks would draw the same random numbers.
    (torch.manual_seed(setup.rank), random.seed(setup.rank), numpy.random.seed(setup.rank))
    cpython_private.allow_children()
    if setup.device == "cpu" and sys.platform == "linux":
        # A cell's Dataset has no module that a new process could import. A GPU's process may not be forked.
        multiprocessing.set_start_method("fork", force=True)
    current.rank = Rank(setup, control)
    current.rank.serve()


def _made_groups() -> bool:
    """Whether this process has groups, meshes or models of a group that the world is about to replace."""
    if not dist.is_initialized():
        return False
    kinds = (dist.DeviceMesh, torch.nn.parallel.DistributedDataParallel)
    return len(pytorch_private.groups()) > 1 or any(issubclass(type(x), kinds) for x in gc.get_objects())


class Rank:
    """This process as a rank: its group, its names, the call under way."""

    def __init__(self, setup: Setup, control):
        self.setup, self.control = setup, control
        self.device = torch.device(setup.device)
        self.sending = threading.Lock()
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.running: int | None = None  # number of the call the main thread is in
        self.ended: int | None = None  # number of the call that the main thread has ended last
        self.returned: int | None = None  # number of the last call in which the reader's code has returned
        self.aborting: int | None = None
        self.freeing: threading.Thread | None = None  # the thread that frees the main one
        self.cuts_first = False  # cut connections before forming the group anew: an operation has not ended
        self.began = 0.0  # when the running call began
        self.since = 0  # the same moment by the clock of the flight recorder, in nanoseconds
        signal.signal(signal.SIGINT, self._interrupted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server blocks it
        box = os.open(os.path.join(setup.folder, f"box-{setup.rank}"), os.O_RDWR | os.O_CREAT, 0o600)
        self.recorder = meter.Recorder(box, setup.counted)
        self.budget = Budget(setup.rank, setup.memory) if setup.memory else None
        self.names: dict = {}

    # -- the main thread -------------------------------------------------------------

    def serve(self) -> None:
        """Do what the kernel asks, one job after another. Does not return."""
        OwnThread(self._listen).start()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.names.update(__name__="__main__", torch=torch, dist=dist, device=self.device)
        self.names.update(rank=self.setup.rank, world_size=self.setup.size)
        while True:
            kind, number, *details = self.jobs.get()
            if kind == "join":
                had_groups = _made_groups()
                with self.recorder.moves.before.adopting():
                    self._join(*details)
                self._send("joined", number, had_groups)
            else:
                answer = self._call(number, kind, *details)
                if current.rank is None:
                    os._exit(0)  # the reader's code has forked, and this is the fork
                self.ended = number  # from here on the main thread runs none of the reader's code
                self._send("done", number, *answer)

    def _join(self, generation: int) -> None:
        """Form the group, or form it again: same processes, same variables, new connections."""
        if self.freeing:
            self.freeing.join()  # it cuts connections, and must not cut the new ones
        if self.cuts_first:  # else the group would wait for what is under way in it
            wire.cut()
        self.cuts_first = False
        if dist.is_initialized():
            dist.destroy_process_group()
        interposer.use(None)
        os.makedirs(self.setup.folder, exist_ok=True)
        meeting = os.path.join(self.setup.folder, f"meeting-{generation}")
        how = dict(timeout=timedelta(minutes=30), rank=self.setup.rank, world_size=self.setup.size)
        dist.init_process_group(devices.BACKENDS[self.device.type], init_method=f"file://{meeting}", **how)
        self.recorder.look(dist.group.WORLD)  # once here, instead of in every call
        if self.setup.fabric:
            interposer.use(Fabric(self.setup.fabric, self.setup.folder, generation))
        # Groups are found by name. A mesh made before must not find another group under its old name.
        pytorch_private.number_groups_from(1000 * generation)

    def _call(self, number: int, kind: str, payload: bytes, path: list[str]):
        """Run one call. Returns (ok, pickled result or Error, Report, is the group still there)."""
        sys.path[:] = path
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
        interposer.axes.forget()
        self.recorder.start()
        self.recorder.moves.start()  # `count_from_here` does not reset these
        value, error = None, None
        try:
            try:
                self.running, self.began, self.since = number, time.monotonic(), time.time_ns()
                with self.budget or nullcontext():
                    value = getattr(self, "_" + kind)(*pickle.loads(payload))
                self.returned = number
                self.recorder.finish()
                # Wait for the GPU: a collective that hangs there belongs to this call, not to the next.
                devices.synchronize(self.device)
            finally:
                self.running = None  # from here on an interrupt is ignored
        except BaseException as e:  # noqa: BLE001  the reader's code may raise anything, SystemExit included
            # If the rank was freed after its return, it was still in an operation that the reader's code
            # started and never waited for: no error. Another rank that is freed now may cut the connection
            # before this rank has received its own message, so wait for that message.
            until = time.monotonic() + HEARS
            while self.returned == number != self.aborting and time.monotonic() < until:
                time.sleep(0.01)
            if not self.aborting == self.returned == number:
                error = self._describe(e, aborted=self.aborting == number)
        try:
            report = self.recorder.stop()
        except OSError as e:  # nothing can be counted without file descriptors: report it as the call's error
            report, error = Report(), error or self._describe(e)
        if self.budget:
            report.levels = self.budget.take_levels()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the reader's code has closed or replaced it
                pass
        ctypes.CDLL(None).fflush(None)  # C++ has its own buffer of printed text
        self.cuts_first = report.under_way > 0 or self.recorder.has_failed
        # If an operation failed and the reader's code continued, a connection may be lost.
        is_joined = dist.is_initialized() and not self.recorder.has_failed and self.aborting != number
        if error is None:
            try:
                return True, dumps_result(value), report, is_joined
            except BaseException as e:  # noqa: BLE001  the reader's __reduce__ may raise anything too
                message = f"{type(value).__name__}: {shown(e)}"
                error = self._describe(e)._replace(cause="result", message=message)
        return False, cloudpickle.dumps(error), report, is_joined

    def _function(self, fn: bytes):
        function, args, kwargs = pickle.loads(fn)
        return function(*args, **kwargs)

    def _cell(self, source: str, file: str):
        """Run a cell in this rank's namespace.

        The value of a last line that is an expression is the result.
        """
        tree = ast.parse(source, file)
        ends = tree.body and isinstance(tree.body[-1], ast.Expr)
        last = ast.Expression(tree.body.pop().value) if ends else None
        exec(compile(tree, file, "exec"), self.names)
        if last is None:
            return None
        value = eval(compile(last, file, "eval"), self.names)
        return None if value is None else repr(value)

    def _push(self, names: bytes) -> None:
        self.names.update(pickle.loads(names))

    def _pull(self, name: str):
        if name not in self.names:
            raise NameError(
                f"rank {self.setup.rank} has no variable {name!r}; "
                f"a %%ranks cell or push({name}=...) makes one"
            )
        return self.names[name]

    def _describe(self, e: BaseException, aborted: bool = False) -> Error:
        frames = [lines.Line(f.filename, f.lineno, f.name) for f in traceback.extract_tb(e.__traceback__)]
        if isinstance(e, SyntaxError) and e.lineno:
            frames = [lines.Line(e.filename or "?", e.lineno, "")]
        message = [shown(e.msg if isinstance(e, SyntaxError) else e)]
        if isinstance(e, SystemExit) and e.code is None:
            message = [""]
        try:
            message += map(shown, list(e.__notes__)[:20])
        except BaseException:  # noqa: BLE001  no notes, or the reader's class defines __notes__ itself
            pass
        if e.__cause__ is not None:
            message.append(f"caused by {type(e.__cause__).__name__}: {shown(e.__cause__)}")
        if self.device.type == "cuda" and "pickle <" in message[0] and "__main__" in message[0]:
            message.append(NOT_FORKED)
        return Error(type(e).__name__, "\n".join(message), lines.readers(frames), aborted)

    # -- the listening thread --------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                kind, *details = pickle.loads(self.control.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the kernel is gone
            if kind == "where":
                self._send("where", *details, self._where())
            elif kind == "moves":
                question, number = details
                # Not counted, no moves are recorded; until this call has begun, they are of the call before.
                is_its = self.recorder.on and number in (self.running, self.ended)
                look = self.recorder.moves.look(self.ended == number) if is_its else None
                self._send("moves", question, look, self.returned == number)
            elif kind == "abort":
                self.freeing = threading.Thread(target=self._abort, args=details, daemon=True)
                self.freeing.start()
            else:
                self.jobs.put((kind, *details))

    def _where(self) -> dict:
        """What the main thread is doing now; the kernel reports it to the reader."""
        if self.device.type == "cpu":  # on GPUs NCCL's watchdog does
            flight.write(self.setup.rank, self.since)
        frame = lines.of_threads(sys._current_frames).get(threading.main_thread().ident)
        line = lines.innermost(frame)
        forms = self._forming(frame, line)
        return {
            "running": self.running,
            "returned": self.running == self.returned,
            "line": line,
            "stack": lines.stack(frame),
            "in": self.recorder.pending() or forms,
            "waits": bool(self.recorder.moves.awaited() or interposer.is_issuing or forms),
            "help": self.recorder.moves.why(),
        }

    def _forming(self, frame, line) -> dict | None:
        """Making a group also blocks until all ranks do it, though it is no collective."""
        for caller in lines.callers(frame):
            if caller.f_code.co_name == "new_group" and "distributed" in caller.f_code.co_filename:
                needs, unknown = list(range(self.setup.size)), dict.fromkeys(("shape", "dtype", "peer"))
                return dict(op="new_group", axis="world", line=line, at=self.began, needs=needs, **unknown)
        return None

    def _abort(self, number: int) -> None:
        """End the call: free the main thread from a collective, then from what Python can interrupt."""
        self.aborting = number
        aborts = threading.Thread(target=self._free_gpu, daemon=True)
        if self.device.type == "cuda":
            # First abort: NCCL takes a cut connection for an error, and its watchdog then delays the end of
            # the group. But where NCCL itself waits for a connection, only cutting that connection helps.
            aborts.start()
            aborts.join(ABORTS)
        wire.cut()
        if interposer.fabric:
            interposer.fabric.close()
        while self.running == number:
            time.sleep(0.1)  # a cut collective raises by itself, and names a better line than SIGINT would
            if self.running == number:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if aborts.ident:
            aborts.join()  # it ends groups, and must not end the new ones

    @staticmethod
    def _free_gpu() -> None:
        """Abort NCCL's communicators, and with them the groups. NCCL's collectives wait on the GPU, without a
        connection that could be cut.
        """
        try:
            pytorch_private.abort_groups()
        except Exception:  # noqa: BLE001  then the kernel ends this process
            pass

    def _interrupted(self, *_) -> None:
        if self.running is not None and self.aborting == self.running:
            raise Aborted("ended by the kernel")

    def _send(self, *message) -> None:
        with self.sending:
            self.control.send_bytes(pickle.dumps(message))

    # -- for the reader's code -------------------------------------------------------

    def tell(self, done: int, total: int | None) -> None:
        """Report to the kernel how far the call has progressed. Outside a call, nothing is sent."""
        if self.running is not None:
            self._send("progress", self.running, done, total)
