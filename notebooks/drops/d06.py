"""Drop 06: tensor parallelism traced, PyTorch's plan with its extra all-reduces, sequence parallelism, and
the cliff between nodes.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput, parallelize_module

from helpers import toy
from helpers.emulate import networks
from helpers.practice.engine import OnRanks
from helpers.ranks import current, memory
from helpers.ranks.current import span
from helpers.ranks.world import World
from three_axes.count.clock import Timeline, shortest
from three_axes.count.traffic import Traffic
from three_axes.paper.collectives import algorithmic_bytes
from three_axes.plan import CLUSTERS, MODELS, Job, Layout, estimate
from three_axes.plan.models import find_model
from three_axes.table import Table
from three_axes.trace import tensor_plan
from three_axes.trace.traced_model import FeedForward

# -- PyTorch's plan for a block, with seven all-reduces and with four -----------------------------


MATRICES = (*(f"attention.{name}" for name in ("q", "k", "v", "out")), "mlp.gate", "mlp.up", "mlp.down")


def llama_block() -> toy.Block:
    """The toy's block with Llama's feed-forward part: two matrices widen, and one gates the other."""
    block = toy.Block(hidden=64, heads=4)
    block.mlp = FeedForward(replace(MODELS["toy"], hidden=64, ffn=256, gated=True))
    return block.double()


def usual_plan() -> dict:
    """What PyTorch's tutorials give for such a block: each matrix by itself, by columns, then by rows."""
    plan = tensor_plan.usual_plan(llama_block())
    return {name: plan[name] for name in MATRICES}


def merged_plan() -> dict:
    """`usual_plan()` with four all-reduces in a step of one block instead of seven."""
    # One DTensor of x for all matrices that read it: their gradients are added before they are summed.
    whole = lambda: PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
    )
    return usual_plan() | {"attention": whole(), "mlp": whole()}


def all_reduces(world: World, make_plan) -> dict[str, int]:
    """All-reduces of one step of a Llama-shaped block under a plan of PyTorch's.

    Raises ValueError for what is no plan for this block.
    """
    if problem := _problem(make_plan(), llama_block()):
        raise ValueError(problem)

    def run():
        block, mesh = llama_block(), init_device_mesh("cpu", (dist.get_world_size(),))
        x = torch.randn(2, 8, 64, dtype=torch.float64, requires_grad=True)
        calls = lambda: sum(row.calls for row in current.counted_so_far() if row.op == "all_reduce")
        parallelize_module(block, mesh, make_plan())
        current.count_from_here()  # the setting up is not counted
        y = block(x)
        forward = calls()
        y.square().sum().backward()
        return {"forward": forward, "backward": calls() - forward}

    return world.run(run)[0]


def _problem(plan, block: nn.Module) -> str:
    """Why this is no plan for the block; '' where it is one."""
    if not isinstance(plan, dict):
        given = "nothing" if plan is None else f"{plan!r:.60}"
        return f"You return {given}; return a dictionary: name of a part -> how to split it."
    parts = [name for name, _ in block.named_modules()]
    if unknown := sorted(set(plan) - set(parts)):
        return f"The block has no part called {unknown[0]!r}. Its parts are {', '.join(filter(None, parts))}."
    odd = [name for name, how in plan.items() if not isinstance(how, ParallelStyle)]
    needs = "it needs what ColwiseParallel() or PrepareModuleInput(…) returns."
    return f"{odd[0]!r} gets {plan[odd[0]]!r:.70}; {needs}" if odd else ""


# -- practice: an MLP under sequence parallelism --------------------------------------------------


def sequence_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down for this rank's tokens, with tensor and sequence parallelism.

    x: (b, s/t, h), this rank's tokens. up: (h, 4h/t) and down: (4h/t, h), this rank's parts. Return (b, s/t,
    h). toy.conjugate(forward, backward) makes an autograd function of two plain ones, each called with (x,
    group), such as toy.gather_tokens (b, s/t, h) -> (b, s, h), and toy.sum_tokens, which adds the ranks' (b,
    s, h) and keeps (b, s/t, h).
    """
    # What gathers forward must, backward, sum and keep its own tokens; and the other way round.
    gather = toy.conjugate(toy.gather_tokens, toy.sum_tokens)
    scatter = toy.conjugate(toy.sum_tokens, toy.gather_tokens)
    return scatter(F.gelu(gather(x) @ up) @ down)


B, S, H = 2, 16, 32


def _numbers() -> list[torch.Tensor]:
    """x, up, down and dy, whole, the same on all ranks."""
    chance = torch.Generator().manual_seed(3)
    shapes = (B, S, H), (H, 4 * H), (4 * H, H), (B, S, H)
    x, up, down, dy = (torch.randn(*shape, generator=chance, dtype=torch.float64) for shape in shapes)
    return [x, up / 6, down, dy]


def _parts(rank: int, t: int) -> list[tuple]:
    warnings.filterwarnings("ignore", "c10d::.*autograd kernel")  # what it leads to is told below
    x, up, down, _ = _numbers()
    return [(toy.my_tokens(x).requires_grad_(), up.chunk(t, 1)[rank], down.chunk(t, 0)[rank], rank, t)]


sequence = OnRanks(
    "TP + SP",
    sequence_mlp,
    minutes=10,
    hints=[
        "Before `up` a rank needs all tokens: gather. After `down` it has a partial sum for all tokens, and"
        " must keep its own tokens of the sum: toy.sum_tokens.",
        "What is the backward of a gather? Every rank used every token, so each has a partial sum of every"
        " token's gradient. Add them, and let each rank keep its own tokens.",
        "gather = toy.conjugate(toy.gather_tokens, toy.sum_tokens). The other one is its mirror image.",
    ],
    tries=((2,), (4,)),
    inputs=_parts,
    gradient=lambda arguments: toy.my_tokens(_numbers()[3]),
    praise="The tokens' output and gradients are the twin's, for exactly the bytes of tensor parallelism"
    " alone.",
    figures=lambda run, truth: [
        (
            f"bytes sent by the book, per rank of {run.n}",
            f"{run.most('bytes'):,.0f}",
            f"{2 * algorithmic_bytes('all_reduce', 8 * B * S * H, run.n):,.0f}, as TP alone",
        )
    ],
    mistakes="""
        gather and sum changed places
            Before `up` a rank needs all tokens. After `down` it has a partial sum.
            - gather(x) => X(x) & scatter(F => gather(F & X(x) => scatter(x)
        the mean where the sum was meant
            The ranks hold partial sums: nothing is to be divided.
            - @ down) => @ down) / world_size
        matrices that are cut twice
            up and down are this rank's parts already. Use them as they are.
            - @ up => @ up.chunk(world_size, 1)[rank] & @ down => @ down.chunk(world_size, 0)[rank]
        no gelu between the products
            F.gelu, as it is, stands between the two products, and nowhere else.
            - F.gelu( => (
            - F.gelu => F.relu
            - F.gelu( => F.gelu(approximate="tanh", input=
            - scatter(F.gelu(gather(x) @ up) @ down) => F.gelu(scatter(gather(x) @ up @ down))
            - F.gelu(gather(x) @ up) => F.gelu(gather(x)) @ up
            - F.gelu(gather(x) @ up) @ down => F.gelu(gather(x) @ up @ down)
        partial outputs never summed
            After the pair each rank holds a partial sum, for all tokens. Add these first, as toy.sum_tokens
            does, and then keep your tokens.
            - return scatter( => return toy.my_tokens(
        gradients of x that toy.copy_to_tp sums
            Beside the gather, whose backward adds, toy.copy_to_tp adds once too often. Before it, it adds
            gradients of different tokens.
            - gather(x) => toy.copy_to_tp(gather(x))
            - gather(x) => gather(toy.copy_to_tp(x))
        half of the backward is missing
            Where forward gathers, backward must sum: every rank used every token, so each has a partial sum
            of every token's gradient. Where forward sums, it must gather: a rank gets the gradient of its
            own tokens, and forward took all. (A bare toy.sum_tokens has no backward. toy.conjugate gives it
            one.)
            - (toy.gather_tokens, toy.sum_tokens) => (toy.gather_tokens, toy.my_tokens)
            ! gradient .* compatible with .2, (8|16), 32
        matrices that do not meet
            up, (h, 4h/t), and down, (4h/t, h), are this rank's parts already, and all h columns of x meet
            `up`.
            ! shapes cannot be multiplied
        a function where its result is meant
            toy.conjugate(forward, backward) takes the two functions themselves and returns a function. Call
            that with x: f(x).
            ! for @: 'function' and 'Tensor'
        functions that take no group
            toy.conjugate calls both of its functions with two arguments, (x, group).
            ! takes 1 positional argument but 2 were given
        an exchange inside the pair
            Between `up` and `down` a rank has its own columns, whole, of all tokens: nothing is exchanged
            there. Gather before `up`; sum and keep your tokens after `down`.
            - F.gelu(gather(x) @ up) => gather(F.gelu(scatter(gather(x) @ up)))
        another shape than the tokens'
            A rank keeps its own tokens, (b, s/t, h), in x's float64. After `down` the ranks' parts are
            summed, and each keeps its tokens: toy.sum_tokens.
            ~ form
        an output cut off from x
            toy.gather_tokens alone has no backward. toy.conjugate gives it one.
            ~ cut
        more bytes than tensor parallelism alone
            Right, but it sends more than TP's two all-reduces. An all-reduce is a reduce-scatter and an
            all-gather: use just the half that is needed in each place.
            $ bytes
    """,
)

# -- what the cells show --------------------------------------------------------------------------

# Emulated: links inside a node, and ports out of it that are 10 times slower, slow enough for a laptop to
# keep up.
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
    """The same step with `parallelize_module`, each pair's input made a DTensor once: PyTorch's tensor
    parallelism with Megatron's four.
    """

    def run():
        model = toy.ToyTransformer()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            parallelize_module(block, mesh, tensor_plan.merged_plan(block, sp=False))
        current.count_from_here()  # the setting up is not counted
        toy.tensor_parallel_step(model, *toy.make_batch())

    world.run(run)
    return world.traffic


def kept_for_backward(world: World) -> dict[str, int]:
    """Bytes that one block keeps for backward on rank 0: split by TP alone, and with SP."""

    def run(sequence):
        block = toy.split_width(toy.ToyTransformer(), sequence=sequence).blocks[1]  # an inner one
        x = torch.randn(8, 32, 256, requires_grad=True)
        with memory.saved_activations(block) as held:
            block(toy.my_tokens(x) if sequence else x)
        return held.peak

    return {name: world.run(run, sequence)[0] for name, sequence in (("TP", False), ("TP + SP", True))}


def paced_step(world: World) -> Timeline:
    """One tensor-parallel step on the clock, with emulated compute; the shortest of a few."""

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
    """TP's seconds as a share of the matrices', by the box's formula and by the planner, inside a node."""
    model, cluster = find_model("llama-3-70b"), CLUSTERS["dgx-h100"]
    reached, link = 0.56 * cluster.device.flops, 0.76 * cluster.intra_node_bandwidth
    rows = []
    for t in (2, 4, 8):
        job = Job(model, cluster, global_batch=64, seq_len=8192)
        time = estimate(job, Layout(dp=8 // t, tp=t, microbatch=1, zero=3, recompute="none")).time
        by_hand = (t - 1) * reached / (3.6 * model.hidden * link)
        rows.append([f"TP {t}", f"{by_hand:.0%}", f"{time['tensor parallel'] / time['matrices']:.0%}"])
    return Table(["TP ÷ matrices", "the box", "the planner"], rows)
