"""Drop 06's first practice: a plan for DTensor with no collective too many."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from .... import toy
from ....runtime import current
from ....runtime.failure import RankError
from ....runtime.world import World
from ...practice import Answer, Exercise, right, wrong


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


def _with_plan(make_plan, all_cut: bool = False):
    """One rank's part: all-reduces forward and backward, and whether output and gradients are the twin's; or
    what is wrong with the plan. all_cut: refuse one that leaves a matrix out.
    """
    block, twin = LlamaBlock().double(), LlamaBlock().double()
    torch.manual_seed(0)
    for p in twin.parameters():
        nn.init.normal_(p, std=0.1)
    block.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = make_plan()
    if not isinstance(plan, dict):
        given = "nothing" if plan is None else f"{plan!r:.60}"
        return {"plan": f"You return {given}; return a dictionary: name of a part -> how to split it."}
    if unknown := set(plan) - set(dict(block.named_modules())):
        return {
            "plan": (
                f"The block has no part called {sorted(unknown)[0]!r}. Its parts are"
                f" {', '.join(name for name, _ in block.named_modules() if name)}."
            )
        }
    if odd := [name for name, how in plan.items() if not isinstance(how, ParallelStyle)]:
        return {
            "plan": (
                f"{odd[0]!r} gets {plan[odd[0]]!r:.70}; it needs what ColwiseParallel() or"
                " PrepareModuleInput(…) returns."
            )
        }
    if all_cut and (left := [name for name in usual_plan() if name not in plan]):
        return {"plan": None, "whole": left}
    parallelize_module(block, mesh, plan)
    x = torch.randn(2, 8, 64, dtype=torch.float64)
    mine, whole = (x.clone().requires_grad_() for _ in range(2))
    current.count_from_here()  # the setting up is not counted
    y = block(mine)
    count = lambda op: sum(row.calls for row in current.counted_so_far() if row.op == op)
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
        "others": sum(r.calls for r in current.counted_so_far() if r.op != "all_reduce"),
        "share": shards / sum(p.numel() for p in twin.parameters() if p.dim() == 2),
        "y": y.shape == expected.shape and torch.allclose(y, expected),
        "dx": mine.grad is not None and torch.allclose(mine.grad, whole.grad),
    }


def all_reduces(world: World, make_plan) -> dict[str, int]:
    """All-reduces of one step of a Llama-shaped block under a plan of PyTorch's.

    Raises ValueError for what is no plan for this block.
    """
    measured = world.run(_with_plan, make_plan)[0]
    if measured["plan"]:
        raise ValueError(measured["plan"])
    return {"forward": measured["forward"], "backward": measured["backward"]}


def _judge_plan(attempt) -> Answer:
    with World(4, timeout=8) as world:
        try:
            measured = world.run(_with_plan, attempt, True)[0]
        except RankError as e:
            raised = [s.error for s in e.seen if s.error and not s.error.aborted]
            if any("got mixed torch.Tensor and DTensor" in error.message for error in raised):
                return Answer(
                    "crashed",
                    "A plain tensor meets a DTensor: where the plan makes a part's input a DTensor, it must"
                    f" also split every matrix inside, as usual_plan() does.\n\n{e.report}",
                    "a plain tensor meets a DTensor",
                )
            if any(error.type == "RuntimeError" and "shard" in error.message.lower() for error in raised):
                return Answer(
                    "crashed",
                    f"PyTorch could not follow the plan:\n{e.report}",
                    "a plan that does not fit together",
                )
            raise
    if measured["plan"]:
        return wrong("no plan for this block", measured["plan"])
    if "whole" in measured:
        return wrong(
            "matrices left whole",
            f"Your plan leaves out {', '.join(measured['whole'])}: these stay whole on every rank. Begin with"
            " usual_plan(), and add to it.",
        )
    figures = [
        ("all-reduces of a step", str(measured["forward"] + measured["backward"]), "4"),
        ("share of the matrices on a rank", f"{measured['share']:.2f}", "0.25"),
    ]
    if not measured["y"] or not measured["dx"]:
        return wrong(
            "another output or gradient",
            "Under this plan the output or the gradient of x is not the twin's. Begin with usual_plan(), and"
            " only add to it.",
            *figures,
        )
    if measured["share"] > 0.26:
        return wrong(
            "matrices left whole",
            "Fewer all-reduces, but each rank now holds, and multiplies, matrices that were to be split.",
            *figures,
        )
    if measured["others"]:
        return wrong(
            "other collectives instead",
            f"There are {measured['others']} other collectives now; the same four all-reduces can do it"
            " alone.",
            *figures,
        )
    if measured["backward"] > 2:
        return wrong(
            "one all-reduce for each matrix",
            f"Backward still runs {measured['backward']}: some matrices turn x into a DTensor each for"
            " itself, so each sends its own gradient of x. Let the part around them do it once.",
            *figures,
        )
    return right("The matrices that share an input now share the all-reduce of its gradient.", *figures)


plan = Exercise(
    "merge the all-reduces",
    merged_plan,
    _judge_plan,
    minutes=5,
    hints=[
        (
            "attention_merged() has 2 all-reduces forward, as it should, and 3 backward: one for q, k and v"
            " together, one for gate, one for up. Which of these have the same input?"
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
