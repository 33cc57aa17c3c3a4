"""Drop 06: tensor parallelism traced, PyTorch's plan with its extra all-reduces, sequence parallelism, and
the cliff between nodes.
"""

from __future__ import annotations

import re
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ... import toy
from ...runtime import memory, worker
from ...runtime.clock import Timeline, span
from ...runtime.failure import RankError
from ...runtime.traffic import Traffic
from ...runtime.world import World
from ...theory.collectives import book
from ...theory.hardware import DEVICES, Cluster
from ..practice import Answer, Exercise, right, wrong

# Emulated: links inside a node, and ports out of it that are 10 times slower, slow enough for a laptop to
# keep up.
ONE_NODE = Cluster(
    "one node of four", DEVICES["h100-80gb"], node=4, link=5e6, nic=0.5e6, link_latency=1e-4, nic_latency=5e-4
)
TWO_NODES = Cluster(
    "two nodes of two", DEVICES["h100-80gb"], node=2, link=5e6, nic=0.5e6, link_latency=1e-4, nic_latency=5e-4
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
            parallelize_module(
                block, mesh, {name: how for name, how in merged_plan().items() if name != "mlp.gate"}
            )  # the toy has no gate
        worker.here.recorder.start()  # the setting up is not counted
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
    """One tensor-parallel step on the clock, with emulated compute; the shortest of two."""

    def run():
        model = model_on_rank(False, hidden=64)
        for block in model.blocks:
            toy.pace(block, 0.010, 0.020)
        batch = toy.make_batch(b, s)
        for _ in range(2):
            worker.here.recorder.start()
            dist.barrier()
            with span("F"):
                loss = toy.loss_of(model(batch[0]), batch[1])
            with span("B"):
                loss.backward()

    timelines = []
    for _ in range(2):
        world.run(run)
        timelines.append(world.timeline)
    return min(timelines, key=lambda t: t.makespan)


# -- PyTorch's plan ----------------------------------------------------------------------------


class GatedMLP(nn.Module):
    """Llama's feed-forward part: two matrices widen, and one gates the other."""

    def __init__(self, hidden: int):
        super().__init__()
        self.gate = nn.Linear(hidden, 4 * hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(toy.Block):
    """The toy's block with Llama's feed-forward part."""

    def __init__(self, hidden: int = 64, heads: int = 4):
        super().__init__(hidden, heads)
        self.mlp = GatedMLP(hidden)


def usual_plan() -> dict:
    """What PyTorch's tutorials give for such a block: each matrix by itself."""
    return {
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }


def merged_plan():
    """A plan for parallelize_module, as `usual_plan()`, with four all-reduces in a step of one block instead
    of seven.
    """
    whole = lambda: PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
    )
    return usual_plan() | {"attention": whole(), "mlp": whole()}


def _with_plan(make_plan):
    """One rank's part: all-reduces forward and backward, and whether output and gradients are the twin's."""
    block, twin = LlamaBlock().double(), LlamaBlock().double()
    torch.manual_seed(0)
    for p in twin.parameters():
        nn.init.normal_(p, std=0.1)
    block.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = make_plan()
    if not isinstance(plan, dict):
        return {
            "plan": (
                f"You return a {type(plan).__name__}; return a dictionary: name of a part -> how to split it."
            )
        }
    if unknown := set(plan) - set(dict(block.named_modules())):
        return {
            "plan": (
                f"The block has no part called {sorted(unknown)[0]!r}. Its parts are"
                f" {', '.join(name for name, _ in block.named_modules() if name)}."
            )
        }
    parallelize_module(block, mesh, plan)
    x = torch.randn(2, 8, 64, dtype=torch.float64)
    mine, whole = (x.clone().requires_grad_() for _ in range(2))
    worker.here.recorder.start()  # the setting up is not counted
    y = block(mine)
    count = lambda op: sum(row.calls for row in worker.here.recorder.rows.values() if row.op == op)
    forward = count("all_reduce")
    y = y.full_tensor() if hasattr(y, "full_tensor") else y
    y.square().sum().backward()
    expected = twin(whole)
    expected.square().sum().backward()
    shards = sum(
        p.to_local().numel() if hasattr(p, "to_local") else p.numel()
        for p in block.parameters()
        if p.dim() == 2
    )
    return {
        "plan": None,
        "forward": forward,
        "backward": count("all_reduce") - forward,
        "others": sum(r.calls for r in worker.here.recorder.rows.values() if r.op != "all_reduce"),
        "share": shards / sum(p.numel() for p in twin.parameters() if p.dim() == 2),
        "y": y.shape == expected.shape and torch.allclose(y, expected),
        "dx": mine.grad is not None and torch.allclose(mine.grad, whole.grad),
    }


def all_reduces(world: World, make_plan) -> dict[str, int]:
    """All-reduces of one step of a Llama-shaped block under a plan of PyTorch's."""
    found = world.run(_with_plan, make_plan)[0]
    return {"forward": found["forward"], "backward": found["backward"]}


def _judge_plan(attempt) -> Answer:
    with World(4, timeout=8) as world:
        try:
            found = world.run(_with_plan, attempt)[0]
        except RankError as e:
            said = next((s.error for s in e.seen if s.error and not s.error.aborted), None)
            if said and "Sharding" in said.message or said and "shard" in said.message.lower():
                return Answer(
                    "crashed",
                    f"PyTorch could not follow the plan:\n{e.report}",
                    "a plan that does not fit together",
                )
            raise
    if found["plan"]:
        return wrong("no plan for this block", found["plan"])
    figures = [
        ("all-reduces of a step", str(found["forward"] + found["backward"]), "4"),
        ("share of the matrices on a rank", f"{found['share']:.2f}", "0.25"),
    ]
    if not found["y"] or not found["dx"]:
        return wrong(
            "another output or gradient",
            "Under this plan the output or the gradient of x is not the twin's. Begin with usual_plan(), and"
            " only add to it.",
            *figures,
        )
    if found["share"] > 0.26:
        return wrong(
            "matrices left whole",
            "Fewer all-reduces, but each rank now holds, and multiplies, matrices that were to be split.",
            *figures,
        )
    if found["others"]:
        return wrong(
            "other collectives instead",
            f"There are {found['others']} other collectives now; the same four all-reduces can do it alone.",
            *figures,
        )
    if found["backward"] > 2:
        return wrong(
            "one all-reduce for each matrix",
            f"Backward still runs {found['backward']}: some matrices turn x into a DTensor each for itself,"
            " so each sends its own gradient of x. Let the part around them do it once.",
            *figures,
        )
    return right("The matrices that share an input now share the all-reduce of its gradient.", *figures)


plan = Exercise(
    "merge the all-reduces",
    merged_plan,
    _judge_plan,
    hints=[
        (
            "Forward has 2, as it should. Backward has 5: one for each of q, k, v, gate and up. Which of"
            " these read the same x?"
        ),
        (
            "Each ColwiseParallel takes a plain x and makes a DTensor of it. The gradient of x is made plain"
            " again by an all-reduce, for each of them."
        ),
        (
            'PrepareModuleInput makes the DTensor once, for all of "attention", and once for "mlp": with'
            " input_layouts=Replicate(), desired_input_layouts=Replicate() and use_local_output=False the"
            " parts inside get a DTensor, and add up their gradients before anything is sent."
        ),
    ],
)


# -- sequence parallelism ----------------------------------------------------------------------


def sequence_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down for this rank's tokens, with tensor and sequence parallelism.

    x: (b, s/t, h), this rank's tokens. up: (h, 4h/t) and down: (4h/t, h), this rank's parts. Return (b, s/t,
    h).
    toy.conjugate(forward, backward) makes an autograd function of two plain ones, each called with (x,
    group), such as
    toy.gather_tokens (b, s/t, h) -> (b, s, h), and toy.sum_tokens, which adds the ranks' (b, s, h) and keeps
    (b, s/t, h).
    """
    gather = toy.conjugate(toy.gather_tokens, toy.sum_tokens)
    scatter = toy.conjugate(toy.sum_tokens, toy.gather_tokens)
    return scatter(F.gelu(gather(x) @ up) @ down)


B, S, H = 2, 16, 32


def _sequence_on_rank(attempt):
    warnings.filterwarnings("ignore", "c10d::.*autograd kernel")  # what the judge says in plainer words
    rank, t = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(3)
    x, up, down, dy = (
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in ((B, S, H), (H, 4 * H), (4 * H, H), (B, S, H))
    )
    whole = x.clone().requires_grad_()
    y = F.gelu(whole @ up / 6) @ down
    y.backward(dy)
    mine = toy.my_tokens(x).requires_grad_()
    worker.here.recorder.start()
    got = attempt(mine, up.chunk(t, 1)[rank] / 6, down.chunk(t, 0)[rank], rank, t)
    shape = tuple(got.shape) if isinstance(got, torch.Tensor) else None
    if shape != (B, S // t, H):
        return {"shape": shape}
    near = lambda a, b: torch.allclose(a, b, rtol=1e-7, atol=1e-9)
    gathered = any(row.op == "all_gather" for row in worker.here.recorder.rows.values())
    sums = lambda: sum(
        row.calls for row in worker.here.recorder.rows.values() if row.op in ("reduce_scatter", "all_reduce")
    )
    forward = sums()
    found = {
        "shape": shape,
        "gathered": gathered,
        "y": near(got, toy.my_tokens(y)),
        "cut": not got.requires_grad,
        "dx": False,
    }
    if got.requires_grad:
        got.backward(toy.my_tokens(dy))
        found["summed"] = sums() > forward
        if mine.grad is not None:
            found |= {"dx": near(mine.grad, toy.my_tokens(whole.grad))}
    return found


def _judge_sequence(attempt) -> Answer:
    for t in (2, 4):
        with World(t, timeout=5) as world:
            try:
                results = world.run(_sequence_on_rank, attempt)
            except RankError as e:
                shapes = [
                    re.findall(r"\[([\d, ]+)\]", s.error.message)
                    for s in e.seen
                    if s.error and "invalid gradient" in s.error.message
                ]
                if not shapes:
                    raise
                has, wanted = ([int(n) for n in shape.split(",")][1] for shape in shapes[0][-2:])  # tokens
                if has > wanted:
                    return wrong(
                        "the sum in backward is missing",
                        f"Before the pair, backward hands on a gradient of {has} tokens, where forward took"
                        f" this rank's {wanted}. Every rank used every token, so each has a share of every"
                        " token's gradient: add the shares, and keep your own tokens.",
                    )
                return wrong(
                    "the gather in backward is missing",
                    f"Behind the pair, backward hands on a gradient of {has} tokens, where forward took"
                    f" {wanted}. A rank gets the gradient of its own tokens there, and must gather all of"
                    " them.",
                )
            sent = max(world.traffic.counted)
        found = results[0]
        allowed = 2 * book("all_reduce", 8 * B * S * H, t)
        figures = [
            (f"bytes sent by the book, per rank of {t}", f"{sent:,.0f}", f"{allowed:,.0f}, as TP alone")
        ]
        if any(r["shape"] != (B, S // t, H) for r in results):
            return wrong(
                "another shape than the tokens'",
                f"On {t} ranks you return {found['shape']}; a rank keeps its own tokens, {(B, S // t, H)}.",
            )
        if not all(r["y"] for r in results):
            if not found["gathered"]:
                return wrong(
                    "no gather before the pair",
                    "The matrices are split by columns, so a rank computes some columns of every token: it"
                    " needs all tokens first.",
                )
            return wrong(
                "another output",
                f"On {t} ranks the output is not the twin's. Behind the pair each rank holds a share of a"
                " sum, for all tokens: add, and keep your own.",
            )
        if any(r["cut"] for r in results):
            return wrong(
                "an output cut off from x",
                "The output is right, but autograd cannot get back to x: toy.gather_tokens alone has no"
                " backward. toy.conjugate gives it one.",
                *figures,
            )
        if not all(r["dx"] for r in results) and not found["summed"]:
            return wrong(
                "the sum in backward is missing",
                "The output is right, the gradient of x is not. Every rank used every token, so each has a"
                " share of every token's gradient: before the pair, backward must add the shares.",
                *figures,
            )
        if not all(r["dx"] for r in results):
            return wrong(
                "the gather in backward is missing",
                "The output is right, the gradient of x is not. Backward mirrors forward: behind the pair a"
                " rank has the gradient of its own tokens only, and must gather all; before the pair each"
                " rank has a share of every token's gradient, to be added. (A bare toy.sum_tokens has no"
                " backward of its own; toy.conjugate gives it one.)",
                *figures,
            )
        if sent > 1.01 * allowed:
            return wrong(
                "more bytes than tensor parallelism alone",
                "Right, but it sends more than TP's two all-reduces. An all-reduce is a reduce-scatter and an"
                " all-gather: use just the half that is needed in each place.",
                *figures,
            )
    return right(
        "The tokens' output and gradients are the twin's, for exactly the bytes of tensor parallelism alone.",
        *figures,
    )


sequence = Exercise(
    "TP + SP",
    sequence_mlp,
    _judge_sequence,
    hints=[
        (
            "Before `up` a rank needs all tokens: gather. Behind `down` it has a share of a sum for all"
            " tokens, and wants its own tokens of the sum: toy.sum_tokens."
        ),
        (
            "What is the backward of a gather? Every rank used every token, so each has a share of every"
            " token's gradient: the shares must be added, and each rank keeps its own."
        ),
        "gather = toy.conjugate(toy.gather_tokens, toy.sum_tokens). The other one is its mirror image.",
    ],
)
