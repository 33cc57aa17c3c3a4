"""Finds which version of NCCL is loaded, and whether ranks can share a GPU with it.

From NCCL 2.30 on several ranks may use one GPU (`NCCL_MULTI_RANK_GPU_ENABLE`, experimental; env.rst and
init.cc of NCCL 2.30.7). PyTorch 2.14 comes with NCCL 2.30.7. An older PyTorch also works with a newer NCCL,
if the loader finds that library first: `LD_PRELOAD`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

SHARES = 2, 30  # the first version with which ranks can share a GPU
NAME = "libnccl.so.2"
IN_A_FOLDER = Path("nvidia", "nccl", "lib", NAME)  # in both packages, nvidia-nccl-cu12 and nvidia-nccl-cu13
FOLDER = Path("~/.cache/three-axes/nccl")  # a user may install a newer library here
# Text in the library's file, "NCCL version 2.30.7+cuda12.9", which it prints when it starts.
_WRITTEN = re.compile(rb"NCCL version (\d+)\.(\d+)\.(\d+)\+cuda(\d+)")


@cache
def version() -> tuple[int, ...]:
    """The version of the NCCL that this process has loaded, such as (2, 30, 7). () without NCCL, and for
    AMD's RCCL. (`torch.cuda.nccl.version()` returns the version with which PyTorch was built.)
    """
    if torch.version.hip or not dist.is_nccl_available():
        return ()
    number = ctypes.c_int()
    try:
        # NOLOAD: the library that is already loaded, wherever it came from.
        ctypes.CDLL(NAME, mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # NCCL is a part of PyTorch's own library
        return torch.cuda.nccl.version()[:3]
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def shares() -> bool:
    """Whether ranks can share a GPU with this process's NCCL."""
    return version() >= SHARES


def newer() -> str | None:
    """The path of an installed NCCL with which ranks can share a GPU, for `LD_PRELOAD`; None if there is
    none. A library for the CUDA version of this PyTorch is preferred, then the highest version.
    """
    if not version():
        return None
    folders = [*map(Path, sys.path), FOLDER.expanduser()]
    files = [folder / IN_A_FOLDER for folder in folders] + [Path("/usr/lib/x86_64-linux-gnu", NAME)]
    found = {}
    for file in files:
        *number, cuda = _written_in(file)
        if tuple(number) >= SHARES:
            found[str(file)] = str(cuda) == _cuda(), number
    return max(found, key=found.__getitem__, default=None)


def _written_in(file: Path) -> tuple[int, ...]:
    """The version of NCCL in a library's file, then of its CUDA: (2, 30, 7, 12); (0,) if there is none."""
    try:
        with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            written = _WRITTEN.search(data)
            return tuple(map(int, written.groups())) if written else (0,)
    except (OSError, ValueError):
        return (0,)


def _cuda() -> str:
    return (torch.version.cuda or "12").split(".")[0]


def why_not(ranks: int, gpus: int, launched: bool = False) -> str:
    """Sentences on why ranks cannot share so few GPUs, and how they could. launched: whether the ranks were
    started by a launcher's command, which then needs LD_PRELOAD in front of it.
    """
    those = f"{ranks} ranks have {gpus} GPU{'s' * (gpus > 1)}"
    reason = f"{those}, and can share one over NVIDIA's NCCL 2.30 or newer; {written(version())} is loaded."
    if not version():
        return reason
    library = newer() or str(FOLDER / IN_A_FOLDER)
    preload = f" Begin the command with LD_PRELOAD={library}" * launched
    if newer():
        return reason + preload
    command = f"pip install --target {FOLDER} nvidia-nccl-cu{_cuda()}"
    return f"{reason} `{command}` installs a newer one, which is found there.{preload}"


def written(version: tuple[int, ...]) -> str:
    """'2.30.7'; 'none' for ()."""
    return ".".join(map(str, version)) or "none"
