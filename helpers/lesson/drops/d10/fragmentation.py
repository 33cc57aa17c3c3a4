"""Drop 10's fifth signature: a device that is full of holes."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from .... import toy
from ....files import find
from ....runtime import current
from ....runtime.allocator import CachingAllocator
from ....runtime.failure import RankError
from ....runtime.world import World
from ....table import Table, human
from .shown import HIDDEN, LONG

DEVICE = 11.6e6  # bytes
THOUSANDTH = 1000  # of the allocator's sizes: a tensor of 1 kB is placed as one of 1 MB would be
VARIED = (88, 64, 88, 64, 40, 56, 72, 64, 96)  # the longest sequence of each step's batch
SAME = (96,) * len(VARIED)  # all padded to the longest


@dataclass
class Fragmented:
    """A run on one rank whose tensors are placed as PyTorch places them on a GPU.

    allocated, reserved: the most bytes of each in every step. given_back: how often, by then, free segments
    were given back to the device. error: of the step that failed, or "". segments: when it failed, as
    PyTorch's memory snapshot lists them.
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
    """Train the toy with Adam on batches of these lengths, until they are through or memory is out."""

    def step(first: bool, tokens: int) -> None:
        names = current.rank_state()
        allocator = current.rank.budget.allocator
        if first:
            allocator = current.rank.budget.allocator = CachingAllocator(device, THOUSANDTH)
            names["model"] = toy.ToyTransformer(hidden=HIDDEN, seq_len=LONG, seed=0)
            names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
        allocator.most_allocated = allocator.most_reserved = 0
        # The loop's variables: the last step's live on until they are set anew, as in every training script.
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
                run.error = next(s.error.message for s in e.seen if s.error)
            for kept, size in zip((run.allocated, run.reserved, run.given_back), world.run(look)[0]):
                kept.append(size)
            if run.error:
                run.segments = world.run(lambda: current.rank.budget.allocator.at_failure)[0]
                break
    return run


def two_ways(varied: Fragmented, same: Fragmented) -> Table:
    """The same device, and batches of many lengths or of one."""
    rows = [
        [
            name,
            human(max(run.allocated)),
            human(max(run.reserved)),
            str(run.given_back[-1]),
            f"out of memory in step {len(run.tokens)}" if run.error else f"{len(run.tokens)} steps done",
        ]
        for name, run in (("of many lengths", varied), (f"all padded to {max(same.tokens)}", same))
    ]
    return Table(
        ["batches", "most allocated", "most reserved", "given back", "end"],
        rows,
        title=f"one rank, a device of {human(DEVICE)}",
    )
