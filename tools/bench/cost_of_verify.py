"""What `verify` costs beside the steps that it compares: paired, on four ranks.

    python tools/bench/cost_of_verify.py [TIMES]

Plain is what anybody must do who compares: the same steps on the mesh, and of the whole model on one rank.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers import World, toy
from three_axes.verify import verify

STEPS = 2


def build(mesh):
    torch.manual_seed(0)
    model = toy.ToyTransformer(256, seq_len=64)
    if mesh is not None:
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model, batch, mesh):
    tokens, targets = batch if mesh is None else (t.chunk(mesh.size())[mesh.get_local_rank()] for t in batch)
    loss = toy.loss_of(model(tokens), targets)
    loss.backward()
    return loss.detach()


def plain(mesh, batch) -> None:
    model, optimizer = build(mesh)
    for _ in range(STEPS):
        step(model, batch, mesh)
        optimizer.step()
        optimizer.zero_grad()


def timed(number: int) -> tuple[float, float]:
    """On ranks: (seconds of the plain steps, seconds of verify), in turn first."""
    torch.set_default_dtype(torch.float64)
    batch = toy.make_batch(16, 64)

    def both() -> None:
        plain(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)), batch)
        if dist.get_rank() == 0:
            plain(None, batch)
        dist.barrier()

    def compared() -> None:
        assert verify(build, step, batch, ["dp 4"], steps=STEPS).ok
        dist.barrier()

    seconds = {}
    for run in (both, compared) if number % 2 else (compared, both):
        dist.barrier()
        began = time.monotonic()
        run()
        seconds[run] = time.monotonic() - began
    return seconds[both], seconds[compared]


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with World(4, timeout=600) as world:
        world.run(timed, 0)  # to be warm
        pairs = [world.run(timed, number)[0] for number in range(times)]
    ratios = sorted(after / before for before, after in pairs)
    print(f"plain {median(b for b, _ in pairs):.2f} s, verify {median(a for _, a in pairs):.2f} s:", end=" ")
    print(f"{median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f}, {times} pairs)")


if __name__ == "__main__":
    main()
