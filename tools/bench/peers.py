"""Compares the course's `World` with other ways to start ranks from a notebook: `make bench`.

Each measurement runs in a driver process of its own, in place of a notebook's kernel. The measurements, on
four gloo ranks:

    cold           seconds from starting Python to the end of the driver, after one small all-reduce
    first          seconds to the first all-reduce of new ranks, when the driver starts ranks the second time
    call           milliseconds for a further call of one small all-reduce
    raises, dies   rank 1 raises, or is killed, while the others wait in a barrier: what the user reads, after
                   how many seconds, and whether state is kept
    stopped        SIGINT, as from the stop button, while rank 1 sleeps and the others wait for it
    killed         the driver itself is killed: the processes that are left five seconds later
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.distributed as dist
from report import save, timed

from helpers.ranks.ports import free_port

MARK = "THREE_AXES_BENCH"  # environment variable by which processes that a measurement leaves are found
N = 4  # ranks
PATIENCE = 45  # seconds, with the start, after which a driver counts as hung (90 for cold, first and call)


# -- what the ranks run ----------------------------------------------------------------------------


def small() -> torch.Tensor:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x


def remember() -> None:
    builtins.kept = 42


def recall() -> int:
    return getattr(builtins, "kept", 0)


def raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no good")
    dist.barrier()


def dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def stuck() -> None:
    if dist.get_rank() != 1:
        dist.barrier()
    time.sleep(300)


def join(rank: int, port: str) -> None:
    """Make a process group, for launchers that make none."""
    where, patience = f"tcp://127.0.0.1:{port}", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=N, timeout=patience)


def joined(rank: int, port: str, fn) -> None:
    join(rank, port)
    fn()
    dist.destroy_process_group()


# -- the peers: start(n), then call(fn) ------------------------------------------------------------


class Ours:
    """World of this course"""

    keeps = True

    def start(self) -> None:
        from helpers import World

        self.world = World(N)

    def call(self, fn):
        return self.world.run(fn)

    def close(self) -> None:
        self.world.close()


class Spawn:
    """torch.multiprocessing.spawn"""

    keeps = False

    def start(self) -> None:
        pass

    def call(self, fn):
        import torch.multiprocessing as mp

        mp.spawn(joined, (free_port(), fn), N)

    def close(self) -> None:
        pass


class Launcher(Spawn):
    """accelerate.notebook_launcher"""

    def call(self, fn):
        from accelerate import notebook_launcher

        notebook_launcher(_prepared, (fn,), num_processes=N, use_port=free_port())


def _prepared(fn) -> None:
    from accelerate import PartialState

    PartialState(cpu=True)
    fn()


class IPyParallel:
    """ipyparallel"""

    keeps = True

    def start(self) -> None:
        import ipyparallel
        import peers  # the engines find the functions under this name

        self.known = vars(peers)
        self.cluster = ipyparallel.Cluster(n=N, log_level=50)
        self.view = self.cluster.start_and_connect_sync(activate=False)[:]
        self.view.block = True
        port, folder = free_port(), str(Path(__file__).parent)
        self.view.apply_sync(lambda where: __import__("sys").path.insert(0, where), folder)
        self.view.map_sync(self.known["join"], range(N), [port] * N)

    def call(self, fn):
        return self.view.apply_sync(self.known[fn.__name__])

    def close(self) -> None:
        self.cluster.stop_cluster_sync()


PEERS = {
    "World": (Ours, "helpers"),
    "notebook_launcher": (Launcher, "accelerate"),
    "mp.spawn": (Spawn, "torch"),
    "ipyparallel": (IPyParallel, "ipyparallel"),
}


# -- the driver: one measurement, in this process, which plays the role of the kernel ----------------


def drive(name: str, doing: str) -> None:
    """Run the measurement `doing` on a launcher, and print its results as lines of JSON."""
    peer = PEERS[name][0]()
    begin = lambda: timed(lambda: (peer.start(), peer.call(small)))
    seconds = begin()
    if doing == "first":
        peer.close()
        seconds = begin()
    if doing == "call":
        seconds = median(timed(lambda: peer.call(small)) for _ in range(50 if peer.keeps else 3))
    if doing in SPEEDS:
        tell(seconds=seconds)
        peer.close()
    else:
        fail(peer, doing)


def tell(**found) -> None:
    """Print results as a line of JSON, which `measure` reads."""
    print(json.dumps(found), flush=True)


def fail(peer, doing: str) -> None:
    """Cause a failure on a rank. Prints the seconds until the user reads a message, what the message names,
    and whether state is kept.
    """
    if peer.keeps:
        peer.call(remember)
    if doing == "killed":
        tell(stuck=True)
        peer.call(stuck)
    if doing == "stopped":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    printed, start = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            peer.call({"raises": raises, "dies": dies, "stopped": stuck}[doing])
        except BaseException as e:
            printed.write(f"{type(e).__name__}: {e}")
    seconds, text = time.perf_counter() - start - (doing == "stopped"), printed.getvalue()
    rank = bool(re.search(r"rank\s*:?\s*1\b|process 1\b|\[1:apply\]", text, re.I))
    tell(seconds=seconds, rank=rank, error="no good" in text, where="barrier" in text)
    with contextlib.suppress(BaseException):  # if the next line hangs, the results above are printed
        tell(kept=peer.keeps and list(peer.call(recall))[0] == 42)
        peer.call(small)
    with contextlib.suppress(BaseException):
        peer.close()


# -- all measurements --------------------------------------------------------------------------------


def measure(name: str, doing: str) -> dict:
    """Run one driver. Returns its results, whether it hung, and the number of processes that it left."""
    os.environ[MARK] = str(uuid.uuid4())
    start, result = time.perf_counter(), {"hung": False}
    command, pipes = [sys.executable, __file__, name, doing], dict(stdout=subprocess.PIPE, text=True)
    driver = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, **pipes)

    def read() -> None:
        for line in driver.stdout or ():
            if line.startswith("{"):
                result.update(json.loads(line))
                if doing == "killed":
                    time.sleep(1)
                    driver.kill()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        driver.wait(90 if doing in SPEEDS else PATIENCE)
    except subprocess.TimeoutExpired:
        result["hung"] = True
        driver.kill()
    result["all"] = time.perf_counter() - start
    reader.join(2)
    time.sleep(5)
    left = []
    for process in psutil.process_iter():  # a measurement's processes inherit MARK
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == os.environ[MARK]:
                left.append(process)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return result | {"left": len(left)}


def in_words(result: dict, with_message: bool) -> str:
    """The result of a failure as a phrase. with_message: whether it has what the user's message names."""
    left = f"; {result['left']} processes left" * bool(result["left"])
    if "seconds" not in result:
        return f"hangs{left}"
    names = ["which rank"] * result["rank"] + ["its error"] * result["error"] or ["neither rank nor error"]
    where = ", and where the others wait" * result["where"]
    return (
        f"{result['seconds']:.1f} s"
        + f": {' and '.join(names)}{where}" * with_message
        + f"; state {'kept' if result.get('kept') else 'lost'}"
        + ", then hangs" * result["hung"]
        + left
    )


SPEEDS = {  # measurement -> its name in the table, its key in the result, factor and format of the unit
    "cold": ("cold: from starting Python to its end, with one all-reduce", "all", 1, "{:.1f} s"),
    "first": ("warm: to the first all-reduce of new ranks", "seconds", 1, "{:.2f} s"),
    "call": ("a further call", "seconds", 1e3, "{:.1f} ms"),
}
FAILURES = {
    "raises": "rank 1 raises, the others wait",
    "dies": "rank 1 is killed",
    "stopped": "the stop button",
}


def main() -> None:
    names, table = [name for name, (_, module) in PEERS.items() if find_spec(module)], []
    for doing, (what, key, unit, text) in SPEEDS.items():
        rounds = [{name: measure(name, doing) for name in names} for _ in range(3)]  # in turn
        seconds = {name: [one[name][key] for one in rounds if key in one[name]] for name in names}
        table.append([what, *(text.format(unit * median(s)) if s else "–" for s in seconds.values())])
    for doing, what in FAILURES.items():
        table.append([what, *(in_words(measure(name, doing), doing != "stopped") for name in names)])
    left = [f"{measure(name, 'killed')['left']} processes left" for name in names]
    table.append(["the kernel is killed", *left])
    packages = ("accelerate", "ipyparallel")
    save("peers", "Ranks beside a kernel, four of them", ["", *names], table, packages=packages)


if __name__ == "__main__":
    drive(*sys.argv[1:]) if sys.argv[1:] else main()
