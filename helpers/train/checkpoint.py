"""Checkpoints of a sharded run: every rank writes what it holds, and any layout can read it back.

    run/step-000040/              complete, or it would not have this name
        __0_0.distcp …            a file for each rank: its shards of weights and optimizer state
        .metadata                 which shard is where (PyTorch's distributed checkpoint, DCP)
        about.json                step, model, layout, and the size and digest of every file
    run/step-000060.unfinished/   a save that was cut short; the next save removes it
    run/step-000080.damaged/      was complete, and is no longer what was saved

A save writes into `.unfinished` and renames it at the end, so a run killed at any moment leaves its last
complete checkpoint as it was. What is removed loses its name first. What is read has the digest that it was
saved with, and is data alone: a file of somebody else's that holds code is refused.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from three_axes.count.interposer import interposer
from three_axes.foreign import DataUnpickler
from three_axes.table import human

UNFINISHED, DAMAGED = ".unfinished", ".damaged"
ABOUT = "about.json"
ENTRY = 1600  # bytes that DCP's files and .metadata have for each entry besides its numbers, as measured
# Optimizer state goes by the parameters' names, not by their place in a group: another layout groups them
# otherwise.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
TOOK_NO_MORE = "the disk took no more"
# What DCP's index names, as seen in PyTorch 2.13: dataclasses, and functions that make data. Each in full: a
# module's name alone would let in what it imports.
INDEX_NAMES = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    **dict.fromkeys(("pathlib", "pathlib._local"), ("PosixPath", "WindowsPath")),
}


class SaveFailed(Exception):
    """A checkpoint could not be written; the ones before it are untouched. Raised on every rank."""


class Damaged(ValueError):
    """A checkpoint is not what was saved. Raised on every rank."""


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    checkpoints = [
        p for p in run.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name) and (p / ABOUT).exists()
    ]
    return sorted(checkpoints, key=lambda p: int(p.name[5:]))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """What a checkpoint holds of this rank, by name: the tensors themselves, not copies."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=BY_NAME)))


def write(
    run: Path, step: int, state: dict[str, dict], about: dict, group: dist.ProcessGroup | None = None
) -> Path:
    """Write a checkpoint; every rank calls it.

    state: of `state_of`, or a copy. about: what `load` will compare and show, JSON values. group: all ranks,
    for what they say to each other meanwhile.
    Returns its folder. Raises SaveFailed (on all ranks) when the disk is full or the folder cannot be
    written.
    """
    folder = run / f"step-{step:06d}"
    unfinished = folder.with_name(folder.name + UNFINISHED)
    size = _size_of(state["model"] | state["optimizer"])
    agree = partial(_agree, folder=folder, stage=next(iter(state["model"])), size=size, group=group)
    trouble = None
    try:
        if dist.get_rank() == 0:
            for left in run.glob(f"step-*{UNFINISHED}"):
                shutil.rmtree(left)
            unfinished.mkdir(parents=True)
    except OSError as e:
        trouble = e
    agree(trouble)
    mine: dict[str, list] = {}
    try:
        with _quiet():
            dcp.save(state, checkpoint_id=unfinished, process_group=group)
        ours = [f"__{dist.get_rank()}_*", *([".metadata"] if dist.get_rank() == 0 else [])]
        mine = {p.name: [p.stat().st_size, _digest(p)] for name in ours for p in unfinished.glob(name)}
    except (OSError, dcp.CheckpointException, RuntimeError) as e:
        trouble = e
    files = agree(trouble, mine)
    try:
        if dist.get_rank() == 0:
            (unfinished / ABOUT).write_text(json.dumps(about | {"step": step, "files": files}, indent=1))
            _to_disk(unfinished)
            if folder.exists():  # of a run that was resumed from before it
                os.rename(folder, folder.with_name(f"{folder.name}.replaced{UNFINISHED}"))
            os.rename(unfinished, folder)
            _to_disk(run)
            for left in run.glob(f"step-*{UNFINISHED}"):
                shutil.rmtree(left, ignore_errors=True)
    except OSError as e:
        trouble = e
    agree(trouble)
    return folder


def prune(run: Path, keep: int) -> None:
    """Remove all complete checkpoints but the last `keep`, at least one. On one rank."""
    for folder in complete(run)[: -max(1, keep)]:
        away = folder.with_name(folder.name + UNFINISHED)
        with suppress(OSError):  # the next save tries again
            os.rename(folder, away)  # half of it must not look complete
            shutil.rmtree(away)


def _size_of(entries: dict) -> int:
    """Bytes that a checkpoint of this stage takes: a tensor that is split over ranks counts with all its
    parts, and each entry with its headers.
    """
    return ENTRY * len(entries) + sum(
        t.numel() * t.element_size() for t in entries.values() if isinstance(t, torch.Tensor)
    )


def _agree(
    trouble: Exception | None, files: dict | None = None, *, folder: Path, stage: str, size: int, group
) -> dict[str, list]:
    """All ranks learn whether one of them failed, and which files they wrote: of all of them, by name.

    stage, size: a name of what this rank's stage holds, the same on all its ranks, and its bytes.
    """
    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (trouble and _first_reason(trouble), stage, size, files or {}), group)
    if reason := next(filter(None, (report[0] for report in reports)), None):
        told: list = [None]
        if dist.get_rank() == 0:
            needed = sum({stage: size for _, stage, size, _ in reports}.values())
            told = [_why(reason, folder.with_name(folder.name + UNFINISHED), needed)]
            shutil.rmtree(folder.with_name(folder.name + UNFINISHED), ignore_errors=True)
        dist.broadcast_object_list(told, 0, group)
        raise SaveFailed(f"{folder.name} could not be written: {told[0]}")
    return {name: of for *_, files in reports for name, of in sorted(files.items())}


def _why(reason: str, unfinished: Path, needed: int) -> str:
    """The reason, and how much was needed and free: PyTorch's writer keeps to itself what the system said."""
    if reason != TOOK_NO_MORE and os.strerror(errno.ENOSPC) not in reason:
        return reason
    written = unfinished.iterdir() if unfinished.exists() else ()
    free = shutil.disk_usage(unfinished.parent).free + sum(512 * p.stat().st_blocks for p in written)
    if free < needed or os.strerror(errno.ENOSPC) in reason:
        return f"the disk is full: the checkpoint needs {human(needed)}, and {human(free)} is free"
    return (
        f"{TOOK_NO_MORE}: the checkpoint needs {human(needed)}, and {human(free)} is free. A"
        " quota or a limit on the size of files may be in the way, or the disk fails"
    )


def _first_reason(e: Exception) -> str:
    inner = next(iter(e.failures.values()))[0] if isinstance(e, dcp.CheckpointException) and e.failures else e
    reason = str(inner).strip().splitlines()[0] if str(inner).strip() else type(inner).__name__
    # PyTorch's writer in C++ tells where in its source it stood, and not what the system said.
    return TOOK_NO_MORE if "inline_container" in reason else reason


def _to_disk(path: Path) -> None:
    """Have the system write a folder and the files in it before we say that they are there."""
    for entry in [*(path.iterdir() if path.name.endswith(UNFINISHED) else ()), path]:
        handle = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _digest(file: Path) -> str:
    made = hashlib.sha256()
    with file.open("rb") as f:
        while block := f.read(2**20):
            made.update(block)
    return made.hexdigest()


def read_about(folder: Path, rank: int = 0, n: int = 1) -> dict:
    """What a checkpoint says of itself.

    rank, n: one of n ranks compares the digests of every n-th file. Raises Damaged if the checkpoint is
    missing, incomplete or not what was saved.
    """
    if not folder.is_dir():
        raise Damaged(f"there is no checkpoint {folder}")
    try:
        about = json.loads((folder / ABOUT).read_text())
        files = {name: (int(size), str(digest)) for name, (size, digest) in about["files"].items()}
        about["step"], about["layout"], about["model"].items(), about["with"].items()  # is read later
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{folder} is not a complete checkpoint: its {ABOUT} cannot be read") from None
    for number, (name, (size, digest)) in enumerate(files.items()):
        path = folder / name
        if not path.exists():
            raise Damaged(f"{folder} is damaged: {name} is missing")
        if path.stat().st_size != size:
            raise Damaged(f"{folder} is damaged: {name} has {path.stat().st_size:,} of {size:,} bytes")
        if number % n == rank and _digest(path) != digest:
            raise Damaged(f"{folder} is damaged: {name} has other bytes than were saved")
    return about


def read_about_together(folder: Path) -> dict:
    """`read_about`, its digests shared among all ranks; every rank calls it. Raises Damaged on all."""
    about, trouble = {}, ""
    try:
        about = read_about(folder, dist.get_rank(), dist.get_world_size())
    except Damaged as e:
        trouble = str(e)
    told: list = [None] * dist.get_world_size()
    dist.all_gather_object(told, trouble)
    if reason := next(filter(None, told), ""):
        raise Damaged(reason)
    return about


def set_aside(folder: Path) -> None:
    """Take the name of a complete checkpoint from one that is damaged. On one rank."""
    away = folder.with_name(folder.name + DAMAGED)
    shutil.rmtree(away, ignore_errors=True)
    os.rename(folder, away)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into a model and an optimizer, split in whatever way; every rank calls it, after
    `read_about_together`.

    Raises ValueError if it is a checkpoint of another model, or holds code.
    """
    state = state_of(model, optimizer)
    _read(state, folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=BY_NAME,
    )


def load_weights(folder: Path, model: nn.Module) -> nn.Module:
    """Read the weights into a whole model in one process, without a group, after `read_about`. Raises
    ValueError as `load`.
    """
    weights = get_model_state_dict(model)
    _read({"model": weights}, folder, no_dist=True)
    model.load_state_dict(weights)
    return model


def _read(wanted: dict, folder: Path, **how) -> None:
    try:
        DataUnpickler((folder / ".metadata").read_bytes(), _is_of_index).load()
        with _quiet():
            dcp.load(wanted, checkpoint_id=folder, planner=_Data(), **how)
    except (dcp.CheckpointException, RuntimeError, ValueError, pickle.UnpicklingError) as e:
        raise ValueError(
            f"{folder} holds something else than weights and optimizer of this model: {_first_reason(e)}"
        ) from None


def _is_of_index(module: str, name: str) -> bool:
    """Whether DCP writes the name into `.metadata`, which is a pickle."""
    number_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    return number_format or name in INDEX_NAMES.get(module, ())


class _Data(dcp.DefaultLoadPlanner):
    """Reads what is no tensor (a learning rate, two betas), a pickle each, and refuses what could be code."""

    def load_bytes(self, read_item, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


@contextmanager
def _quiet():
    """DCP warns that it may run without a group, and of its own deprecated calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- written while training goes on ---------------------------------------------------------------


# Pinned and shared memory, and copies that overlap, need a GPU; PyTorch asks for all four or for none.
PLAIN = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class Background:
    """One thread, and at most one checkpoint under way. Every rank makes one, and calls the same of it.

    timeout: seconds without an answer after which another rank counts as lost.
    """

    def __init__(self, timeout: float):
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._under_way: Future | None = None

    def begin(self, write: Callable, state: dict) -> None:
        """Copy `state`, then run `write(copy, group)` on the thread. Nothing else may be under way."""
        copy = DefaultStager(PLAIN).stage(state)

        def beside() -> None:
            with interposer.aside():
                write(copy, self._group)

        self._under_way = self._thread.submit(beside)

    def finish(self) -> None:
        """Wait for what is under way, if anything is. Raises what it raised."""
        under_way, self._under_way = self._under_way, None
        if under_way:
            under_way.result()
