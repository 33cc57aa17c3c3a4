"""Drop 10's runs: five that ran out of memory, and a checkpoint saved in three ways."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from helpers import toy
from helpers.emulate import CachingAllocator
from helpers.ranks import RankError, World, current
from three_axes.files import find
from three_axes.table import Table, human

if TYPE_CHECKING:
    from helpers.train import Trainer

CAUSES = ("optimizer state", "leak", "long batch", "gather on rank 0")
HIDDEN, RANKS, USUAL, LONG = 64, 4, 32, 160  # of these runs; USUAL, LONG: tokens of a sequence
BUDGET = 6.5e6  # bytes for each rank


@dataclass
class Run:
    """The record of a run that ended out of memory. peaks[step][rank]: the most bytes of tensors that the
    rank held in that step.

    tokens[step]: the length of the step's longest sequence. log: the printed lines. error: the message of the
    rank that failed. budget: bytes of a rank.
    """

    tokens: list[int]
    peaks: list[list[int]]
    log: list[str]
    error: str
    budget: float

    def __repr__(self) -> str:
        return "\n".join([*self.log, self.error])


def load(number: int) -> Run:
    """Incident 1 to 4, recorded from real ranks by data/incidents/make.py."""
    return Run(**json.loads(find(f"data/incidents/run_{number}.json").read_text(encoding="utf-8")))


def out_of_memory(error: RankError) -> str:
    """The message of the first rank that was out of memory; '' if none was."""
    messages = (s.error.message for s in error.seen if s.error and s.error.type == "OutOfMemoryError")
    return str(next(messages, ""))


def crash(
    cause: str,
    budget: float = BUDGET,
    steps: int = 12,
    at: int = 8,
    hidden: int = HIDDEN,
    lengths: Sequence[int] = (USUAL,),
) -> Run:
    """Train the toy on four real ranks under a memory budget, with one thing wrong, until a rank is out of
    memory.

    cause: one of CAUSES. budget: bytes of a rank. at: the step with the long batch or the gather. lengths:
    tokens of a sequence in each other step; after the last the first comes again. Raises ValueError if the
    run survives.
    """

    def train(first: bool, step: int, tokens: int) -> tuple[int, float]:
        here = current.rank_state()
        rank, d = dist.get_rank(), dist.get_world_size()
        if first:
            here["model"] = toy.ToyTransformer(hidden=hidden, seq_len=LONG, seed=0)
            here["optimizer"] = (torch.optim.AdamW if cause in CAUSES[:1] else torch.optim.SGD)(
                here["model"].parameters(), lr=1e-3
            )
            # A share of a larger model's states.
            here["kept"], here["shards"] = ([], torch.zeros(1_500_000 // 4))
        model, budget_ = here["model"], current.rank.budget
        budget_.peak = budget_.now
        x, y = (toy.my_share(t, rank, d) for t in toy.make_batch(4 * d, tokens, seed=step))
        scores = model(x)
        loss = toy.loss_of(scores, y)
        if cause == "leak":
            here["kept"].append(scores)  # "for the metrics"
        loss.backward()
        held = budget_.now
        toy.average_gradients(model)
        # On a busy machine gloo's thread frees the sum's buffer late, and Adam's first step has no room.
        until = time.monotonic() + 2
        while budget_.now > held and time.monotonic() < until:
            time.sleep(1e-3)
        here["optimizer"].step(), here["optimizer"].zero_grad()
        if cause == "gather on rank 0" and step == at:
            parts = [torch.empty_like(here["shards"]) for _ in range(d)] if rank == 0 else None
            dist.gather(here["shards"], parts)
        return budget_.peak, loss.item()

    run = Run([], [], [], "", budget)
    with World(RANKS, memory=budget, timeout=30) as world:
        for step in range(steps):
            tokens = LONG if cause == "long batch" and step == at else lengths[step % len(lengths)]
            run.tokens.append(tokens)
            try:
                results = world.run(train, step == 0, step, tokens)
            except RankError as e:
                run.peaks.append(world.run(current.peak_memory))
                run.error = out_of_memory(e)
                return run
            run.peaks.append([peak for peak, _ in results])
            run.log.append(
                f"step {step:2}  loss {sum(loss for _, loss in results) / RANKS:.3f}  {16 * tokens:5} tokens"
            )
    raise ValueError(f"{cause} survived {steps} steps under a budget of {human(budget)}: {run.peaks}")


# -- the fifth signature: a device that is full of holes ------------------------------------------

DEVICE = 11.6e6  # bytes
THOUSANDTH = 1000  # the allocator's sizes are divided by this: a tensor of 1 kB is placed like one of 1 MB
VARIED = (88, 64, 88, 64, 40, 56, 72, 64, 96)  # the longest sequence of each step's batch
SAME = (96,) * len(VARIED)  # all padded to the longest


@dataclass
class Fragmented:
    """A run on one rank whose tensors are placed as PyTorch places them on a GPU.

    tokens, allocated, reserved, given_back have a number for each step: its longest sequence, the most bytes
    of each kind, and how often free segments have been returned to the device until then. error: of the step
    that failed, or "". segments: at that moment, as PyTorch's memory snapshot lists them.
    """

    tokens: list[int]
    allocated: list[int]
    reserved: list[int]
    given_back: list[int]
    error: str
    segments: list[dict]


def load_fragmented(name: str) -> Fragmented:
    """ "varied" or "same": recorded by data/incidents/make.py."""
    return Fragmented(**json.loads(find(f"data/incidents/fragmented_{name}.json").read_text()))


def fragment(lengths: tuple[int, ...], device: float = DEVICE) -> Fragmented:
    """Train the toy with Adam on batches of these lengths, up to the last or until memory is out."""

    def step(first: bool, tokens: int) -> None:
        names = current.rank_state()
        allocator = current.rank.budget.allocator
        if first:
            allocator = current.rank.budget.allocator = CachingAllocator(device, THOUSANDTH)
            names["model"] = toy.ToyTransformer(hidden=HIDDEN, seq_len=LONG, seed=0)
            names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
        allocator.most_allocated = allocator.most_reserved = 0
        # The loop's variables live on until the next step sets them anew, as in every training script.
        names["x"], names["y"] = toy.make_batch(4, tokens, seed=tokens)
        names["scores"] = names["model"](names["x"])
        toy.loss_of(names["scores"], names["y"]).backward()
        names["optimizer"].step(), names["optimizer"].zero_grad()

    def look() -> tuple:
        a = current.rank.budget.allocator
        return a.most_allocated, a.most_reserved, a.retries

    run = Fragmented([], [], [], [], "", [])
    with World(1, memory=1e12, timeout=30) as world:
        for i, tokens in enumerate(lengths):
            run.tokens.append(tokens)
            try:
                world.run(step, i == 0, tokens)
            except RankError as e:
                run.error = out_of_memory(e)
            for kept, size in zip((run.allocated, run.reserved, run.given_back), world.run(look)[0]):
                kept.append(size)
            if run.error:
                run.segments = world.run(lambda: current.rank.budget.allocator.at_failure)[0]
                break
    return run


def two_ways(varied: Fragmented, same: Fragmented) -> Table:
    """Two runs on one device: with batches of many lengths, and of one length."""
    rows = []
    for name, run in (("of many lengths", varied), (f"all padded to {max(same.tokens)}", same)):
        steps = len(run.tokens)
        end = f"out of memory in step {steps}" if run.error else f"{steps} steps done"
        most = human(max(run.allocated)), human(max(run.reserved))
        rows.append([name, *most, str(run.given_back[-1]), end])
    columns = ["batches", "most allocated", "most reserved", "given back", "end"]
    return Table(columns, rows, title=f"one rank, a device of {human(DEVICE)}")


# -- the second incident, cured -------------------------------------------------------------------
# Three checkpoints: gathered on one rank, written by each rank for its part, and written in the background
# while training continues.


GATHERED, SHARDED, BACKGROUND = "gathered on rank 0", "each rank its part", "the same, in the background"


def _save(trainer: Trainer, how: str) -> None:
    """Save a checkpoint: the course's own (`helpers.train`), in which each rank writes its shards; or, with
    GATHERED, the whole model and optimizer, which rank 0 collects and writes into one file.
    """
    if how != GATHERED:
        trainer.save()
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_state_dict(trainer.model, trainer.optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(whole, Path(trainer.config.out, "gathered.pt"))
    dist.barrier()


def saves() -> dict[str, dict]:
    """Each checkpoint on four real ranks under FSDP -> beyond: the bytes that each rank held more while it
    saved; files: their number; stall: the seconds that training waited, on the slowest rank.
    """

    def run(how: str, folder: str) -> tuple[int, float]:
        from helpers import train  # it imports FSDP, which a rank has imported already, a notebook has not

        background = how == BACKGROUND
        config = train.Config(hidden=HIDDEN, seq_len=32, batch=8, steps=1, out=folder, async_save=background)
        trainer = train.Trainer(config, current.rank.device)
        trainer.step()
        dist.barrier()
        current.peak_memory(reset=True)
        before, start = current.peak_memory(), time.perf_counter()
        _save(trainer, how)
        stall = time.perf_counter() - start
        trainer.saved()
        return current.peak_memory() - before, stall

    measured = {}
    for how in (GATHERED, SHARDED, BACKGROUND):
        with TemporaryDirectory() as folder, World(RANKS, memory=1e12, timeout=60) as world:
            beyond, stalls = zip(*world.run(run, how, folder))
            files = [f for f in Path(folder).rglob("*") if f.suffix in (".pt", ".distcp")]
        measured[how] = {"beyond": list(beyond), "files": len(files), "stall": max(stalls)}
    # In the background only the training's thread is counted, which holds a copy. The thread that writes
    # holds as much as a sharded save does.
    pairs = zip(measured[BACKGROUND]["beyond"], measured[SHARDED]["beyond"])
    measured[BACKGROUND]["beyond"] = [copy + writing for copy, writing in pairs]
    return measured


def saves_table(measured: dict[str, dict]) -> Table:
    """The memory that each checkpoint needs on rank 0 beyond what the rank holds anyway, and its files."""
    beyond = {how: round(m["beyond"][0], -4) for how, m in measured.items()}  # PyTorch itself needs some kB
    rows = [[how, human(beyond[how]), str(m["files"])] for how, m in measured.items()]
    columns = ["checkpoint", "more memory on rank 0", "files"]
    return Table(columns, rows, title=f"four ranks under FSDP, hidden {HIDDEN}")


def stalls(measured: dict[str, dict]) -> str:
    """A line for each checkpoint: the seconds that training waited for it."""
    return "\n".join(f"{how:28} training stands still for {m['stall']:.2f} s" for how, m in measured.items())
