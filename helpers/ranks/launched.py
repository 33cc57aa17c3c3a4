"""Ranks that a launcher started: how they join, raise errors together, lock a run's folder, and end."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from three_axes import devices, nccl
from three_axes.count import OwnThread
from three_axes.table import ranks


def join(timeout: float) -> tuple[torch.device, str]:
    """Join the group that a launcher has started, or make a group of this process alone. Returns this rank's
    device, and a sentence that names the devices of all ranks. Where a machine has fewer GPUs than ranks,
    ranks share GPUs. Raises ValueError if NCCL cannot share them, and if some ranks see no GPU while others
    do.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    end_with_launcher()
    if "RANK" in os.environ:
        store, rank, n = next(dist.rendezvous("env://", timeout=timedelta(seconds=max(60.0, timeout))))
        store = store_of_attempt(store, rank, n)
    else:
        store, rank, n = dist.HashStore(), 0, 1
    store.set(f"gpus/{rank}", json.dumps([devices.identities(), nccl.shares()]))
    machines = [json.loads(store.get(f"gpus/{r}")) for r in range(n)]
    visible = [tuple(gpus) for gpus, _ in machines]
    taken = devices.assign(visible)
    used = devices.in_use(visible, taken) if taken else 0
    on_cpu = "CUDA_VISIBLE_DEVICES=-1 trains on the CPU"
    if any(visible) and not taken:
        blind = ranks([r for r, gpus in enumerate(visible) if not gpus])
        raise ValueError(f"{blind} of {n} see no GPU, and others do. Every machine needs one; {on_cpu}")
    if taken and used < n:
        if not all(shares for _, shares in machines):
            raise ValueError(f"{nccl.why_not(n, used, launched=True).rstrip('.')}; {on_cpu}")
        for name, value in devices.SHARED.items():
            os.environ.setdefault(name, value)
    device = torch.device("cuda", taken[rank]) if taken else devices.CPU
    if taken:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        devices.BACKENDS[device.type], store=store, rank=rank, world_size=n, timeout=limit
    )
    return device, devices.placed(n, used)


def store_of_attempt(store: dist.Store, rank: int, n: int) -> dist.Store:
    """A part of the launcher's store that only the n ranks of this start share, without any rank of an
    earlier start.

    torchrun keeps one store for all its restarts (dynamic_rendezvous.py in PyTorch 2.13), in which gloo would
    find the addresses of dead ranks. So every rank writes a fresh token, and rank 0 answers each token until
    all ranks have arrived. Raises DistNetworkError when a rank does not arrive within the store's timeout.
    """
    if rank:
        token = uuid.uuid4().hex
        store.set(f"asks/{rank}", token)
        name = store.get(f"answer/{token}").decode()
        store.set(f"{name}/came/{rank}", "")
        return dist.PrefixStore(name, store)
    name, missing = uuid.uuid4().hex, set(range(1, n))
    deadline = time.monotonic() + store.timeout.total_seconds()
    while missing:
        for other in list(missing):
            if store.check([f"asks/{other}"]):  # perhaps a dead rank's token; then nobody reads the answer
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", name)
            if store.check([f"{name}/came/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise dist.DistNetworkError(f"timed out waiting for ranks {sorted(missing)} of {n}")
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def end_with_launcher() -> None:
    """End this process within a second when torchrun, which started it, is gone: killed, torchrun cannot end
    its ranks itself, and they would train on beside the next run. Without torchrun nothing is watched.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.write(2, f"rank {os.environ.get('RANK')} ends: its launcher is gone\n".encode())
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        OwnThread(watch).start()  # which a proof of `count --watch` knows


def together(do: Callable, error: type[Exception] = ValueError):
    """What `do()` returns; every rank calls this. Where `do()` fails on one, every rank raises `error`."""
    made, trouble = None, ""
    try:
        made = do()
    except (OSError, ValueError) as e:
        trouble = str(e)
    troubles: list = [None] * dist.get_world_size()
    dist.all_gather_object(troubles, trouble)
    if first := next(filter(None, troubles), ""):
        raise error(first)
    return made


@contextmanager
def owning(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a run's folder in this block: two runs would mix their metrics and checkpoints. The lock is the
    operating system's, flock, and ends with its process. Raises ValueError while another run holds it.
    """
    run.mkdir(parents=True, exist_ok=True)
    note, lock = run / "owner", FileLock(run / "owner.lock", timeout=0)
    who = lambda: note.read_text(errors="replace").strip()[:200] if note.exists() else "nobody has signed"
    try:
        lock.acquire()  # at once or not at all: its timeout is 0
    except Timeout:
        raise ValueError(
            f"{run} belongs to a run that is under way: {who()}. When it has ended, start again"
        ) from None
    except NotImplementedError as e:  # a file system without locks
        raise ValueError(f"{run} cannot be held: {e}") from None
    try:
        if note.exists():
            say(f"{run} belonged to a run that ended without a word, {who()}; it is taken over")
        note.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%F %T}")
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)
        lock.release()
