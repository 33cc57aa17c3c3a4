"""Drop 10's second incident, cured: a checkpoint gathered on one rank, one of which each rank writes its
part, and one that is written while training goes on.
"""

from __future__ import annotations

import time
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


GATHERED, SHARDED, BACKGROUND = "gathered on rank 0", "each rank its part", "the same, in the background"
WAYS = {GATHERED: _gathered, SHARDED: _sharded, BACKGROUND: _sharded}


def saves() -> dict[str, dict]:
    """Each on four real ranks under FSDP: bytes that each rank held beyond its own meanwhile, files, and the
    seconds that training stood still, on the slowest rank.
    """

    def run(how: str, folder: str) -> tuple[int, float]:
        background = how == BACKGROUND
        config = train.Config(hidden=HIDDEN, seq_len=32, batch=8, steps=1, out=folder, async_save=background)
        trainer = train.Trainer(config, current.rank.device)
        trainer.step()
        dist.barrier()
        current.peak_memory(reset=True)
        before, start = current.peak_memory(), time.perf_counter()
        WAYS[how](trainer, Path(folder))
        stall = time.perf_counter() - start
        trainer.saved()
        return current.peak_memory() - before, stall

    measured = {}
    for how in WAYS:
        with TemporaryDirectory() as folder, World(RANKS, memory=1e12, timeout=60) as world:
            beyond, stalls = zip(*world.run(run, how, folder))
            files = [f for f in Path(folder).rglob("*") if f.suffix in (".pt", ".distcp")]
        measured[how] = {"beyond": list(beyond), "files": len(files), "stall": max(stalls)}
    # The account above is the training's thread's, and has the copy only. The thread that writes it holds
    # what a sharded save holds.
    pairs = zip(measured[BACKGROUND]["beyond"], measured[SHARDED]["beyond"])
    measured[BACKGROUND]["beyond"] = [copy + writing for copy, writing in pairs]
    return measured


def saves_table(measured: dict[str, dict]) -> Table:
    """What a save needs beside what rank 0 holds anyway."""
    return Table(
        ["checkpoint", "more memory on rank 0", "files"],
        [[how, human(m["beyond"][0]), str(m["files"])] for how, m in measured.items()],
        title=f"four ranks under FSDP, hidden {HIDDEN}",
    )


def stalls(measured: dict[str, dict]) -> str:
    """How long training stood still for each, a line each."""
    return "\n".join(f"{how:28} training stands still for {m['stall']:.2f} s" for how, m in measured.items())
