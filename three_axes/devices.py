"""Finds which GPUs a process sees, and assigns one to each rank.

NVIDIA's and AMD's GPUs are treated alike: PyTorch calls both `cuda`, and the library between them `nccl`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # type of device -> argument of init_process_group
# Environment of a process that uses NCCL. ERROR_HANDLING=0: NCCL's watchdog does not end the process, because
# this project finds and reports failures itself. PyTorch requires it if communicators are aborted by hand
# (`_abort_process_group`). DUMP_MILSEC: after an error the watchdog waits four times these milliseconds, and
# the group ends only after the watchdog.
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
# Further variables for ranks that share a GPU, set before their first communicator; a user's own values are
# kept. Each rank takes channels (CTAs) of its own, so a rank may have only a few; with only one, collectives
# that overlap would block each other. NVLS (sums in NVLink's switches) cannot be shared: NCCL 2.30.7 turns it
# off by itself only if the last two ranks of a group share a GPU (init.cc, hasMultiRankNvml).
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}
# Environment of a process that must see no GPU.
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


def gpus() -> int:
    """The number of GPUs that this process may use with NCCL; 0 if PyTorch was built without CUDA or without
    NCCL. It asks the driver, and initialises no GPU.
    """
    return torch.cuda.device_count() if dist.is_nccl_available() else 0


def identities() -> tuple[str, ...]:
    """The UUID of each GPU that this process sees; a GPU has the same one in every process."""
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(gpus()))


def assign(visible: list[tuple[str, ...]]) -> list[int] | None:
    """For each rank, the index of the GPU that it takes, among those that it sees. None if a rank sees none.

    visible[rank]: `identities()` on that rank. Ranks that see the same GPUs take them in turn, whatever local
    rank their launcher gave them: with more ranks than GPUs some share one. A rank that sees one GPU takes
    that one.
    """
    if not all(visible):
        return None
    taken, users = [0] * len(visible), Counter[str]()
    for rank in sorted(range(len(visible)), key=lambda rank: len(visible[rank])):  # the fewest choices first
        sees = visible[rank]
        taken[rank] = min(range(len(sees)), key=lambda i: users[sees[i]])
        users[sees[taken[rank]]] += 1
    return taken


def in_use(visible: list[tuple[str, ...]], taken: list[int]) -> int:
    """The number of GPUs that the ranks use together; less than the number of ranks if some share one."""
    return len({sees[i] for sees, i in zip(visible, taken, strict=True)})


def placed(ranks: int, gpus: int) -> str:
    """A phrase on where ranks compute: '4 ranks share 1 GPU over NCCL; seconds mean nothing'."""
    those = f"{ranks} rank{'s' * (ranks > 1)}"
    if not gpus:
        return f"{those} on the CPU over gloo"
    if gpus == ranks:
        return f"{those} on GPUs over NCCL, one for each"
    return f"{those} share {gpus} GPU{'s' * (gpus > 1)} over NCCL; seconds mean nothing"


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all work launched so far. On a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The seconds that `work()` takes on a device, from idle to idle."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start
