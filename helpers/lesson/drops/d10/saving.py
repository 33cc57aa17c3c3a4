"""Drop 10's second incident, cured: a checkpoint gathered on one rank, and one of which every rank writes its
part.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from .... import train
from ....runtime import current
from ....runtime.world import World
from ....table import Table, human
from .shown import HIDDEN, RANKS


def _gathered(trainer: train.Trainer, folder: Path) -> None:
    """The whole model and optimizer, collected by rank 0, which writes one file."""
    whole = get_state_dict(
        trainer.model, trainer.optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        torch.save(whole, folder / "gathered.pt")
    dist.barrier()


def _sharded(trainer: train.Trainer, folder: Path) -> None:
    """The course's own (`helpers.train`): each rank writes what it holds."""
    trainer.save()


WAYS = {"gathered on rank 0": _gathered, "each rank its part": _sharded}


def saves() -> dict[str, dict]:
    """Both on four real ranks under FSDP: bytes that each rank held beyond its own meanwhile, and files."""

    def run(how: str, folder: str) -> int:
        config = train.Config(hidden=HIDDEN, seq_len=32, batch=8, steps=1, out=folder)
        trainer = train.Trainer(config, current.rank.device)
        trainer.step()
        dist.barrier()
        current.peak_memory(reset=True)
        before = current.peak_memory()
        WAYS[how](trainer, Path(folder))
        return current.peak_memory() - before

    measured = {}
    for how in WAYS:
        with TemporaryDirectory() as folder, World(RANKS, memory=1e12, timeout=60) as world:
            beyond = world.run(run, how, folder)
            files = [f for f in Path(folder).rglob("*") if f.suffix in (".pt", ".distcp")]
        measured[how] = {"beyond": beyond, "files": len(files)}
    return measured


def saves_table(measured: dict[str, dict]) -> Table:
    """What a save needs beside what rank 0 holds anyway."""
    return Table(
        ["checkpoint", "more on rank 0", "files"],
        [[how, human(m["beyond"][0]), str(m["files"])] for how, m in measured.items()],
        title=f"four ranks under FSDP, hidden {HIDDEN}",
    )
