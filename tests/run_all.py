"""What `make test` runs: tests and notebooks, in parallel; then a search for processes that are left behind,
which it ends. The run has a deadline: tests that still run then are printed, and ended.

`make test-all` adds `--all`. Without it, tests marked slow are left out, and fewer random cases are tried.
Tests marked exhaustive run once a week, and by `make attempts`. Other arguments are passed to pytest.

With `--gpu` (`make test-gpu`) it runs the tests marked gpu, on this machine's GPUs instead of stand-ins; four
ranks share the first GPU. Without a GPU that ranks can share, nothing is run, and the exit status is 2,
because a run that has tested nothing must not look like one that passed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
MINUTES = {"--all": 60, "--gpu": 8}
USUAL_MINUTES = 20
ON_GPU = "THREE_AXES_TEST_GPU"  # environment variable of tests on this machine's GPUs: the number of GPUs
FAILED = "THREE_AXES_TEST_FAILED"  # environment variable: the descriptor to which names of failed tests go
MARK = ("THREE_AXES_TEST", str(uuid.uuid4()))  # environment variable of every descendant of this run


def left_behind() -> list[psutil.Process]:
    """All processes that descend from this run."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended meanwhile, or belongs to another user
            if process.environ().get(MARK[0]) == MARK[1] and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def end(processes: list[psutil.Process], why: str) -> None:
    """Print these processes, and end them."""
    print(why, flush=True)
    for process in processes:
        with suppress(psutil.Error):
            print(f"  {process.pid}: {' '.join(process.cmdline())[:160]}", flush=True)
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def ends_with_its_parent() -> None:
    """In pytest, before it begins: make pytest and its workers end whenever this run ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def outlive() -> int:
    """Start a process that waits for the end of this one, in whatever way, and then ends all descendants:
    processes that pytest's workers have started do not end with them. Returns a pipe; a byte in it says that
    this process has ended normally.
    """
    watched, mine = os.pipe()
    if os.fork():
        os.close(watched)
        return mine
    os.close(mine)
    os.setsid()  # a terminal's Ctrl+C must not reach it
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(watched, 1):
        os._exit(0)  # this process has ended normally
    until = time.monotonic() + 5
    while time.monotonic() < until:  # a process that is being started has its environment in a moment
        for process in left_behind():
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.2)
    os._exit(0)


def run(command: list[str], minutes: float, env: dict[str, str], **how) -> int:
    """A command's exit status. At the deadline, prints the names of the tests that had failed, and ends the
    processes that still run; each of pytest's workers first prints the stacks of its threads.
    """
    with tempfile.TemporaryFile("w+") as failed:
        number = failed.fileno()
        how |= dict(env=env | {FAILED: str(number)}, pass_fds=[number], preexec_fn=ends_with_its_parent)
        tests = subprocess.Popen(command, **how)
        try:
            return tests.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            failed.seek(0)
            if names := failed.read():
                print(f"\nfailed before the deadline:\n{names}", end="", flush=True)
            with suppress(psutil.Error):
                for worker in psutil.Process(tests.pid).children():
                    worker.send_signal(signal.SIGABRT)
            time.sleep(2)
            end(left_behind(), f"not over after {minutes:g} minutes, and ended:")
            return tests.wait(60) or 1


def no_gpu() -> str:
    """Why ranks cannot share a GPU here; "" if they can."""
    sys.path.insert(0, str(ROOT))
    from three_axes import devices, nccl

    if not devices.gpus():
        return "no GPU here that PyTorch can use with NCCL: nothing was tried. `make test-all` has stand-ins"
    return "" if nccl.shares() or nccl.newer() else nccl.why_not(4, devices.gpus())


def main() -> int:
    kind = next((option for option in MINUTES if option in sys.argv), "")
    # No live output, because it differs from run to run.
    environ = os.environ | {MARK[0]: MARK[1], "THREE_AXES_STREAM_AFTER": "60", "THREE_AXES_PROGRESS": ""}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # thousands of processes would each compile the same files
    workers = max(2, os.cpu_count() or 2)  # more of them run into the tests' own timeouts
    if kind == "--gpu":
        if why := no_gpu():
            print(why, file=sys.stderr)
            return 2
        # One after the other, because the tests share the GPU; with their output, which has the numbers.
        command, chosen = "-m pytest -v -rPs --tb=short --durations=0 -m gpu", ["tests/train/test_gpus.py"]
        environ[ON_GPU] = "1"
    else:
        command = f"-m pytest --nbval --nbval-cell-timeout=300 -n {workers} --dist loadfile"
        command += f" --hypothesis-profile={'thorough' if kind else 'repeatable'}"
        command += " -o faulthandler_timeout=1800" * bool(kind)
        chosen = ["--no-loadscope-reorder", "tests", "notebooks", "-m"]
        chosen += ["not exhaustive" if kind else "not slow and not exhaustive"]
    chosen += [argument for argument in sys.argv[1:] if argument != kind]
    keeper = outlive()
    minutes = MINUTES.get(kind, USUAL_MINUTES)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        # PyTorch's compiler and torchrun make folders in TMPDIR otherwise, and leave them there.
        environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "PET_LOG_DIR": cache}
        status = run([sys.executable, *command.split(), *chosen], minutes, cwd=ROOT, env=environ)
    deadline = time.monotonic() + 5
    while (left := left_behind()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        end(left, "processes left behind, and ended:")
    os.write(keeper, b"!")
    return status or bool(left)


if __name__ == "__main__":
    sys.exit(main())
