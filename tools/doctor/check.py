"""A check of `three-axes doctor`, and functions that several checks use."""

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
    """A check. expected: the right result. advice: what to do about a wrong one. run: a function of the name
    of another host ('' for none). It returns the result as a text, or raises Wrong or Skipped.
    """

    name: str
    expected: str
    advice: str
    run: Callable[[str], str]


def check(name: str, expected: str, advice: str):
    """A decorator that makes a Check of a function."""
    return lambda run: Check(name, expected, advice, run)


def expect(right: bool, result: str) -> None:
    """Raise Wrong with the result, unless it is right."""
    if not right:
        raise Wrong(result)


def both(names: Iterable[str]) -> str:
    return " and ".join(names)


def worlds(least: int = 1, most: int = 8) -> list[tuple[str, int, bool]]:
    """(name, ranks, whether on GPUs) of the worlds that this machine can have: four ranks on the CPU; and at
    most `most` ranks on GPUs, one on each, or four on a single GPU if ranks can share it. The second is left
    out if it would have fewer than `least` ranks.
    """
    gpus = min(devices.gpus(), most)
    name = f"{gpus} GPU{'s' * (gpus > 1)}"
    n = 4 if gpus == 1 and most >= 4 and (nccl.shares() or nccl.newer()) else gpus
    return [("the CPU", 4, False), *([(name, n, True)] if n >= least else [])]


def own_device() -> torch.device:
    """The device of the rank on which this is called."""
    return current.rank.device


def add_ones() -> float:
    """Run an all-reduce of ones on a rank. Returns the sum, which should be the number of ranks."""
    x = torch.ones(1000, device=own_device())
    dist.all_reduce(x)
    return x[0].item()
