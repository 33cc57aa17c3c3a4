"""Runs commands in processes that are forked from the ranks' fork server (`helpers.ranks.server`). The server
has imported torch; in a new Python that import takes longer than most commands. `python` runs code in a new
Python, where nothing is imported yet.
"""

import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE = 5.0  # seconds for the other ranks, when one has failed


def context():
    """The multiprocessing context of these processes: fork server, or spawn where ranks are spawned."""
    from helpers.ranks import server

    server.warm(0)
    return get_context("spawn" if server.spawns() else "forkserver")


def command(
    *argv: str, cwd, ranks: int = 1, timeout: float = 120, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run `python -m` with these words; on several ranks run them as torchrun does, with their outputs one
    after the other. environ: added to the environment.
    """
    import torch.distributed as dist

    from helpers.ranks import server

    surroundings = [{}]
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": ranks}
        common |= {"LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        surroundings = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    surroundings = [(environ or {}) | mine for mine in surroundings]
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(ranks)]
        for file, mine in zip(files, surroundings):
            file.mkdir()
            mine["TORCHELASTIC_ERROR_FILE"] = file / "error.json"
        made = lambda *mine: context().Process(target=_run, args=(argv, str(cwd), *mine))
        processes = list(map(made, surroundings, files))
        try:
            with server.main_hidden():
                for process in processes:
                    process.start()
            while alive := [process for process in processes if process.exitcode is None]:
                if any(process.exitcode for process in processes):  # torchrun ends the others then
                    deadline = min(deadline, time.monotonic() + GRACE)
                left = deadline - time.monotonic()
                if left <= 0 or not wait([process.sentinel for process in alive], left):
                    for process in alive:  # each prints the stacks of its threads
                        os.kill(process.pid, signal.SIGABRT)
                    time.sleep(0.5)
                    break
        finally:
            for process in processes:
                process.kill()
                process.join()  # a killed process ends
        out, err = ("".join(file.with_suffix(end).read_text() for file in files) for end in (".out", ".err"))
    status = next((process.exitcode for process in processes if process.exitcode), 0)
    return subprocess.CompletedProcess(argv, status, out, err)


def python(code: str, cwd=ROOT, timeout: float = 300, **environ: str) -> subprocess.CompletedProcess:
    """What a new Python does with this code. environ: what is added to the environment."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "notebooks")])
    how = dict(cwd=cwd, env=os.environ | {"PYTHONPATH": path} | environ, capture_output=True, text=True)
    return subprocess.run([sys.executable, "-c", code], timeout=timeout, **how)


def end_with_starter() -> None:
    """In a process that this file has started: end when the parent has ended, in whatever way. Otherwise the
    process would wait for work, and keep the fork server alive.
    """
    from helpers.ranks.lifetime import end_with_kernel

    end_with_kernel(Connection(os.dup(parent_process().sentinel), writable=False))


def _run(argv: tuple[str, ...], cwd: str, environ: dict, path: Path) -> None:
    """In the new process: run a module. Its outputs go to files beside `path`: path.out and path.err."""
    end_with_starter()
    for fd, end in ((1, ".out"), (2, ".err")):
        with path.with_suffix(end).open("wb") as file:
            os.dup2(file.fileno(), fd)
    faulthandler.enable()
    os.chdir(cwd)
    os.environ.update({name: str(value) for name, value in environ.items()})
    sys.argv = list(argv)
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
