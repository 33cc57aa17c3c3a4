"""For ranks that a launcher (torchrun) started: join, raise errors together, lock a run's folder, end."""

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
    """Join the group of the ranks that a launcher has started; without a launcher, make a group of this
    process alone. timeout: seconds after which a collective fails. Returns this rank's device, and a sentence
    that names the devices of all ranks. Where a machine has fewer GPUs than ranks, ranks share GPUs. Raises
    ValueError if NCCL cannot share them, and if some ranks see no GPU while others do.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    end_with_launcher()
    if "RANK" in os.environ:
        store, rank, n = next(dist.rendezvous("env://", timeout=timedelta(seconds=max(60.0, timeout))))
        store = store_of_attempt(store, rank, n)
    else:
        store, rank, n = dist.HashStore(), 0, 1
    store.set(f"gpus/{rank}", json.dumps([devices.identities(), nccl.shares()]))
    reports = [json.loads(store.get(f"gpus/{r}")) for r in range(n)]
    visible = [tuple(gpus) for gpus, _ in reports]
    taken = devices.assign(visible)
    used = devices.in_use(visible, taken) if taken else 0
    on_cpu = "CUDA_VISIBLE_DEVICES=-1 trains on the CPU"
    if any(visible) and not taken:
        blind = ranks([r for r, gpus in enumerate(visible) if not gpus])
        raise ValueError(f"{blind} of {n} see no GPU, and others do. Every machine needs one; {on_cpu}")
    if taken and used < n:
        if not all(shares for _, shares in reports):
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
    """A part of the launcher's store for the n ranks of this start alone: its keys have a new prefix.

    torchrun keeps one store for all its restarts (dynamic_rendezvous.py in PyTorch 2.13), in which gloo would
    find the addresses of dead ranks. So every other rank writes a new token, and rank 0 answers each token
    with the prefix until all ranks have it. Raises, after the store's timeout, DistNetworkError on rank 0 if
    a rank is missing, and DistStoreError on a rank that rank 0 does not answer.
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
            if store.check([f"asks/{other}"]):  # if this is a dead rank's token, nobody reads the answer
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", name)
            if store.check([f"{name}/came/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise dist.DistNetworkError(f"timed out waiting for ranks {sorted(missing)} of {n}")
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def end_with_launcher() -> None:
    """End this process within a second of the end of torchrun, which started it. A torchrun that is killed
    cannot end its ranks itself, and they would train on beside the next run. Without torchrun this does
    nothing.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.write(2, f"rank {os.environ.get('RANK')} ends: its launcher is gone\n".encode())
        os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        OwnThread(watch).start()  # a kind of thread that `count --watch` does not name


def together(do: Callable, error: type[Exception] = ValueError):
    """The result of `do()`; every rank calls this. If `do()` raises OSError or ValueError on some rank, every
    rank raises `error`, with the message of the first such rank.
    """
    result, message = None, ""
    try:
        result = do()
    except (OSError, ValueError) as e:
        message = str(e) or type(e).__name__  # '' means that nothing was raised
    messages: list = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    if first := next(filter(None, messages), ""):
        raise error(first)
    return result


@contextmanager
def owning(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock a run's folder in this block: two runs would mix their metrics and checkpoints. The lock is the
    operating system's, flock, and ends with its process. say: is called with a sentence if the last owner was
    killed. Raises ValueError while another run holds the lock, and where the file system has no locks.
    """
    run.mkdir(parents=True, exist_ok=True)
    note, lock = run / "owner", FileLock(run / "owner.lock", timeout=0)
    owner = lambda: note.read_text(errors="replace").strip()[:200] if note.exists() else "nobody has signed"
    try:
        lock.acquire()  # does not wait: its timeout is 0
    except Timeout:
        raise ValueError(
            f"{run} belongs to a run that is under way: {owner()}. When it has ended, start again"
        ) from None
    except NotImplementedError as e:  # a file system without locks
        raise ValueError(f"{run} cannot be held: {e}") from None
    try:
        if note.exists():
            say(f"{run} belonged to a run that ended without a word, {owner()}; it is taken over")
        note.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%F %T}")
        yield
    finally:
        with suppress(OSError):
            note.unlink(missing_ok=True)
        lock.release()
