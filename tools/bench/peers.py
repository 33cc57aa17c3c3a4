"""Ranks beside a kernel: `World` against what people use instead, with the same script: `python
tools/bench/peers.py`.

Each measurement runs in a driver process of its own, which stands for the kernel: torch is imported before
the clock starts. A peer that is not installed is left out. What each is asked, on four gloo ranks:

    first      seconds to the ranks' first all-reduce; and cold, from starting Python
    call       milliseconds for a further call of one small all-reduce
    memory     proportional memory of eight ranks during a call, the driver left aside
    raises     rank 1 raises while the others wait in a barrier: what the user reads, after how long, is state
    kept
    dies       rank 1 is killed while the others wait
    stopped    SIGINT, as from the stop button, while the others wait
    killed     the driver itself is killed: what is left behind five seconds later
"""

from __future__ import annotations

import argparse
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

from helpers.ranks.ports import free_port

MARK = "THREE_AXES_BENCH"
PATIENCE = 20  # seconds until a failure script is called hung
DOING = ("cold", "first", "call", "memory", "raises", "dies", "stopped", "killed")


# -- what the ranks run -------------------------------------------------------------------------


def small() -> float:
    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def hold() -> float:
    total = small()
    time.sleep(2)
    return total


def remember() -> None:
    import builtins

    builtins.kept = 42


def recall() -> int:
    import builtins

    return getattr(builtins, "kept", 0)


def raises() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("no good")
    dist.barrier()


def dies() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def stuck() -> None:
    import torch.distributed as dist

    if dist.get_rank() != 1:
        dist.barrier()
    time.sleep(300)


def grouped(rank: int, n: int, port: str, fn) -> None:
    """For launchers that know no groups: make one, run fn."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n, timeout=timedelta(minutes=10)
    )
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

        mp.spawn(grouped, (self.n, free_port(), fn), self.n)

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

        self.cluster = ipyparallel.Cluster(n=n, log_level=50)
        self.view = self.cluster.start_and_connect_sync(activate=False)[:]
        self.view.block = True
        port, folder = free_port(), str(Path(__file__).parent)
        self.view.apply_sync(lambda where: __import__("sys").path.insert(0, where), folder)

        def join(rank, n, port):
            from datetime import timedelta

            import torch.distributed as dist

            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=n,
                timeout=timedelta(minutes=10),
            )

        self.view.map_sync(join, range(n), [n] * n, [port] * n)

    def call(self, fn):
        import peers  # the engines find the functions under this name

        return self.view.apply_sync(getattr(peers, fn.__name__))

    def close(self) -> None:
        self.cluster.stop_cluster_sync()


class Monarch:
    """Monarch"""

    keeps = True

    def start(self, n: int) -> None:
        from monarch.actor import Actor, endpoint, this_host

        class Rank(Actor):
            @endpoint
            async def join(self, n, port):
                from datetime import timedelta

                import torch.distributed as dist
                from monarch.actor import current_rank

                dist.init_process_group(
                    "gloo",
                    init_method=f"tcp://127.0.0.1:{port}",
                    rank=current_rank().rank,
                    world_size=n,
                    timeout=timedelta(minutes=10),
                )

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


def timed(action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def drive(name: str, doing: str) -> dict:
    __import__("torch.distributed")  # a kernel has it already
    peer = PEERS[name][0]()

    def begin(n: int = 4) -> float:
        return timed(lambda: (peer.start(n), peer.call(small)))

    if doing in ("cold", "first"):
        seconds = begin()
        if doing == "first":  # the second one, in a kernel that has been used
            peer.close()
            seconds = begin()
        peer.close()
        return {"seconds": seconds}
    if doing == "call":
        begin()
        median = statistics.median(timed(lambda: peer.call(small)) for _ in range(50 if peer.keeps else 3))
        peer.close()
        return {"seconds": median}
    if doing == "memory":
        begin(8)
        most, done = 0, threading.Event()

        def watch():
            nonlocal most
            while not done.wait(0.1):
                most = max(most, sum(_proportional(pid) for pid in _descendants() if pid != os.getpid()))

        thread = threading.Thread(target=watch)
        thread.start()
        peer.call(hold)
        done.set()
        thread.join()
        peer.close()
        return {"bytes": most}
    begin()
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
    seconds = time.perf_counter() - start - (doing == "stopped")
    text = printed.getvalue()
    result = {
        "seconds": seconds,
        "rank": bool(re.search(r"rank\s*:?\s*1\b|process 1\b|\[1:apply\]", text, re.I)),
        "error": "no good" in text,
        "where": "barrier" in text,
        "text": text[-1500:],
    }
    print(json.dumps(result), flush=True)  # in case the next line hangs
    result["kept"] = False
    if peer.keeps:
        with contextlib.suppress(BaseException):
            result["kept"] = list(peer.call(recall))[0] == 42
            result["usable"] = list(peer.call(small))[0] == 4
    print(json.dumps(result), flush=True)
    with contextlib.suppress(BaseException):
        peer.close()
    return result


def _descendants() -> list[int]:
    """Every process of this measurement: they all inherit one line of the environment."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes():
                processes.append(int(folder.name))
    return processes


def _proportional(pid: int) -> int:
    """Bytes, as helpers.ranks.memory.resident: importing that would start our fork server beside every
    peer.
    """
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


# -- all of it ---------------------------------------------------------------------------------------


def measure(name: str, doing: str) -> dict:
    """One driver's answer, and how many processes it left behind; {'hung': True} where it had to be
    killed.
    """
    os.environ[MARK] = mark = str(uuid.uuid4())
    start = time.perf_counter()
    driver = subprocess.Popen(
        [sys.executable, __file__, "--peer", name, "--do", doing],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, MARK: mark},
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(driver.stdout), daemon=True)
    reader.start()
    if doing == "killed":
        while driver.poll() is None and "stuck now\n" not in lines and time.perf_counter() - start < 60:
            time.sleep(0.1)
        time.sleep(1)
        driver.kill()
        driver.wait()
        time.sleep(5)
        result = {"left": len(_descendants())}
    else:
        try:
            # Starting may take some of it.
            driver.wait(90 if doing in ("cold", "first", "call", "memory") else 25 + PATIENCE)
            hung = False
        except subprocess.TimeoutExpired:
            hung = True
            driver.kill()
        reader.join(2)
        answers = [json.loads(line) for line in lines if line.startswith("{")]
        result = {**(answers[-1] if answers else {}), "hung": hung, "all": time.perf_counter() - start}
        time.sleep(3)
        result["left"] = len(_descendants())
    for pid in _descendants():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return result


def told(result: dict, says: bool = True) -> str:
    """A failure's row in words: after how long, what it says (unless nothing need be said), whether state is
    kept, and what is left behind.
    """
    if "seconds" not in result:
        return f"hangs (> {PATIENCE} s)" + left(result)
    names = "its error" if result["error"] else "which rank" if result["rank"] else "neither rank nor error"
    if result["rank"] and result["error"]:
        names = "rank and error" + (", and where the others wait" if result["where"] else "")
    return (
        f"{result['seconds']:.1f} s"
        + f": {names}" * says
        + f"; state {'kept' if result.get('kept') else 'lost'}"
        + ", then hangs" * result["hung"]
        + left(result)
    )


def left(result: dict) -> str:
    return f"; {result['left']} processes left" if result["left"] else ""


def main() -> None:
    from report import bars, save

    names = [name for name, (_, module) in PEERS.items() if find_spec(module)]
    rows = {name: {doing: [] for doing in DOING} for name in names}
    for doing in DOING:
        for _ in range(3 if doing in ("cold", "first", "call") else 1):
            for name in names:  # in turn
                rows[name][doing].append(measure(name, doing))
    middle = lambda name, doing, key: (
        statistics.median(f[key] for f in rows[name][doing] if key in f)
        if any(key in f for f in rows[name][doing])
        else None
    )
    show = lambda value, text: "–" if value is None else text.format(value)
    table = [
        [
            "cold: from starting Python to the first all-reduce",
            *(show(middle(n, "cold", "all"), "{:.1f} s") for n in names),
        ],
        [
            "warm: to the first all-reduce of new ranks",
            *(show(middle(n, "first", "seconds"), "{:.2f} s") for n in names),
        ],
        [
            "a further call",
            *(
                show(middle(n, "call", "seconds") and 1e3 * middle(n, "call", "seconds"), "{:.1f} ms")
                for n in names
            ),
        ],
        [
            "memory of 8 ranks",
            *(
                show(middle(n, "memory", "bytes") and middle(n, "memory", "bytes") / 1e6, "{:.0f} MB")
                for n in names
            ),
        ],
        *(
            [what, *(told(rows[n][doing][0]) for n in names)]
            for doing, what in (("raises", "rank 1 raises, the others wait"), ("dies", "rank 1 is killed"))
        ),
        ["the stop button", *(told(rows[n]["stopped"][0], says=False) for n in names)],
        ["the kernel is killed", *(f"{rows[n]['killed'][0]['left']} processes left" for n in names)],
    ]
    save(
        "peers",
        "Ranks beside a kernel, four of them",
        ["", *names],
        table,
        packages=("accelerate", "ipyparallel", "torchmonarch"),
    )
    bars(
        "peers",
        "A further call on four ranks",
        {n: 1e3 * middle(n, "call", "seconds") for n in names if middle(n, "call", "seconds")},
        "milliseconds",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=list(PEERS))
    parser.add_argument("--do", choices=DOING)
    asked = parser.parse_args()
    if asked.peer:
        print(json.dumps(drive(asked.peer, asked.do)), flush=True)
    else:
        main()
