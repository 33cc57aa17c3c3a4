"""What `make test` runs: tests and notebooks, in parallel; then a look for processes left behind, which it
ends. It has a deadline: what still runs then is printed, and ended.

Without `--all`, what `make test-all` gives, tests marked slow are left out, and of cases made at random fewer
are tried. What is marked exhaustive runs once a week, and by `make attempts`. Other arguments go to pytest.

With `--gpu`, `make test-gpu`, it runs what is marked gpu, on this machine's GPUs instead of stand-ins, where
four ranks share the first. Without a GPU that they can share nothing is tried, and the status is 2: a run
that has tested nothing must not look like one that passed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
MINUTES = {"--all": 60, "--gpu": 8}
USUAL_MINUTES = 20
ON_GPU = "THREE_AXES_TEST_GPU"  # in the environment of tests that shall take this machine's GPUs: how many
MARK = "THREE_AXES_TEST", str(uuid.uuid4())  # in the environment of everything that descends from this run


def left_behind() -> list[psutil.Process]:
    """All processes that descend from this run."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # gone meanwhile, or somebody else's
            if process.environ().get(MARK[0]) == MARK[1] and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def end(processes: list[psutil.Process], why: str) -> None:
    """Print what these are, and end them."""
    print(why, flush=True)
    for process in processes:
        with suppress(psutil.Error):
            print(f"  {process.pid}: {' '.join(process.cmdline())[:160]}", flush=True)
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def ends_with_its_parent() -> None:
    """In pytest, before it begins: however this run is ended, pytest is, and with it its workers."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def outlive() -> int:
    """Start a process that waits for the end of this one, however it comes, and ends what descends from it
    then: what pytest's workers have started does not end with them. Returns a pipe; a byte in it says that
    this process has ended well.
    """
    watched, mine = os.pipe()
    if os.fork():
        os.close(watched)
        return mine
    os.close(mine)
    os.setsid()  # a terminal's Ctrl+C is not for it
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(watched, 1):
        os._exit(0)  # all is well
    until = time.monotonic() + 5
    while time.monotonic() < until:  # what is being started has its environment in a moment
        for process in left_behind():
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.2)
    os._exit(0)


def run(command: list[str], minutes: float, **how) -> int:
    """A command's exit status. What still runs when its time is up is ended: each of pytest's workers writes
    first where its threads are.
    """
    tests = subprocess.Popen(command, preexec_fn=ends_with_its_parent, **how)
    try:
        return tests.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        with suppress(psutil.Error):
            for worker in psutil.Process(tests.pid).children():
                worker.send_signal(signal.SIGABRT)
        time.sleep(2)
        end(left_behind(), f"not over after {minutes:g} minutes, and ended:")
        return tests.wait(60) or 1


def no_gpu() -> str:
    """Why ranks cannot share a GPU here; "" where they can."""
    sys.path.insert(0, str(ROOT))
    from three_axes import devices, nccl

    if not devices.gpus():
        return "no GPU here that PyTorch can use with NCCL: nothing was tried. `make test-all` has stand-ins"
    return "" if nccl.shares() or nccl.newer() else nccl.why_not(4, devices.gpus())


def main() -> int:
    kind = next((option for option in MINUTES if option in sys.argv), "")
    # No live output: it is not the same twice.
    environ = dict([MARK], **os.environ, THREE_AXES_STREAM_AFTER="60", THREE_AXES_PROGRESS="")
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # thousands of processes would each compile the same files
    workers = max(2, os.cpu_count() or 2)  # more of them run into the tests' own timeouts
    if kind == "--gpu":
        if why := no_gpu():
            print(why, file=sys.stderr)
            return 2
        # One after the other, for they share the GPU; with what each has printed, where the numbers are.
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
    status = run(
        [sys.executable, *command.split(), *chosen], MINUTES.get(kind, USUAL_MINUTES), cwd=ROOT, env=environ
    )
    deadline = time.monotonic() + 5
    while (left := left_behind()) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        end(left, "processes left behind, and ended:")
    os.write(keeper, b"!")
    return status or bool(left)


if __name__ == "__main__":
    sys.exit(main())
