"""Ranks beside a kernel: `World` against what people use instead, with the same script: `python
tools/bench/peers.py`.

Each measurement runs in a driver process of its own, which stands for the kernel: torch is imported before
the clock starts. A peer that is not installed is left out. What each is asked, on four gloo ranks:

    first      seconds to the ranks' first all-reduce; and cold, from starting Python
    call       milliseconds for a further call of one small all-reduce
    memory     proportional memory of eight ranks during a call, the driver left aside
    raises     rank 1 raises while the others wait in a barrier: what the user reads, after how long, is
               state kept
    dies       rank 1 is killed while the others wait
    stopped    SIGINT, as from the stop button, while the others wait
    killed     the driver itself is killed: what is left behind five seconds later
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from report import median_seconds, save, timed

from helpers.ranks.ports import free_port

MARK = "THREE_AXES_BENCH"
PATIENCE = 20  # seconds until a failure script is called hung
SPEEDS = ("cold", "first", "call")
DOING = (*SPEEDS, "memory", "raises", "dies", "stopped", "killed")


# -- what the ranks run -------------------------------------------------------------------------


def here() -> int:
    return 1


def small() -> torch.Tensor:
    x = torch.ones(1)
    dist.all_reduce(x)
    return x


def hold() -> int:
    small()
    time.sleep(2)
    return 1


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


def join(rank: int, n: int, port: str) -> None:
    """Make a group, for launchers that know none."""
    where, patience = f"tcp://127.0.0.1:{port}", timedelta(minutes=10)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=n, timeout=patience)


def joined(rank: int, n: int, port: str, fn) -> None:
    join(rank, n, port)
    fn()
    dist.destroy_process_group()


# -- the peers: start(n), then call(fn) ------------------------------------------------------------


class Ours:
    """World of this course"""

    keeps = True

    def start(self, n: int) -> None:
        from helpers import World

        self.world = World(n)

    def call(self, fn):
        return self.world.run(fn)

    def close(self) -> None:
        self.world.close()


class Spawn:
    """torch.multiprocessing.spawn"""

    keeps = False

    def start(self, n: int) -> None:
        self.n = n

    def call(self, fn):
        import torch.multiprocessing as mp

        mp.spawn(joined, (self.n, free_port(), fn), self.n)

    def close(self) -> None:
        pass


class Launcher(Spawn):
    """accelerate.notebook_launcher"""

    def call(self, fn):
        from accelerate import notebook_launcher

        notebook_launcher(_prepared, (fn,), num_processes=self.n, use_port=free_port())


def _prepared(fn) -> None:
    from accelerate import PartialState

    PartialState(cpu=True)
    fn()


class IPyParallel:
    """ipyparallel"""

    keeps = True

    def start(self, n: int) -> None:
        import ipyparallel
        import peers  # the engines find the functions under this name

        self.known = vars(peers)
        self.cluster = ipyparallel.Cluster(n=n, log_level=50)
        self.view = self.cluster.start_and_connect_sync(activate=False)[:]
        self.view.block = True
        port, folder = free_port(), str(Path(__file__).parent)
        self.view.apply_sync(lambda where: __import__("sys").path.insert(0, where), folder)
        self.view.map_sync(self.known["join"], range(n), [n] * n, [port] * n)

    def call(self, fn):
        return self.view.apply_sync(self.known[fn.__name__])

    def close(self) -> None:
        self.cluster.stop_cluster_sync()


class Monarch:
    """Monarch"""

    keeps = True

    def start(self, n: int) -> None:
        from monarch.actor import Actor, current_rank, endpoint, this_host

        class Rank(Actor):
            @endpoint
            async def join(self, n, port):
                join(current_rank().rank, n, port)

            @endpoint
            async def run(self, fn):
                return fn()

        self.procs = this_host().spawn_procs(per_host={"ranks": n})
        self.ranks = self.procs.spawn("ranks", Rank)
        self.ranks.join.call(n, free_port()).get()

    def call(self, fn):
        return [value for _, value in self.ranks.run.call(fn).get()]

    def close(self) -> None:
        self.procs.stop().get()


PEERS = {
    "World": (Ours, "helpers"),
    "notebook_launcher": (Launcher, "accelerate"),
    "mp.spawn": (Spawn, "torch"),
    "ipyparallel": (IPyParallel, "ipyparallel"),
    "Monarch": (Monarch, "monarch"),
}


# -- the driver: one measurement -------------------------------------------------------------------


def drive(name: str, doing: str) -> dict:
    """What `doing` finds of a peer, in this process, which stands for the kernel."""
    peer = PEERS[name][0]()

    def begin(n: int = 4) -> float:
        return timed(lambda: (peer.start(n), peer.call(small)))

    seconds = begin(8 if doing == "memory" else 4)
    if doing == "first":  # the second one, in a kernel that has been used
        peer.close()
        seconds = begin()
    if doing == "call":
        seconds = median_seconds(lambda: peer.call(small), 50 if peer.keeps else 3)
    if doing in SPEEDS:
        peer.close()
        return {"seconds": seconds}
    if doing == "memory":
        held = most_held(lambda: peer.call(hold))
        peer.close()
        return {"bytes": held}
    return fail(peer, doing)


def most_held(action) -> int:
    """The most proportional memory of all processes but this one while `action` runs."""
    seen, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            seen.append(sum(_proportional(one) for one in _descendants() if one.pid != os.getpid()))

    thread = threading.Thread(target=watch)
    thread.start()
    action()
    done.set()
    thread.join()
    return max(seen)


def fail(peer, doing: str) -> dict:
    """Let something go wrong on a rank: what was said of it, after how long, and what can still be used."""
    if peer.keeps:
        peer.call(remember)
    if doing == "killed":
        print("stuck now", flush=True)
        peer.call(stuck)
    if doing == "stopped":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    fn = {"raises": raises, "dies": dies, "stopped": stuck}[doing]
    printed, start = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        try:
            peer.call(fn)
        except BaseException as e:
            printed.write(f"{type(e).__name__}: {e}")
    seconds, text = time.perf_counter() - start - (doing == "stopped"), printed.getvalue()
    result = {
        "seconds": seconds,
        "rank": bool(re.search(r"rank\s*:?\s*1\b|process 1\b|\[1:apply\]", text, re.I)),
        "error": "no good" in text,
        "where": "barrier" in text,
        "kept": False,
    }
    print(json.dumps(result), flush=True)  # in case the next line hangs
    if peer.keeps:
        with contextlib.suppress(BaseException):
            result["kept"] = list(peer.call(recall))[0] == 42
            peer.call(small)
    print(json.dumps(result), flush=True)
    with contextlib.suppress(BaseException):
        peer.close()
    return result


def _descendants() -> list[psutil.Process]:
    """Every process of this measurement: they all inherit one line of the environment."""
    there = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == os.environ[MARK]:
                there.append(process)
    return there


def _proportional(process: psutil.Process) -> int:
    """Bytes, as helpers.ranks.memory.resident; importing that would start our fork server beside a peer."""
    with contextlib.suppress(psutil.Error):
        return process.memory_full_info().pss
    return 0


# -- all of it ---------------------------------------------------------------------------------------


def measure(name: str, doing: str) -> dict:
    """One driver's answer, and how many processes it left behind; {'hung': True} where it was killed."""
    os.environ[MARK] = str(uuid.uuid4())
    start = time.perf_counter()
    command = [sys.executable, __file__, "--peer", name, "--do", doing]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    driver = subprocess.Popen(command, start_new_session=True, **pipes)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(driver.stdout), daemon=True)
    reader.start()
    result = {}
    if doing == "killed":
        while driver.poll() is None and "stuck now\n" not in lines and time.perf_counter() - start < 60:
            time.sleep(0.1)
        time.sleep(1)
        driver.kill()
        driver.wait()
        time.sleep(5)
    else:
        try:
            # Starting may take some of it.
            driver.wait(90 if doing in (*SPEEDS, "memory") else 25 + PATIENCE)
            result["hung"] = False
        except subprocess.TimeoutExpired:
            result["hung"] = True
            driver.kill()
        reader.join(2)
        for line in lines:
            if line.startswith("{"):
                result |= json.loads(line)
        result["all"] = time.perf_counter() - start
        time.sleep(3)
    left_behind = _descendants()
    for process in left_behind:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return result | {"left": len(left_behind)}


def told(result: dict, says: bool = True) -> str:
    """A failure in words: after how long, what is said (`says`), is state kept, what is left behind."""
    if "seconds" not in result:
        return f"hangs (> {PATIENCE} s)" + left(result)
    names = "its error" if result["error"] else "which rank" if result["rank"] else "neither rank nor error"
    if result["rank"] and result["error"]:
        names = "rank and error" + (", and where the others wait" if result["where"] else "")
    return (
        f"{result['seconds']:.1f} s"
        + f": {names}" * says
        + f"; state {'kept' if result['kept'] else 'lost'}"
        + ", then hangs" * result["hung"]
        + left(result)
    )


def left(result: dict) -> str:
    return f"; {result['left']} processes left" if result["left"] else ""


def middle(results: list[dict], key: str) -> float | None:
    """The median of what was measured; None where nothing was."""
    return statistics.median(there) if (there := [one[key] for one in results if key in one]) else None


FIGURES = (  # what, how it is measured, its key in the result, in which unit
    ("cold: from starting Python to the first all-reduce", "cold", "all", 1, "{:.1f} s"),
    ("warm: to the first all-reduce of new ranks", "first", "seconds", 1, "{:.2f} s"),
    ("a further call", "call", "seconds", 1e3, "{:.1f} ms"),
    ("memory of 8 ranks", "memory", "bytes", 1e-6, "{:.0f} MB"),
)


def main() -> None:
    names = [name for name, (_, module) in PEERS.items() if find_spec(module)]
    found = {name: {doing: [] for doing in DOING} for name in names}
    for doing in DOING:
        for _ in range(3 if doing in SPEEDS else 1):
            for name in names:  # in turn
                found[name][doing].append(measure(name, doing))
    table = []
    for what, doing, key, unit, text in FIGURES:
        medians = [middle(found[name][doing], key) for name in names]
        table.append([what, *("–" if median is None else text.format(unit * median) for median in medians)])
    for what, doing in (
        ("rank 1 raises, the others wait", "raises"),
        ("rank 1 is killed", "dies"),
        ("the stop button", "stopped"),
    ):
        table.append([what, *(told(found[name][doing][0], doing != "stopped") for name in names)])
    left_over = (found[name]["killed"][0]["left"] for name in names)
    table.append(["the kernel is killed", *(f"{n} processes left" for n in left_over)])
    packages = ("accelerate", "ipyparallel", "torchmonarch")
    save("peers", "Ranks beside a kernel, four of them", ["", *names], table, packages=packages)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=list(PEERS))
    parser.add_argument("--do", choices=DOING)
    asked = parser.parse_args()
    if asked.peer:
        print(json.dumps(drive(asked.peer, asked.do)), flush=True)
    else:
        main()
