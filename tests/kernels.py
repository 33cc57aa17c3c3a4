"""Kernels for the notebooks: they need no ports. They, and the servers from which their ranks come, are
forked from a process that has imported what takes longest and is not ours.
"""

import functools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from multiprocessing import get_context, util
from pathlib import Path
from unittest.mock import patch

from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import local_provisioner

# What `helpers.ranks.preload` has that is not ours, and what a kernel has. Not Matplotlib, which asks at
# once how it shall draw.
IMPORTED = [
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "cloudpickle",
    "ipykernel.kernelapp",
    "ipywidgets",
]


class WithoutPorts(KernelManager):
    """A kernel's five ports are chosen a second before it takes them, and ranks of other tests may take one
    meanwhile. Then it never answers. So it listens in files.
    """

    def __init__(self, **kwargs):
        super().__init__(
            transport="ipc", ip=str(Path(tempfile.gettempdir()) / f"kernel-{uuid.uuid4().hex}"), **kwargs
        )


class Forked(WithoutPorts):
    """The kernel is forked on Linux. A new Python would need two seconds of the processor for imports, and
    another one for its ranks three.
    """

    async def _async_launch_kernel(self, command, **how):
        if sys.platform != "linux":
            return await super()._async_launch_kernel(command, **how)
        with patch.object(local_provisioner, "launch_kernel", _fork):
            await super()._async_launch_kernel(command, **how)


class _Popen:
    """What jupyter_client asks of a `subprocess.Popen`, for a forked process."""

    stdin = stdout = stderr = None

    def __init__(self, process):
        self._process, self.pid = process, process.pid
        self.kill, self.terminate = process.kill, process.terminate

    returncode = property(lambda self: self._process.exitcode)

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


@functools.cache
def _server():
    """One beside that of ranks, which has imported `helpers`."""
    from multiprocessing import forkserver  # not on every system

    server = forkserver.ForkServer()
    server.set_forkserver_preload(IMPORTED)
    return server


@functools.cache
def _path() -> list[str]:
    """Where a new Python looks for modules, but for the folder that it starts in."""
    code = "import sys; print(*sys.path[1:], sep='\\n')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()


def _fork(command: list[str], *, env: dict, cwd: str | None = None, **_) -> _Popen:
    module = command.index("-m") + 1
    context = get_context("forkserver")
    ready, begun = context.Pipe(duplex=False)
    process = context.Process(
        target=_be_a_kernel, args=(begun, command[module:], env, cwd or os.getcwd(), _path())
    )
    with patch("multiprocessing.forkserver.connect_to_new_process", _server().connect_to_new_process):
        process.start()
    ready.recv()  # it has a process group of its own, which is asked for next
    return _Popen(process)


def _be_a_kernel(begun, command: list[str], env: dict, cwd: str, path: list[str]) -> None:
    os.setsid()
    begun.send(True)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env, JPY_PARENT_PID=str(os.getppid()))  # it ends with its parent
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    sys.path[:] = [cwd, *path]
    sys.argv = command
    util.spawnv_passfds = _with_a_process_in_waiting(util.spawnv_passfds)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _with_a_process_in_waiting(spawn):
    """`multiprocessing.util.spawnv_passfds`, which gives its first forkserver to a process that is forked
    now, while the kernel has one thread and none of its own modules.
    """
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _wait_for_a_program(its)
    its.close()
    waiting = [pid]

    def spawn_or_hand_over(path, arguments, fds):
        if not waiting or "multiprocessing.forkserver" not in arguments[-1]:
            return spawn(path, arguments, fds)
        message = json.dumps([arguments[-1], list(fds), os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(ours, [len(message).to_bytes(8, "big")], fds)
        ours.sendall(message)
        ours.close()
        return waiting.pop()

    return spawn_or_hand_over


def _wait_for_a_program(its: socket.socket) -> None:
    """In the process in waiting: be what `python -c PROGRAM` is, which hears no stop button."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    length, fds, _, _ = socket.recv_fds(its, 8, 8)
    if not length:
        os._exit(0)  # the kernel has ended and never had ranks
    with its.makefile("rb") as file:
        program, numbers, cwd, environ = json.loads(file.read(int.from_bytes(length, "big")))
    its.close()
    beyond = 100  # its descriptors have small numbers: none of those that are wanted is in use there
    aside = [os.dup2(fd, beyond + i) for i, fd in enumerate(fds)]
    for fd, number in zip(aside, numbers):
        os.dup2(fd, number)
    for fd in {*fds, *aside} - set(numbers):
        os.close(fd)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[0] = cwd
    sys.argv = ["-c"]
    try:
        exec(program, {"__name__": "__main__"})
    finally:
        os._exit(0)


# What ranks run lies on top of these three. In a picture of their stack they must not pass for the reader's.
for _body in (_be_a_kernel, _with_a_process_in_waiting, _wait_for_a_program):
    _body.__code__ = _body.__code__.replace(co_filename="<frozen kernels>")
