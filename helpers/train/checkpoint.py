"""Checkpoints of a sharded run: every rank writes what it holds, and any layout can read it back.

    run/step-000040/              complete, or it would not have this name
        __0_0.distcp …            a file for each rank: its shards of weights and optimizer state
        .metadata                 which shard is where (PyTorch's distributed checkpoint, DCP)
        about.json                step, model, layout, and the size of every file
    run/step-000060.unfinished/   a save that was cut short; the next save removes it

A save writes into `.unfinished` and renames it at the end, so a run killed at any moment leaves its last
complete checkpoint as it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

UNFINISHED = ".unfinished"
ABOUT = "about.json"
# Optimizer state goes by the parameters' names, not by their place in a group: another layout groups them
# otherwise.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class SaveFailed(Exception):
    """A checkpoint could not be written; the ones before it are untouched. Raised on every rank."""


def complete(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [p for p in run.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name) and (p / ABOUT).exists()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def save(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, about: dict) -> Path:
    """Write a checkpoint; every rank calls it. about: what `load` will compare and show, JSON values.

    Returns its folder. Raises SaveFailed (on all ranks) when the disk is full or the folder cannot be
    written.
    """
    folder = run / f"step-{step:06d}"
    unfinished = folder.with_name(folder.name + UNFINISHED)
    trouble = None
    try:
        if dist.get_rank() == 0:
            for left in run.glob(f"step-*{UNFINISHED}"):
                shutil.rmtree(left)
            unfinished.mkdir(parents=True)
    except OSError as e:
        trouble = e
    _agree(trouble, folder)
    try:
        weights, state = get_state_dict(model, optimizer, options=BY_NAME)
        with _quiet():
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=unfinished)
        if dist.get_rank() == 0:
            sizes = {p.name: p.stat().st_size for p in sorted(unfinished.iterdir())}
            (unfinished / ABOUT).write_text(json.dumps(about | {"step": step, "files": sizes}, indent=1))
            _to_disk(unfinished)
            if folder.exists():  # of a run that was resumed from before it
                shutil.rmtree(folder)
            os.rename(unfinished, folder)
            _to_disk(run)
    except (OSError, dcp.CheckpointException, RuntimeError) as e:
        trouble = e
    _agree(trouble, folder)
    return folder


def _agree(trouble: Exception | None, folder: Path) -> None:
    """All ranks learn whether one of them failed."""
    said: list = [None] * dist.get_world_size()
    dist.all_gather_object(said, trouble and _first_reason(trouble))
    if reason := next(filter(None, said), None):
        if dist.get_rank() == 0:
            shutil.rmtree(folder.with_name(folder.name + UNFINISHED), ignore_errors=True)
        raise SaveFailed(f"{folder.name} could not be written: {reason}")


def _first_reason(e: Exception) -> str:
    inner = next(iter(e.failures.values()))[0] if isinstance(e, dcp.CheckpointException) and e.failures else e
    said = str(inner).strip().splitlines()[0] if str(inner).strip() else type(inner).__name__
    # PyTorch's writer in C++ tells where in its source it stood, and not what the system said.
    return "the disk took no more, it is full or fails" if "inline_container" in said else said


def _to_disk(path: Path) -> None:
    """Have the system write a folder and the files in it before we say that they are there."""
    for each in [*(path.iterdir() if path.name.endswith(UNFINISHED) else ()), path]:
        handle = os.open(each, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read_about(folder: Path) -> dict:
    """What a checkpoint says of itself. Raises ValueError if it is missing, incomplete or cut short."""
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint {folder}; {_others(folder)}")
    try:
        about = json.loads((folder / ABOUT).read_text())
        files = about["files"]
        about["step"], about["model"].items(), files.items()  # what is read of it later
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{folder} is not a complete checkpoint: its {ABOUT} cannot be read; {_others(folder)}"
        ) from None
    for name, size in files.items():
        path = folder / name
        if not path.exists() or path.stat().st_size != size:
            has = f"has {path.stat().st_size:,} of {size:,} bytes" if path.exists() else "is missing"
            raise ValueError(f"{folder} is damaged: {name} {has}; {_others(folder)}")
    return about


def _others(folder: Path) -> str:
    others = [p.name for p in complete(folder.parent) if p != folder] if folder.parent.is_dir() else []
    return f"complete ones are {', '.join(others)}" if others else "no other complete one is there"


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Read a checkpoint into a model and an optimizer, split in whatever way; every rank calls it. Returns
    its `about`.

    Raises ValueError as `read_about`, and if it is a checkpoint of another model.
    """
    about = read_about(folder)
    weights, state = get_state_dict(model, optimizer, options=BY_NAME)
    with _quiet():
        _read({"model": weights, "optimizer": state}, folder, about)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=BY_NAME)
    return about


def load_weights(folder: Path, model: nn.Module) -> nn.Module:
    """Read the weights into a whole model in one process, without a group. Raises ValueError as `load`."""
    weights = get_model_state_dict(model)
    with _quiet():
        _read({"model": weights}, folder, read_about(folder), no_dist=True)
    model.load_state_dict(weights)
    return model


def _read(wanted: dict, folder: Path, about: dict, **how) -> None:
    try:
        dcp.load(wanted, checkpoint_id=folder, **how)
    except (dcp.CheckpointException, RuntimeError, ValueError) as e:
        raise ValueError(
            f"{folder} holds another model ({about.get('model', 'of unknown size')}), or is damaged:"
            f" {_first_reason(e)}"
        ) from None


@contextmanager
def _quiet():
    """DCP warns that it may run without a group, and of its own deprecated calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
