"""Which GPUs there are, and which of them each process takes.

NVIDIA's and AMD's alike: PyTorch calls both `cuda`, and the library that carries their tensors `nccl`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # type of device -> what init_process_group is given
# Environment of a process that uses NCCL. What goes wrong we find and say ourselves: its watchdog shall end
# no process, as PyTorch asks for where communicators are aborted by hand (`_abort_process_group`). A watchdog
# that has seen an error waits for four times MILSEC, and the end of its group waits for the watchdog.
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
# What ranks that share a GPU need besides, before their first communicator; what the reader has set stands.
# Each rank takes channels of its own, so they are few: with MAX_NCHANNELS=1 collectives that overlap would
# starve. NVLS cannot be shared. NCCL 2.30.7 leaves it out by itself only where the last two ranks of a group
# share (init.cc, hasMultiRankNvml).
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
# Environment of a process that shall see none.
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


def gpus() -> int:
    """How many GPUs this process may use, with NCCL. The driver is asked, and no GPU touched.

    0 also where PyTorch was built without CUDA or without NCCL.
    """
    return torch.cuda.device_count() if dist.is_nccl_available() else 0


def identities() -> tuple[str, ...]:
    """A name for each GPU that this process sees, the same in every process."""
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(gpus()))


def assign(seen: list[tuple[str, ...]]) -> list[int] | None:
    """Which of the GPUs that it sees each rank takes. None where a rank sees none.

    seen[rank]: `identities()` on that rank. Ranks that see the same GPUs take them in turns, whatever their
    launcher says of local ranks: with more ranks than GPUs some share one. A rank that sees one GPU takes it.
    """
    if not all(seen):
        return None
    taken, users = [0] * len(seen), Counter[str]()
    for rank in sorted(range(len(seen)), key=lambda rank: len(seen[rank])):  # who has no choice comes first
        there = seen[rank]
        taken[rank] = min(range(len(there)), key=lambda i: users[there[i]])
        users[there[taken[rank]]] += 1
    return taken


def in_use(seen: list[tuple[str, ...]], taken: list[int]) -> int:
    """How many GPUs the ranks have together; fewer than there are ranks where some share one."""
    return len({there[i] for there, i in zip(seen, taken, strict=True)})


def placed(ranks: int, gpus: int) -> str:
    """Where ranks compute, for people: '4 ranks share 1 GPU over NCCL; seconds mean nothing'."""
    those = f"{ranks} rank{'s' * (ranks > 1)}"
    if not gpus:
        return f"{those} on the CPU over gloo"
    if gpus == ranks:
        return f"{those} on GPUs over NCCL, one for each"
    return f"{those} share {gpus} GPU{'s' * (gpus > 1)} over NCCL; seconds mean nothing"


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was asked to do. On a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """How long `work()` takes on a device, from idle to idle."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
