"""`helpers.train` against a bare script that does the same with PyTorch alone: paired steps on eight ranks, and the ratio.

Both have FSDP 2 × TP 2 × 1F1B 2, the same sizes, clipping and AdamW; they take turns, step by step, in the same processes.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from helpers import World, toy
from helpers.train import Config, Trainer, read_text

CONFIG = Config(dp=2, tp=2, pp=2, batch=32, microbatch=8, steps=100)


class Bare:
    """What one would write down without the course: no checkpoints, no schedule of the learning rate, no metrics."""

    def __init__(self):
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        whole = toy.ToyTransformer(CONFIG.hidden, CONFIG.heads, CONFIG.layers, CONFIG.seq_len)
        self.index = self.mesh.get_local_rank("pp")
        self.model = nn.Sequential(*list(whole)[3 * self.index:3 * self.index + 3])
        enter = lambda: PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False)
        for block in self.model:
            if isinstance(block, toy.Block):
                parallelize_module(block, self.mesh["tp"], {
                    "attention": enter(), "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
                    "attention.out": RowwiseParallel(), "mlp": enter(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
                fully_shard(block, mesh=self.mesh["dp"])
        fully_shard(self.model, mesh=self.mesh["dp"])
        split = [p for p in self.model.parameters() if p.device_mesh.ndim == 2]
        self.optimizer = torch.optim.AdamW([{"params": split}, {"params": [p for p in self.model.parameters() if p.device_mesh.ndim == 1]}], lr=3e-3)
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
            p.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        self.optimizer.step()
        self.optimizer.zero_grad()


def pairs(n: int) -> list[tuple[float, float]]:
    ours, bare = Trainer(CONFIG), Bare()
    found = []
    for i in range(n + 3):
        took = {}
        for one in ((ours, bare), (bare, ours))[i % 2]:  # nobody is always first
            dist.barrier()
            start = time.perf_counter()
            one.step()
            dist.barrier()
            took[one] = time.perf_counter() - start
        if i >= 3:
            found.append((took[ours], took[bare]))
    return found


if __name__ == "__main__":
    with World(8, timeout=600, counted=False) as world:
        found = world.run(pairs, 40)[0]
    ours, bare = (statistics.median(x) for x in zip(*found))
    ratio = statistics.median(b / a for a, b in found)
    print(f"a step: helpers.train {1e3 * ours:.0f} ms, a bare script {1e3 * bare:.0f} ms; throughput {ratio:.2f} times the bare script's ({len(found)} pairs)")
