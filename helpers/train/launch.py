"""The script: join the ranks that a launcher started, train, and say in a sentence what went wrong."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from three_axes import devices
from three_axes.plan.models import find_model
from three_axes.terminal import Parser

from . import checkpoint
from .config import Config, add_options
from .export import export
from .owner import end_with_launcher
from .run import last_model, sample, train
from .stop import Stop, command, listening

# -- joining -----------------------------------------------------------------------------------


def join_group(timeout: float) -> tuple[torch.device, str]:
    """Join the group that a launcher has started, or make one of this process alone.

    Returns the device that this rank trains on, and a sentence that says which ones all ranks train on. They
    decide it together: on GPUs over NCCL where each rank can have one of its own, else all on the CPU over
    gloo. Raises ValueError where several processes were started and none was told its rank.
    """
    if "RANK" not in os.environ:
        if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            raise ValueError(
                "srun has started several processes and told none of them its rank; start with"
                " RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=HOST MASTER_PORT=29400 in each"
                " task's environment"
            )
        store, rank, n = dist.HashStore(), 0, 1
    else:
        store, rank, n = next(dist.rendezvous("env://", timeout=timedelta(seconds=max(60.0, timeout))))
        store = dist.PrefixStore(agree_on_attempt(store, rank, n), store)
    ranks = _introduce(store, rank, n)
    _reach_other_hosts(ranks, rank)
    seen = [tuple(r["gpus"]) for r in ranks]
    taken = devices.assign(seen)
    device = devices.CPU if taken is None else torch.device("cuda", taken[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.update(devices.NCCL)
    dist.init_process_group(
        devices.BACKENDS[device.type],
        store=store,
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=timeout),
    )
    return device, where(seen, taken)


def where(seen: list[tuple[str, ...]], taken: list[int] | None) -> str:
    """On what all ranks train, as the first line of a run. seen, taken: see `devices.assign`."""
    ranks = "1 rank" if len(seen) == 1 else f"{len(seen)} ranks"
    if taken is not None:
        return f"{ranks} on GPUs over NCCL, one for each"
    there = len({gpu for gpus in seen for gpu in gpus})
    if not there:
        return f"{ranks} on the CPU over gloo"
    return (
        f"{ranks} on the CPU over gloo. There {'are' if there > 1 else 'is'} {there} GPU{'s' * (there > 1)},"
        " but each rank needs its own: to train on GPUs, start on each machine no more ranks than it has"
        " GPUs"
    )


def agree_on_attempt(store: dist.Store, rank: int, n: int) -> str:
    """A name that the n ranks which are starting have in common, and none that was started before them.

    torchrun keeps one store for all its restarts, and gloo would look up the addresses of ranks that are
    dead. So every rank asks with a token of its own, and rank 0 answers each until it has come. Raises
    DistNetworkError when a rank does not within the store's timeout.
    """
    if rank:
        token = uuid.uuid4().hex
        store.set(f"asks/{rank}", token)
        name = store.get(f"answer/{token}").decode()
        store.set(f"{name}/came/{rank}", "")
        return name
    name, missing = uuid.uuid4().hex, set(range(1, n))
    deadline = time.monotonic() + store.timeout.total_seconds()
    while missing:
        for other in list(missing):
            if store.check([f"asks/{other}"]):  # perhaps of a dead rank; the answer is then read by nobody
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", name)
            if store.check([f"{name}/came/{other}"]):
                missing.remove(other)
        if time.monotonic() > deadline:
            raise dist.DistNetworkError(f"timed out waiting for ranks {sorted(missing)} of {n}")
        time.sleep(0.01)
    return name


def _introduce(store: dist.Store, rank: int, n: int) -> list[dict]:
    """What every rank says of itself: the GPUs that it sees, its host, and its address on the way to the
    first rank.
    """
    me = {
        "gpus": devices.identities(),
        "host": _host(),
        "address": own_address(os.environ.get("MASTER_ADDR", "127.0.0.1")),
    }
    store.set(f"about/{rank}", json.dumps(me))
    return [json.loads(store.get(f"about/{r}")) for r in range(n)]


def _host() -> str:
    """The same on all ranks that can meet on the loopback interface, and on no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        return socket.gethostname()


def own_address(other: str) -> str:
    """The address of this machine from which it reaches another.

    Nothing is sent. '' where no way leads there.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(address)
            return s.getsockname()[0]
    except OSError:
        return ""


def _reach_other_hosts(ranks: list[dict], rank: int) -> None:
    """Have gloo listen where ranks on other machines can reach it, unless GLOO_SOCKET_IFNAME says where.

    Left alone it takes the address of the machine's name, which on many systems is 127.0.1.1.
    """
    others = [
        r["address"] for r in ranks if r["host"] != ranks[rank]["host"] and not is_loopback(r["address"])
    ]
    if not others or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    mine = own_address(others[0])
    for name, addresses in psutil.net_if_addrs().items():
        if mine in (a.address for a in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def is_loopback(address: str) -> bool:
    """Whether no other machine could reach it there; also for no address at all."""
    return not address or ipaddress.ip_address(address).is_loopback


# -- the command -------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """`python -m helpers.train`. argv None: sys.argv's. Returns the exit status, as `run` does."""
    from . import __doc__ as manual

    parser = Parser(prog="python -m helpers.train", description=manual)
    add_options(parser)
    return run(parser.parse_args(argv))


def run(args: Namespace) -> int:
    """A run, or what is done with a finished one. Returns the exit status."""
    asked = {f.name: getattr(args, f.name) for f in fields(Config)}
    say = lambda line: print(line, file=sys.stderr, flush=True) if _chief() else None
    try:
        config = Config(**asked | (sizes_in(args.model) if args.model else {}))
        if args.sample is not None or args.export is not None:
            if not config.out:
                raise ValueError("--sample and --export need --out, the folder of a run")
            if args.sample is not None:
                print(sample(Path(config.out), args.sample, say=say))
            if args.export is not None:
                export(last_model(Path(config.out), say), Path(args.export))
            return 0
        with listening(lambda why: _end(config, why)) as stop:
            return _run(config, say, stop)
    except ValueError as e:
        say(str(e))
        return 2
    except RuntimeError as e:
        if not lost_contact(e):
            raise
        _end(config, f"it has lost the others ({reason_of(e)})")


def sizes_in(file: str) -> dict[str, int]:
    """The sizes in a config.json. What else it says of a block is not taken. Raises ValueError."""
    shape = find_model(file)
    return dict(hidden=shape.hidden, heads=shape.heads, layers=shape.layers, vocabulary=shape.vocab)


def _chief() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _run(config: Config, say, stop: Stop) -> int:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    end_with_launcher()
    device, place = join_group(config.timeout)
    stop.joined = True
    say(place)
    silence = lambda: _end(config, f"it has lost the others (no answer within {config.timeout:g} s)")
    trainer = train(config, device, say, lambda: within(config.timeout, silence, device), stop)
    dist.destroy_process_group()
    if trainer.done:
        say(f"{trainer.number} steps under {trainer.config.layout}")
        return 0
    say(
        f"{stop.name} ended the run after step {trainer.number} of {config.steps}. "
        + (
            f"step-{trainer.number:06d} is complete; to go on from it: {command()}"
            if config.out
            else "Without --out nothing was saved"
        )
    )
    return stop.status


@contextmanager
def within(seconds: float, otherwise, device: torch.device):
    """What runs in this block must end within `seconds`, else `otherwise()` is called, on another thread.

    It is for GPUs. When other ranks are gone, a collective blocks the GPU and raises nothing; Python goes on,
    and waits at the first number that it reads. On a CPU gloo raises by itself, and nothing is watched.
    """
    timer = threading.Timer(seconds, otherwise)
    timer.daemon = True
    if device.type != "cpu":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(config: Config, why: str) -> None:
    """Say why, and end this process at once: a broken group cannot be left in good order."""
    saved = checkpoint.complete(Path(config.out)) if config.out else []
    print(
        f"rank {os.environ.get('RANK', '0')} ends: {why}. "
        + (
            f"{saved[-1].name} is complete: start the same command again to go on from it."
            if saved
            else "There is no checkpoint to go on from."
        ),
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


# What gloo, NCCL and PyTorch's store say when another rank is gone or silent. NCCL's ncclSystemError is a
# call of the operating system that failed, most often on a socket to another rank; its ncclInvalidUsage,
# ncclInvalidArgument, ncclUnhandledCudaError and ncclInternalError are faults of this side.
LOST = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "no route to host",
    "unreachable",
    "remote process exited",
    "ncclremoteerror",
    "communicator was aborted",
    "ncclsystemerror",
)
FAULTS_HERE = (
    "duplicate gpu",
    "ncclinvalidusage",
    "ncclinvalidargument",
    "ncclunhandledcudaerror",
    "ncclinternalerror",
    "out of memory",
)


def lost_contact(e: RuntimeError) -> bool:
    """Whether an error says that another rank is gone, and not that something is wrong here."""
    message = str(e).lower()
    return (
        isinstance(e, dist.DistNetworkError)
        or any(word in message for word in LOST)
        and not any(word in message for word in FAULTS_HERE)
    )


def reason_of(e: RuntimeError) -> str:
    """What befell the connection, without the place in a library's source."""
    message = " ".join(str(e).split())
    if not (what := next((word for word in LOST if word in message.lower()), None)):
        return message
    peer = re.search(r"\[([0-9a-fA-F.:]+)\]:(\d+)", message)
    return f"{what}: {peer[1]} port {peer[2]}" if peer else what
