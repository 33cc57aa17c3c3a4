"""Checks the arguments of `World` and of its calls. Each error says what was given, and what is allowed."""

from __future__ import annotations

from three_axes import devices, nccl
from three_axes.paper import Network


def check(n: int, gpus: bool, counted: bool, fabric: Network | None, memory: float | None) -> None:
    """Check the arguments of World: n ranks, on GPUs or not, counted or not, an emulated network (`fabric`),
    a limit of memory in bytes. Raises TypeError and ValueError.
    """
    whole = "the number of ranks is a whole number from 1 to 64, such as World(4)"
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"World({n!r}): {whole}")
    if not 1 <= n <= 64:
        raise ValueError(f"World({n}): {whole}")
    if fabric is not None and not (isinstance(fabric, Network) and counted):
        raise TypeError(
            f"fabric={fabric!r}, counted={counted}: a fabric is a three_axes.plan.Network, and needs"
            " counted=True"
        )
    if memory is not None and not _is_positive(memory):
        raise ValueError(
            f"memory={memory!r}: give the bytes of tensors that each rank may hold, such as 50e6, or None for"
            " no limit"
        )
    if gpus and fabric is not None:
        raise ValueError(
            "gpus=True and fabric=: an emulated network holds back what gloo sends, not what NCCL does; leave"
            " one of the two out"
        )
    if not gpus:
        return
    if not (found := devices.gpus()):
        reason = "PyTorch finds no GPU that it can use with NCCL"
        raise ValueError(f"World({n}, gpus=True): {reason}. World({n}) runs on the CPU")
    if n > found and not nccl.shares() and not nccl.newer():  # no NCCL here lets ranks share a GPU
        those = f"World({found}, gpus=True) takes {'it' if found == 1 else 'them all'}"
        raise ValueError(
            f"World({n}, gpus=True): {nccl.why_not(n, found)} {those}, and World({n}) runs on the CPU"
        )


def devices_of(n: int) -> list[str]:
    """The GPU of each of n ranks, as PyTorch calls it: `cuda:0`. With too few GPUs some ranks share one."""
    every = tuple(map(str, range(devices.gpus())))
    return [f"cuda:{i}" for i in devices.assign([every] * n) or []]


def seconds(timeout: float | None) -> float | None:
    """A call's timeout. Raises ValueError."""
    if timeout is not None and not _is_positive(timeout):
        raise ValueError(f"timeout={timeout!r}: give a positive number of seconds, or None for no limit")
    return timeout


def _is_positive(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0
