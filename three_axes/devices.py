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
# Environment of a process that uses NCCL. Its watchdog shall end no process: what goes wrong we find and say
# ourselves. PyTorch wants it so where communicators are aborted by hand (`_abort_process_group`).
NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
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
    """Which of the GPUs that it sees each rank takes. None where they cannot have one each.

    seen[rank]: `identities()` on that rank. Ranks that see the same GPUs take them in order, whatever
    their launcher says of local ranks; a rank that sees one GPU of its own takes that.
    """
    before: Counter[tuple[str, ...]] = Counter()
    taken = []
    for there in seen:
        taken.append(before[there])
        before[there] += 1
    owned = {there[i] for there, i in zip(seen, taken) if i < len(there)}
    return taken if len(owned) == len(seen) else None


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
