"""`helpers.train` against a bare script that does the same with PyTorch alone, and against accelerate:
`python tools/bench/training.py`.

Eight ranks, the same sizes, clipping and AdamW; the two of a pair take turns, step by step, in the same
processes. The bare script has FSDP 2 × TP 2 × 1F1B 2; accelerate on CPU ranks has data parallelism.
"""

from __future__ import annotations

import builtins
import statistics
import time

import torch
import torch.distributed as dist
from report import save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from drops.d14 import ByAccelerate
from helpers import World, toy
from helpers.ranks import memory
from helpers.train import Config, Trainer, read_text
from three_axes.table import human

CONFIG = Config(dp=2, tp=2, pp=2, batch=32, microbatch=8, steps=100)
REPLICATED = Config(dp=8, shard=1, batch=32, steps=100)


class Bare:
    """What one would write without the course: no checkpoints, no metrics, one learning rate."""

    def __init__(self):
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        whole = toy.ToyTransformer(CONFIG.hidden, CONFIG.heads, CONFIG.layers, CONFIG.seq_len)
        self.index = self.mesh.get_local_rank("pp")
        self.model = nn.Sequential(*list(whole)[3 * self.index : 3 * self.index + 3])
        enter = lambda: PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
        )
        how = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
        how |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
        how |= {name: enter() for name in ("attention", "mlp")}
        for block in self.model:
            if isinstance(block, toy.Block):
                parallelize_module(block, self.mesh["tp"], how)
                fully_shard(block, mesh=self.mesh["dp"], reshard_after_forward=False)
        fully_shard(self.model, mesh=self.mesh["dp"])
        over = lambda axes: [p for p in self.model.parameters() if p.device_mesh.ndim == axes]
        groups = [{"params": over(axes)} for axes in (2, 1)]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3, fused=True)
        stage = PipelineStage(self.model, self.index, 2, torch.device("cpu"), group=self.mesh.get_group("pp"))
        self.schedule = Schedule1F1B(stage, 2, loss_fn=toy.loss_of)
        self.text = read_text()

    def step(self):
        starts = torch.randint(len(self.text) - CONFIG.seq_len, (CONFIG.batch // 2, 1))
        at = starts + torch.arange(CONFIG.seq_len)
        losses: list = []
        if self.index == 0:
            self.schedule.step(self.text[at])
        else:
            self.schedule.step(target=self.text[at + 1], losses=losses)
        squares = sum(p.grad.to_local().square().sum() for p in self.model.parameters())
        dist.all_reduce(squares)
        norm = squares.sqrt().item()
        for p in self.model.parameters():
            p.grad.to_local().mul_(min(1.0, 1.0 / (norm + 1e-6)))
        self.optimizer.step()
        self.optimizer.zero_grad()


MAKE = {
    "helpers.train, 2·2·2": lambda: Trainer(CONFIG),
    "bare script, 2·2·2": Bare,
    "helpers.train, 8·1·1": lambda: Trainer(REPLICATED),
    "accelerate, 8·1·1": lambda: ByAccelerate(REPLICATED),
}


def pairs(one: str, other: str, n: int) -> list[tuple[float, float]]:
    """On a rank: seconds of a step of each, taken in turn."""
    both = [MAKE[one](), MAKE[other]()]
    seconds = []
    for i in range(n + 3):
        took = {}
        for which in (both, both[::-1])[i % 2]:  # nobody is always first
            dist.barrier()
            start = time.perf_counter()
            which.step()
            dist.barrier()
            took[which] = time.perf_counter() - start
        if i >= 3:
            seconds.append((took[both[0]], took[both[1]]))
    return seconds


def prepare(name: str) -> None:
    builtins.alone = MAKE[name]()  # where the next call finds it
    for _ in range(3):
        builtins.alone.step()


def main() -> None:
    rows, held = [], {}
    for name in MAKE:  # memory and bytes: each by itself
        with World(8, timeout=600) as world:
            world.run(prepare, name)
            world.run(lambda: builtins.alone.step())
            held[name] = sum(map(memory.resident, world.pids)), world.traffic.wire[0]
    for ours, other in (list(MAKE)[:2], list(MAKE)[2:]):
        with World(8, timeout=600, counted=False) as world:
            both = world.run(pairs, ours, other, 40)[0]
        for name, seconds in zip((ours, other), map(statistics.median, zip(*both))):
            resident, wire = held[name]
            ratio = f"{statistics.median(b / a for a, b in both):.2f}×" if name == ours else ""
            speed = [f"{1e3 * seconds:.0f} ms", f"{CONFIG.batch * CONFIG.seq_len / seconds:,.0f}", ratio]
            rows.append([name, *speed, human(resident), human(wire)])
    columns = ["", "step", "tokens/s", "throughput of helpers.train over the other"]
    columns += ["memory of all ranks", "sent by rank 0"]
    note = (
        "40 pairs. helpers.train also follows a schedule of the learning rate, writes metrics and can save."
    )
    title = "Training on eight gloo ranks: a step, paired"
    save("training", title, columns, rows, note, packages=("accelerate",))


if __name__ == "__main__":
    main()
