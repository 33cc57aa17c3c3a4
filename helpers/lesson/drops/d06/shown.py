"""Drop 06, what its cells show: one step of tensor parallelism, counted, kept and timed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from .... import toy
from ....runtime import current, memory
from ....runtime.clock import Timeline, shortest, span
from ....runtime.traffic import Traffic
from ....runtime.world import World
from ....theory.hardware import Network
from .dtensor_plan import merged_plan

# Emulated: links inside a node, and ports out of it that are 10 times slower, slow enough for a laptop to
# keep up.
ONE_NODE = Network(
    name="one node of four",
    gpus_per_node=4,
    intra_node_bandwidth=5e6,
    inter_node_bandwidth=0.5e6,
    intra_node_latency=1e-4,
    inter_node_latency=5e-4,
)
TWO_NODES = Network(
    name="two nodes of two",
    gpus_per_node=2,
    intra_node_bandwidth=5e6,
    inter_node_bandwidth=0.5e6,
    intra_node_latency=1e-4,
    inter_node_latency=5e-4,
)


def model_on_rank(sequence: bool, **sizes) -> toy.ToyTransformer:
    """This rank's share of the toy, with or without sequence parallelism."""
    return toy.split_width(toy.ToyTransformer(seed=0, **sizes), sequence=sequence)


def one_step(world: World, sequence: bool, b: int = 8, s: int = 32) -> Traffic:
    """The bytes of one tensor-parallel step of the toy with hidden 256."""

    def run():
        model = model_on_rank(sequence)
        toy.tensor_parallel_step(model, *toy.make_batch(b, s))
        if sequence:
            toy.sum_norm_gradients(model)

    world.run(run)
    return world.traffic


def one_step_by_pytorch(world: World, b: int = 8, s: int = 32) -> Traffic:
    """The same step with `parallelize_module`, each pair's input made a DTensor once: PyTorch's tensor
    parallelism with Megatron's four.
    """

    def run():
        model = toy.ToyTransformer(seed=0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        for block in model.blocks:
            # The toy has no gate.
            parallelize_module(
                block, mesh, {name: how for name, how in merged_plan().items() if name != "mlp.gate"}
            )
        current.count_from_here()  # the setting up is not counted
        toy.tensor_parallel_step(model, *toy.make_batch(b, s))

    world.run(run)
    return world.traffic


def kept_for_backward(world: World, b: int = 8, s: int = 32) -> dict[str, list[float]]:
    """Bytes that one block keeps for backward on rank 0, split over t ranks: by TP alone, and with SP.

    Columns: t = 1, world's.
    """

    def run(sequence):
        block = model_on_rank(sequence).blocks[1]  # an inner one
        whole = torch.randn(b, s, 256, requires_grad=True)
        x = toy.my_tokens(whole) if sequence else whole
        with memory.saved_activations(block) as held:
            block(x)
            return held.peak

    return {"TP": world.run(run, False)[0], "TP + SP": world.run(run, True)[0]}


def paced_step(world: World, b: int = 2, s: int = 64) -> Timeline:
    """One tensor-parallel step on the clock, with emulated compute; the shortest of a few."""

    def run():
        model = model_on_rank(False, hidden=64)
        for block in model.blocks:
            toy.pace(block, 0.010, 0.020)
        batch = toy.make_batch(b, s)
        for _ in range(2):
            current.count_from_here()
            dist.barrier()
            with span("F"):
                loss = toy.loss_of(model(batch[0]), batch[1])
            with span("B"):
                loss.backward()

    def once():
        world.run(run)
        return world.timeline

    return shortest(once, lambda t: t.makespan)
