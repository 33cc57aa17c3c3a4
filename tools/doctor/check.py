"""The class of a check, and functions that all checks use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from helpers.ranks import current
from three_axes import devices, nccl

ROOT = Path(__file__).resolve().parents[2]


class Wrong(Exception):
    """The result is not the expected one."""


class Skipped(Exception):
    """The check does not apply here; the message says why."""


@dataclass(frozen=True)
class Check:
    """run: takes the name of a host to meet ('' for none), returns a text, raises Wrong or Skipped."""

    name: str
    expected: str
    advice: str
    run: Callable[[str], str]


def check(name: str, expected: str, advice: str):
    """Make a Check of a function."""
    return lambda run: Check(name, expected, advice, run)


def expect(holds: bool, result: str) -> None:
    if not holds:
        raise Wrong(result)


def both(names: Iterable[str]) -> str:
    return " and ".join(names)


def worlds(least: int = 1, most: int = 8) -> list[tuple[str, int, bool]]:
    """(name, ranks, on GPUs) of the worlds that this machine can have: four ranks on the CPU, and `least` to
    `most` ranks on GPUs: one on each, or four on a single GPU if ranks can share it.
    """
    there = min(devices.gpus(), most)
    name = f"{there} GPU{'s' * (there > 1)}"
    n = 4 if there == 1 and most >= 4 and (nccl.shares() or nccl.newer()) else there
    return [("the CPU", 4, False), *([(name, n, True)] if n >= least else [])]


def ours() -> torch.device:
    """On a rank: its device."""
    return current.rank.device


def add_ones() -> float:
    """On a rank: an all-reduce of ones; its result is the number of ranks."""
    x = torch.ones(1000, device=ours())
    dist.all_reduce(x)
    return x[0].item()
