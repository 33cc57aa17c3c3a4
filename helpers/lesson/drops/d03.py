"""Drop 03: split the MLP over ranks, forward and backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from ... import toy
from ...runtime import current, memory
from ...runtime.world import World
from ...theory.collectives import book
from ..practice import Answer, Exercise, right, wrong


def memory_on(t: int, b: int = 8, s: int = 32) -> dict[str, int]:
    """Bytes by kind that rank 0 of t really holds in one tensor-parallel step with Adam."""

    def step():
        model = toy.split_width(toy.ToyTransformer(hidden=256))
        optimizer = torch.optim.AdamW(model.parameters())
        tokens, targets = toy.make_batch(b, s)
        with memory.saved_activations(model) as held:
            loss = toy.loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        return memory.by_kind(model, optimizer, held.peak)

    with World(t) as world:
        return world.run(step)[0]


def gradients_match(world: World) -> list[bool]:
    """Whether each rank's gradients of a tensor-parallel step are its slices of the twin's, to float64's
    digits.
    """

    def compare():
        twin, batch = toy.ToyTransformer(hidden=64).double(), toy.make_batch(8, 16)
        toy.twin_step(twin, *batch)
        model = toy.ToyTransformer(hidden=64, seed=dist.get_rank()).double()
        toy.share_weights(model)
        toy.split_width(model)
        toy.tensor_parallel_step(model, *batch)
        rank, size = dist.get_rank(), dist.get_world_size()
        same = []
        for (name, whole), mine in zip(twin.named_parameters(), model.parameters()):
            part = whole.grad
            if whole.shape != mine.shape:
                part = part.chunk(size, 0 if any(f".{c}." in name for c in ("q", "k", "v", "up")) else 1)[
                    rank
                ]
            same.append(torch.allclose(part, mine.grad, rtol=1e-9, atol=1e-12))
        return all(same)

    return world.run(compare)


def split_mlp(x, up, down, rank, world_size):
    """gelu(x @ up) @ down, with each rank doing its share of the work.

    x: (tokens, h), the same on every rank. up: (h, 4h), down: (4h, h), whole: take your part of them.
    Return the whole output on every rank. Its backward must give every rank the whole gradient of x.
    """
    x = toy.Enter.apply(x, None)
    inside = F.gelu(x @ up.chunk(world_size, dim=1)[rank])
    return toy.Leave.apply(inside @ down.chunk(world_size, dim=0)[rank], None)


TOKENS, HIDDEN = 32, 64


def _on_rank(attempt):
    """One rank's part: the attempt's output, gradient of x and FLOPs; and what they should be, or what
    mistakes give.
    """
    torch.manual_seed(7)
    rank, t = dist.get_rank(), dist.get_world_size()
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    up, down = (
        torch.randn(HIDDEN, 4 * HIDDEN, dtype=torch.float64) / 8,
        torch.randn(4 * HIDDEN, HIDDEN, dtype=torch.float64) / 16,
    )
    dy = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)

    whole_x = x.clone().requires_grad_()
    y = F.gelu(whole_x @ up) @ down
    y.backward(dy)
    # gelu of partial sums, then summed.
    bent_parts = sum(F.gelu(a @ b) for a, b in zip(x.chunk(t, 1), up.chunk(t, 0))) @ down

    mine = x.clone().requires_grad_()
    with FlopCounterMode(display=False) as flops:
        got = attempt(mine, up, down, rank, t)
    # Forward, so far.
    sums = sum(row.calls for row in current.counted_so_far() if row.op == "all_reduce")
    found = {
        "shape": tuple(got.shape) if isinstance(got, torch.Tensor) else None,
        "flops": flops.get_total_flops(),
        "sums": sums,
    }
    if found["shape"] != tuple(y.shape):
        return found
    near = lambda a, b: bool(torch.allclose(a, b, rtol=1e-7, atol=1e-9))
    found |= {
        "y": near(got, y),
        "bent": near(got, bent_parts),
        "got": got.detach(),
        "whole": y.detach(),
        "of_t_x": F.gelu(t * x @ up) @ down,
    }
    found |= {"cut": not got.requires_grad, "dx": False, "dx_twice": False}
    if got.requires_grad:
        with FlopCounterMode(display=False) as back:
            got.backward(dy)
        found["flops"] += back.get_total_flops()
        if mine.grad is not None:
            found |= {"dx": near(mine.grad, whole_x.grad), "dx_twice": near(mine.grad, t * whole_x.grad)}
    return found


def judge(attempt) -> Answer:
    for t in (2, 4):
        with World(t, timeout=5) as world:
            results = world.run(_on_rank, attempt)
            traffic = world.traffic
        whole = 2 * (2 * TOKENS * HIDDEN * 4 * HIDDEN * 2)  # two products forward, two backward
        work = max(r["flops"] for r in results) / whole
        figures = [(f"share of the work on the busiest of {t} ranks", f"{work:.2f}", f"{1 / t:.2f}")]
        if any(r["shape"] != (TOKENS, HIDDEN) for r in results):
            return wrong(
                "another shape than the output's",
                f"On {t} ranks you return {results[0]['shape']}; the output is {(TOKENS, HIDDEN)} on every"
                " rank.",
            )
        if not all(r["y"] for r in results):
            if any(r["bent"] for r in results):
                return wrong(
                    "the non-linearity of partial sums",
                    "You sum gelu of the parts, where gelu of the sum was meant. Split `up` by columns: "
                    "then each rank has whole numbers to bend, only fewer of them.",
                )
            of_all, one = sum(r["got"] for r in results), results[0]
            if torch.allclose(t * one["got"], one["whole"]):
                return wrong(
                    "the mean where the sum was meant",
                    "The output is that of one process, divided by the number of ranks. The ranks hold shares"
                    " of one sum: nothing is to be divided.",
                )
            if one["sums"] == 1 and torch.allclose(of_all, one["whole"]):
                return wrong(
                    "a sum that is not used",
                    "Each rank returns its share of the output, though there was an all-reduce. toy.Leave"
                    " leaves its argument alone: use what it returns.",
                )
            if torch.allclose(of_all, one["of_t_x"]):
                return wrong(
                    "Enter and Leave swapped",
                    "x is summed over the ranks, where it is whole already, and the output is not. toy.Enter"
                    " stands before the column cut, toy.Leave behind the row cut.",
                )
            if one["sums"] == 0:
                return wrong(
                    "partial outputs never summed",
                    "Each rank holds its share of the sum. A row split ends with one all-reduce: toy.Leave.",
                )
            if one["sums"] > 1:
                return wrong(
                    "an all-reduce after the column split",
                    "After a column split the ranks hold different columns. To add them up mixes columns that"
                    " do not belong together. They need no exchange at all if a row split follows.",
                )
            return wrong(
                "another output",
                f"On {t} ranks the output is not that of one process. Which part of `up` and of `down` does a"
                " rank take?",
            )
        if work > 1.01 / t:
            return wrong(
                "every rank did more than its share",
                "The output is right, but a rank multiplied more than its part. Cut both matrices before you"
                " multiply.",
                *figures,
            )
        if any(r["cut"] for r in results):
            return wrong(
                "an output cut off from x",
                "The output is right, but autograd cannot get from it back to x: it follows neither a"
                " detach() nor a tensor that dist.all_gather has filled. Nothing needs gathering here: a"
                " rank's columns of `up` meet its rows of `down`.",
            )
        if all(r["dx_twice"] for r in results):
            return wrong(
                "a gradient summed once too often",
                f"The gradient of x is {t} times too large: it is added over the ranks where it is whole"
                " already. Each of toy.Enter and toy.Leave belongs in one place.",
                *figures,
            )
        if not all(r["dx"] for r in results):
            return wrong(
                "the backward all-reduce is missing",
                "The output is right, the gradient of x is not: each rank has only what came back through its"
                " own columns. Forward, x goes to every rank unchanged; backward, the ranks' gradients must"
                " be added: toy.Enter.",
                *figures,
            )
        if (calls := sum(row.calls for row in traffic.ranks[0])) > 2:
            return wrong(
                "more messages than needed",
                f"Right, but with {calls} collectives: one all-reduce forward and one backward are enough.",
                *figures,
            )
        allowed = 2 * book("all_reduce", 8 * TOKENS * HIDDEN, t)
        if max(traffic.counted) > 1.01 * allowed:
            return wrong(
                "more bytes than needed",
                f"Right, but the busiest rank sent {max(traffic.counted):,.0f} bytes, where {allowed:,.0f}"
                " are enough: an all-reduce moves less than gathering every rank's share.",
                *figures,
            )
    return right(
        "The output and the gradient of x are the twin's, with one all-reduce forward and one backward.",
        *figures,
    )


mlp = Exercise(
    "split the MLP",
    split_mlp,
    judge,
    hints=[
        (
            "Which cut of `up` lets each rank apply gelu without asking anybody? up.chunk(world_size,"
            " dim=1)[rank] is a rank's columns."
        ),
        (
            "A rank then has some columns of the inside. Which rows of `down` do they meet?"
            " down.chunk(world_size, dim=0)[rank]."
        ),
        "What comes out is a share of a sum: y = toy.Leave.apply(y, None) adds the ranks' shares.",
        (
            "Backward, each rank knows only its share of the gradient of x: x = toy.Enter.apply(x, None),"
            " before anything else."
        ),
    ],
)
