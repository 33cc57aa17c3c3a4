"""One rank: a process that joins the group, waits for calls from the notebook's kernel, runs them, and
answers.

The main thread runs the user's code. A second thread listens to the kernel all the time. So a rank whose main
thread is blocked in a collective can still report its position, and be freed by cutting its TCP connections.
(Its pipes to the kernel are no TCP connections, and stay.)
"""

from __future__ import annotations

import ast
import bdb
import ctypes
import gc
import multiprocessing
import os
import pdb
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
import tqdm

from three_axes import cpython_private, devices, lines, pytorch_private
from three_axes.count import OwnThread, Report, interposer, meter, wire

from ..emulate import Budget, Fabric
from . import current, flight
from .lifetime import end_with_kernel, name_process
from .messages import Error, Setup, dumps_result, text_of

NOT_FORKED = (
    "A process with a GPU may not be forked, so a loader's workers import what they load: define the Dataset"
    " in a file and import it, or write num_workers=0."
)
NO_KEYBOARD = "breakpoint() and pdb read the keyboard, and the input of a rank is empty"
NCCL_ABORT_SECONDS = 2.0  # for NCCL to abort its communicators, before connections are cut
MESSAGE_SECONDS = 1.0  # for the message 'abort' to arrive: the kernel sends it to the ranks one by one


class Aborted(BaseException):
    """Raised in the reader's code when the kernel ends the call.

    Not an Exception: `except Exception` lets it pass.
    """


def main(control, output, leash) -> None:
    """Body of a rank's process. The first message is its `Setup`. Does not return.

    control: a two-way pipe to the kernel. output: the pipe for what this process prints. leash: a pipe whose
    other end only the kernel holds, so it closes when the kernel ends.
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
    with suppress(OSError):  # the kernel may have changed its folder since this spare started
        os.chdir(setup.cwd or ".")
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    torch.set_num_threads(1)  # ranks share the machine's cores: more threads only get in each other's way
    # All ranks are forked from one process: without seeds of their own they would draw the same numbers.
    (torch.manual_seed(setup.rank), random.seed(setup.rank), numpy.random.seed(setup.rank))
    cpython_private.allow_children()
    if setup.device == "cpu" and sys.platform == "linux":
        # A cell's Dataset has no module that a new process could import. A GPU's process may not be forked.
        multiprocessing.set_start_method("fork", force=True)
    current.rank = Rank(setup, control)
    current.rank.serve()


def _has_groups() -> bool:
    """Whether this process has subgroups, meshes or DDP models, which do not work in a group formed anew."""
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
        self.running: int | None = None  # number of the call that the main thread runs
        self.ended: int | None = None  # number of the call that the main thread ended last
        self.returned: int | None = None  # number of the last call in which the reader's code returned
        self.aborting: int | None = None  # number of the call that the kernel ended last
        self.freeing: threading.Thread | None = None  # the thread that frees the main thread
        self.cuts_first = False  # an operation has not ended: cut connections before forming the group anew
        self.began = 0.0  # time.monotonic() at the start of the running call
        self.began_ns = 0  # time.time_ns() at the same moment: the flight recorder's clock
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
        tqdm.tqdm.monitor_interval = 0  # a bar's monitor is a thread: while it runs no hang ends a call early
        self.names.update(__name__="__main__", torch=torch, dist=dist, device=self.device)
        self.names.update(rank=self.setup.rank, world_size=self.setup.size)
        while True:
            kind, number, *details = self.jobs.get()
            if kind == "join":
                had_groups = _has_groups()
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
            self.freeing.join()  # that thread cuts connections, and must not cut the new ones
        if self.cuts_first:  # otherwise the end of the group would wait for the operation under way in it
            wire.cut()
        self.cuts_first = False
        if dist.is_initialized():
            dist.destroy_process_group()
        interposer.use(None)
        os.makedirs(self.setup.folder, exist_ok=True)
        rendezvous = os.path.join(self.setup.folder, f"meeting-{generation}")
        own = dict(timeout=timedelta(minutes=30), rank=self.setup.rank, world_size=self.setup.size)
        backend = devices.BACKENDS[self.device.type]
        dist.init_process_group(backend, init_method=f"file://{rendezvous}", **own)
        self.recorder.find_connections(dist.group.WORLD)  # once, not in every call
        if self.setup.fabric:
            interposer.use(Fabric(self.setup.fabric, self.setup.folder, generation))
        # Groups are found by name. A mesh made before must not find another group under its old name.
        pytorch_private.number_groups_from(1000 * generation)

    def _call(self, number: int, kind: str, payload: bytes, path: list[str]):
        """Run one call by the method for its kind, such as `_cell`. payload: that method's arguments,
        pickled. path: the kernel's sys.path. Returns (whether the call succeeded, its pickled result or
        Error, its Report, whether this rank is still a member of the group).
        """
        sys.path[:] = path
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
        interposer.axes.forget()
        self.recorder.start()
        self.recorder.moves.start()  # `count_from_here` does not reset these
        value, error = None, None
        try:
            try:
                self.running, self.began, self.began_ns = number, time.monotonic(), time.time_ns()
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
            # started and never waited for: no error. Another rank that is being freed may cut the connection
            # before the message 'abort' has arrived on this rank, so wait for that message.
            until = time.monotonic() + MESSAGE_SECONDS
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
            except Exception:  # the reader's code has closed or replaced the stream
                pass
        ctypes.CDLL(None).fflush(None)  # text that C++ code has printed is in a buffer of its own
        self.cuts_first = report.under_way > 0 or self.recorder.has_failed
        # If an operation failed and the reader's code continued, a connection may be lost.
        is_joined = dist.is_initialized() and not self.recorder.has_failed and self.aborting != number
        if error is None:
            try:
                return True, dumps_result(value), report, is_joined
            except BaseException as e:  # noqa: BLE001  the reader's __reduce__ may raise anything too
                message = f"{type(value).__name__}: {text_of(e)}"
                error = self._describe(e)._replace(cause="result", message=message)
        return False, cloudpickle.dumps(error), report, is_joined

    def _function(self, job: bytes):
        function, args, kwargs = pickle.loads(job)
        return function(*args, **kwargs)

    def _cell(self, source: str, file: str):
        """Run a cell in this rank's namespace. Returns the repr of its last line's value; None if that line
        is no expression, or its value is None.
        """
        tree = ast.parse(source, file)
        ends_in_expression = tree.body and isinstance(tree.body[-1], ast.Expr)
        last = ast.Expression(tree.body.pop().value) if ends_in_expression else None
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
        """The Error to send for an exception: its type, its message with notes and cause, its lines."""
        walked = traceback.walk_tb(
            e.__traceback__
        )  # reads no files: a recursion may be a million frames deep
        frames = [lines.Line(f.f_code.co_filename, number, f.f_code.co_name) for f, number in walked]
        if isinstance(e, SyntaxError) and e.lineno:
            frames = [lines.Line(e.filename or "?", e.lineno, "")]
        kind, message = type(e).__name__, [text_of(e.msg if isinstance(e, SyntaxError) else e)]
        if isinstance(e, SystemExit) and e.code is None:
            message = [""]
        debugger = [place for place, line in enumerate(frames) if line.file in (bdb.__file__, pdb.__file__)]
        if debugger and isinstance(e, (bdb.BdbQuit, SystemExit)):  # SystemExit since Python 3.14
            kind, message, frames = bdb.BdbQuit.__name__, [NO_KEYBOARD], frames[: debugger[0]]
        try:
            message += map(text_of, list(e.__notes__)[:20])
        except BaseException:  # noqa: BLE001  no notes, or the reader's class defines __notes__ itself
            pass
        if e.__cause__ is not None:
            message.append(f"caused by {type(e.__cause__).__name__}: {text_of(e.__cause__)}")
        if self.device.type == "cuda" and "pickle <" in message[0] and "__main__" in message[0]:
            message.append(NOT_FORKED)
        return Error(kind, "\n".join(message), lines.readers(frames), aborted)

    # -- the listening thread --------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                kind, *details = pickle.loads(self.control.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the kernel has ended
            if kind == "where":
                self._send("where", *details, self._where())
            elif kind == "moves":
                question, number = details
                # Not counted, no moves are recorded; until the call has begun, they are of the previous call.
                is_recorded = self.recorder.on and number in (self.running, self.ended)
                state = self.recorder.moves.snapshot(self.ended == number) if is_recorded else None
                self._send("moves", question, state, self.returned == number)
            elif kind == "abort":
                self.freeing = threading.Thread(target=self._abort, args=details, daemon=True)
                self.freeing.start()
            else:
                self.jobs.put((kind, *details))

    def _where(self) -> dict:
        """What the main thread is doing now. running: number of its call, None between calls. returned:
        whether the reader's code has returned. in: the record of its collective, as in the box, or None.
        waits: whether it waits for other ranks. may: why that wait may end, or what may act; or "".
        """
        if self.device.type == "cpu":  # `flight` reads gloo's record only
            flight.write(self.setup.rank, self.began_ns)
        frame = lines.frames_of_threads().get(threading.main_thread().ident)
        line = lines.innermost(frame)
        new_group = self._in_new_group(frame, line)
        return {
            "running": self.running,
            "returned": self.running == self.returned,
            "line": line,
            "stack": lines.stack(frame),
            "in": self.recorder.pending() or new_group,
            "waits": bool(self.recorder.moves.awaited() or interposer.is_issuing or new_group),
            "may": self.recorder.moves.may_end() or self.recorder.moves.thread(),
        }

    def _in_new_group(self, frame, line) -> dict | None:
        """If the main thread is inside `new_group`, a record as of a collective: it too blocks until all
        ranks call it, with the same ranks. Otherwise None.
        """
        for caller in lines.callers(frame):
            if caller.f_code.co_name == "new_group" and "distributed" in caller.f_code.co_filename:
                members = caller.f_locals.get("ranks")
                op = "new_group" if members is None else f"new_group({list(members)})"
                needs, unknown = list(range(self.setup.size)), dict.fromkeys(("shape", "dtype", "peer"))
                return dict(op=op, axis="world", line=line, at=self.began, needs=needs, **unknown)
        return None

    def _abort(self, number: int) -> None:
        """End call `number`: free the main thread from a collective, then interrupt its Python code."""
        self.aborting = number
        aborter = threading.Thread(target=self._abort_nccl, daemon=True)
        if self.device.type == "cuda":
            # First abort, because NCCL takes a cut connection for an error, and its watchdog then delays the
            # end of the group. But where NCCL itself waits for a connection, only cutting it helps.
            aborter.start()
            aborter.join(NCCL_ABORT_SECONDS)
        wire.cut()
        if interposer.fabric:
            interposer.fabric.close()
        while self.running == number:
            time.sleep(0.1)  # a cut collective raises by itself, and names a better line than SIGINT would
            if self.running == number:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if aborter.ident:  # it was started
            aborter.join()  # it ends groups, and must not end the new ones

    @staticmethod
    def _abort_nccl() -> None:
        """Abort NCCL's communicators, and with them the groups. NCCL's collectives wait on the GPU, where
        cutting a connection does not free them.
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

    def report_progress(self, done: int, total: int | None) -> None:
        """Report to the kernel that `done` of `total` steps of the call are done. Outside a call, send
        nothing.
        """
        if self.running is not None:
            self._send("progress", self.running, done, total)
