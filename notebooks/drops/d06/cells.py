"""Functions for the cells of drop 06's notebook."""

from __future__ import annotations

import fnmatch
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput, parallelize_module

from drops.lines import bandwidth, tp_sends
from drops.measured import BUSY
from helpers import toy
from helpers.emulate import networks
from helpers.practice import line
from helpers.ranks import World, current, memory, span
from three_axes.count import Timeline, Traffic, shortest
from three_axes.plan import CLUSTERS, MODELS, Job, Layout, estimate, find_model
from three_axes.table import Table
from three_axes.trace import FeedForward, tensor_plan

MATRICES = (*(f"attention.{name}" for name in ("q", "k", "v", "out")), "mlp.gate", "mlp.up", "mlp.down")


def llama_block() -> toy.Block:
    """The toy's block with Llama's feed-forward part: two matrices widen, and one gates the other."""
    block = toy.Block(hidden=64, heads=4)
    block.mlp = FeedForward(replace(MODELS["toy"], hidden=64, ffn=256, gated=True))
    return block.double()


def usual_plan() -> dict:
    """The plan of PyTorch's tutorials for `llama_block`: `out` and `down` by rows, the others by columns."""
    plan = tensor_plan.usual_plan(llama_block())
    return {name: plan[name] for name in MATRICES}


def merged_plan() -> dict:
    """`usual_plan()` with four all-reduces in a step of one block instead of seven."""
    # All matrices that read x share one DTensor of it: their gradients of x are added before the all-reduce.
    whole = lambda: PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
    )
    return usual_plan() | {"attention": whole(), "mlp": whole()}


def all_reduces(world: World, make_plan) -> dict[str, int]:
    """All-reduces on rank 0 in one step of a Llama-shaped block, forward and backward. make_plan(): a plan
    for PyTorch's `parallelize_module`. Raises ValueError if it is no plan for this block.
    """
    if problem := _problem(make_plan(), llama_block()):
        raise ValueError(problem)

    def run():
        block, mesh = llama_block(), init_device_mesh("cpu", (dist.get_world_size(),))
        x = torch.randn(2, 8, 64, dtype=torch.float64, requires_grad=True)
        calls = lambda: sum(row.calls for row in current.counted_so_far() if row.op == "all_reduce")
        parallelize_module(block, mesh, make_plan())
        current.count_from_here()  # `parallelize_module` is not counted
        y = block(x)
        forward = calls()
        y.square().sum().backward()
        return {"forward": forward, "backward": calls() - forward}

    return world.run(run)[0]


def _problem(plan, block: nn.Module) -> str:
    """Why this is no plan for the block; '' if it is a plan."""
    if not isinstance(plan, dict):
        value = "nothing" if plan is None else f"{plan!r:.60}"
        return f"You return {value}; return a dictionary: name of a part -> how to split it."
    parts = [name for name, _ in block.named_modules()]
    # PyTorch reads a name as a pattern: "mlp.*".
    if unknown := [name for name in plan if not (isinstance(name, str) and fnmatch.filter(parts, name))]:
        return f"The block has no part called {unknown[0]!r}. Its parts are {', '.join(filter(None, parts))}."
    odd = [name for name, how in plan.items() if not isinstance(how, ParallelStyle)]
    needs = "it needs what ColwiseParallel() or PrepareModuleInput(…) returns."
    return f"{odd[0]!r} gets {plan[odd[0]]!r:.70}; {needs}" if odd else ""


# Emulated: links inside a node, and ports out of it that are 10 times slower. All are so slow that a laptop
# keeps up.
ONE_NODE, TWO_NODES = networks.four_ranks(5e6)


def one_step(world: World, sequence: bool) -> Traffic:
    """The bytes of one tensor-parallel step of the toy with hidden 256."""

    def run():
        model = toy.split_width(toy.ToyTransformer(), sequence=sequence)
        toy.tensor_parallel_step(model, *toy.make_batch())
        if sequence:
            toy.sum_norm_gradients(model)

    world.run(run)
    return world.traffic


def one_step_by_pytorch(world: World) -> Traffic:
    """The bytes of one step of the toy with `parallelize_module`, where attention's and the MLP's inputs
    become a DTensor once each: Megatron's four all-reduces a layer.
    """

    def run():
        model = toy.ToyTransformer()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            parallelize_module(block, mesh, tensor_plan.merged_plan(block, sp=False))
        current.count_from_here()  # `parallelize_module` is not counted
        toy.tensor_parallel_step(model, *toy.make_batch())

    world.run(run)
    return world.traffic


def kept_for_backward(world: World) -> dict[str, int]:
    """Bytes that one block keeps for backward on rank 0: split by TP alone, and with SP."""

    def run(sequence):
        block = toy.split_width(toy.ToyTransformer(), sequence=sequence).blocks[1]  # an inner block
        x = torch.randn(8, 32, 256, requires_grad=True)
        with memory.saved_activations(block) as held:
            block(toy.my_tokens(x) if sequence else x)
        return held.peak

    return {name: world.run(run, sequence)[0] for name, sequence in (("TP", False), ("TP + SP", True))}


def paced_step(world: World) -> Timeline:
    """The timeline of one tensor-parallel step with emulated compute: the shortest of a few."""

    def run():
        model = toy.split_width(toy.ToyTransformer(hidden=64))
        for block in model.blocks:
            toy.pace(block, 0.010, 0.020)
        tokens, targets = toy.make_batch(2, 64)
        for _ in range(2):
            current.count_from_here()
            dist.barrier()
            with span("F"):
                loss = toy.loss_of(model(tokens), targets)
            with span("B"):
                loss.backward()

    def once():
        world.run(run)
        return world.timeline

    return shortest(once, lambda t: t.makespan)


def price() -> Table:
    """TP's seconds as a share of the matrices', by the notebook's rule and by the planner, inside a node."""
    model, cluster = find_model("llama-3-70b"), CLUSTERS["dgx-h100"]
    reached, link = 0.56 * cluster.device.flops, 0.76 * cluster.intra_node_bandwidth
    rows = []
    for t in (2, 4, 8):
        job = Job(model, cluster, global_batch=64, seq_len=8192)
        time = estimate(job, Layout(dp=8 // t, tp=t, microbatch=1, zero=3, recompute="none")).time
        by_hand = (t - 1) * reached / (3.6 * model.hidden * link)
        rows.append([f"TP {t}", f"{by_hand:.0%}", f"{time['tensor parallel'] / time['matrices']:.0%}"])
    return Table(["TP ÷ matrices", "the box", "the planner"], rows)


def answer(near: Timeline, far: Timeline) -> tuple[str, str]:
    """The arguments of `guess.reveal`: how many times as long rank 0 waits, on the second timeline."""
    times = far.seconds(0, "wait") / near.seconds(0, "wait")
    spans = {
        "as long as before": (0.7, 1.3),
        "about twice as long": (1.6, 2.5),
        "four to five times as long": (3.5, 5.5),
        "ten times as long": (8, 12),
    }
    option = next((name for name, (least, most) in spans.items() if least < times < most), "")
    sent = tp_sends(4, 64, 2 * 64, 4, 4)  # the paced step: 4 layers, hidden size 64, 2 sequences of 64 tokens
    reached = (
        bandwidth(4, 1, nodes.gpus_per_node, nodes.intra_node_bandwidth, nodes.inter_node_bandwidth)
        for nodes in (ONE_NODE, TWO_NODES)
    )
    predicted = " and ".join(f"{1e3 * sent / one:.0f}" for one in reached)
    why = (
        "Two rings leave a node, one over each port. Together they have a fifth of a link's bandwidth. By"
        f" `tp_sends` ÷ bandwidth a step's all-reduces take {predicted} ms; rank 0 waited"
        f" {1e3 * near.seconds(0, 'wait'):.0f} and {1e3 * far.seconds(0, 'wait'):.0f}."
    )
    return (option, why) if option else (f"none of these: {times:.1f} times as long", BUSY)


# Checks the number in the notebook's first code cell: kB that a rank sends in one of TP's all-reduces.
first_line = line(
    1.5 * 4 * 8 * 32 * 256 / 1e3,
    "1.5 times 262 kB. TP does that in every layer, and the ranks wait for it each time.",
    "On four ranks each rank sends 1.5 times its tensor (drop 02). A kB is 1,000 bytes.",
)
