"""Drop 04: the loop of a pipeline stage, and how little of the time each stage works."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ... import toy
from ...runtime import clock
from ...runtime.clock import Timeline
from ...runtime.failure import RankError
from ...runtime.world import World
from ...theory.schedules import gpipe
from ..practice import Answer, Exercise, right, waits, wrong


def pipeline(stage, tokens, targets, empty, rank, world_size):
    """One training step of a pipeline, as each rank runs it. Return the loss on the last rank, None on the
    others.

    stage: this rank's layers. tokens and targets: the batch. empty: a tensor of an activation's shape to
    receive into; it becomes x. Leave the gradients in the stage's parameters.
    """
    last = world_size - 1
    x = tokens
    if rank > 0:
        x = empty
        dist.recv(x, rank - 1)
        x.requires_grad_()  # so that backward leaves a gradient to send
    y = stage(x)
    if rank == last:
        loss = toy.loss_of(y, targets)
        loss.backward()
    else:
        dist.send(y.detach(), rank + 1)
        dy = torch.empty_like(y)
        dist.recv(dy, rank + 1)
        y.backward(dy)
    if rank > 0:
        dist.send(x.grad, rank - 1)
    return loss.item() if rank == last else None


def timed_step(world: World, hidden: int = 256, b: int = 16, s: int = 64) -> Timeline:
    """One step of the pipeline with one batch, on the clock."""

    def run():
        rank, p = dist.get_rank(), dist.get_world_size()
        stage = toy.split_depth(toy.ToyTransformer(hidden, seed=0))
        tokens, targets = toy.make_batch(b, s)
        for record in (False, True):  # once to warm up
            dist.barrier()
            toy.run_schedule(
                {rank: stage},
                gpipe(p, 1).ops[rank],
                list(range(p)),
                [tokens],
                [targets],
                **{"around": clock.around} if record else {},
            )

    world.run(run)
    return world.timeline


def together(timeline: Timeline) -> float:
    """Share of the working time in which more than one rank worked."""
    spans = [s for row in timeline.rows for s in row if s.kind in clock.COMPUTE]
    edges = sorted([(s.start, 1) for s in spans] + [(s.end, -1) for s in spans])
    working = several = 0.0
    busy = 0
    for (at, change), (then, _) in zip(edges, edges[1:]):
        busy += change
        working += (then - at) * (busy > 0)
        several += (then - at) * (busy > 1)
    return several / working


def _on_rank(attempt):
    """One rank's part: the attempt's answer, the twin's loss, and whether the stage's gradients are the
    twin's.
    """
    sizes, batch = dict(hidden=256, seq_len=16), toy.make_batch(4, 16)
    rank, size = dist.get_rank(), dist.get_world_size()
    twin = toy.ToyTransformer(**sizes)
    expected = toy.twin_step(twin, *batch)
    stage = toy.split_depth(toy.ToyTransformer(**sizes))
    answer = attempt(stage, *batch, torch.empty(4, 16, 256), rank, size)
    if isinstance(answer, torch.Tensor) and answer.numel() == 1:
        answer = answer.item()  # the loss before .item() will do
    same = all(
        mine.grad is not None and torch.allclose(mine.grad, theirs.grad, atol=1e-5)
        for mine, theirs in zip(stage.parameters(), toy.split_depth(twin).parameters())
    )
    return answer, expected, same


def judge(attempt) -> Answer:
    for p in (2, 4):
        with World(p, timeout=4) as world:
            try:
                results = world.run(_on_rank, attempt)
            except RankError as e:
                return _named(e, p) or Answer("crashed", f"On {p} stages:\n{e.report}")
            sent = world.traffic.payload
        if early := [r for r, (answer, *_) in enumerate(results[:-1]) if answer is not None]:
            return wrong(
                "the loss on every stage",
                f"Rank {early[0]} returned a loss. Only the last stage has the scores that a loss compares"
                " with the targets; what the others have are activations.",
            )
        answer, expected, _ = results[-1]
        if not isinstance(answer, float) or abs(answer - expected) > 1e-4:
            return wrong(
                "another loss than the twin's",
                f"The last rank returned {answer!r}; the twin's loss is {expected:.4f}.",
            )
        if off := [r for r, (*_, same) in enumerate(results) if not same]:
            return wrong(
                "other gradients than the twin's",
                f"On {p} stages the gradients of rank {off[0]} differ. Does each stage run backward from the"
                " gradient that came from the next one, and did you receive that into a tensor of its own?"
                " `empty` is your x, and backward still needs it.",
            )
        activation = 4 * 4 * 16 * 256
        most = 2 * activation if p > 2 else activation
        if max(sent) > most:
            return wrong(
                "more bytes than needed",
                f"The busiest of {p} ranks sent {max(sent):,.0f} bytes; {most:,} are enough: "
                "an activation on, a gradient back.",
            )
    return right(
        "The loss, and every stage's gradients, are the twin's, and no stage sent more than an activation on"
        " and a gradient back.",
        ("bytes sent by a middle stage, in activations", f"{max(sent) / activation:.0f}", "2"),
    )


def _named(error: RankError, p: int) -> Answer | None:
    """Mistakes that end in a crash or a hang and have a name."""
    said = {r: s.error.message for r, s in enumerate(error.seen) if s.error and not s.error.aborted}
    no_tensor = [
        r for r, text in said.items() if "Expected parameter `tensor`" in text and "NoneType" in text
    ]
    if 0 in no_tensor:
        return Answer(
            "crashed",
            f"On {p} stages rank 0 sends a gradient, and has none: tokens get no gradient, and no rank comes"
            f" before it. Send x.grad only where rank > 0.\n\n{error.report}",
            "a gradient sent by the first rank",
        )
    if any("'NoneType' object has no attribute 'item'" in text for text in said.values()):
        return Answer(
            "crashed",
            f"On {p} stages only the last rank has a loss. The others return None.\n\n{error.report}",
            "a loss asked of every rank",
        )
    if no_tensor or any("does not require grad" in text for text in said.values()):
        return wrong(
            "a received activation that does not require grad",
            "What comes from the stage before is a new tensor, and autograd does not know that you need its"
            " gradient: x.requires_grad_() before the forward. Otherwise, or if no backward ran, there is"
            " nothing to send back.",
        )
    doing, last = waits(error), p - 1
    if doing.get(last, {}).get("op") == "send" and doing[last]["needs"] != [last - 1]:
        return Answer(
            "crashed",
            f"On {p} stages the last rank sends to rank {doing[last]['needs'][0]}. Activations go down the"
            f" line, gradients come back up: to rank − 1.\n\n{error.report}",
            "a gradient sent downstream",
        )
    unheard = {
        r: inside["needs"][0]
        for r, inside in doing.items()
        if inside["op"] == "send" and error.seen[inside["needs"][0]].finished
    }
    if unheard:
        r, peer = next(iter(unheard.items()))
        return Answer(
            "crashed",
            f"On {p} stages rank {r} sends a gradient back to rank {peer}, which has finished without"
            " receiving it. Only the last stage begins its backward from a loss. The others receive dy from"
            f" rank + 1 and begin with y.backward(dy).\n\n{error.report}",
            "a gradient that nobody receives",
        )
    if doing:
        return Answer(
            "crashed",
            f"On {p} stages the ranks wait for messages that do not come. For each recv some rank must send,"
            " and in the same order: forward from the first to the last, backward from the last to the"
            f" first.\n\n{error.report}",
            "neighbours that wait for each other",
        )
    return None


loop = Exercise(
    "the loop of a stage",
    pipeline,
    judge,
    hints=[
        (
            "Three kinds of rank: the first has no rank before it, the last none behind it. Write it for a"
            " middle one, then leave out what the ends lack."
        ),
        (
            "Forward: recv x from rank − 1, y = stage(x), send y.detach() to rank + 1. The last rank computes"
            " the loss instead of sending."
        ),
        (
            "Backward: recv dy from rank + 1, y.backward(dy), send x.grad to rank − 1. The last rank begins"
            " with loss.backward()."
        ),
        "x must require a gradient before the forward: x.requires_grad_().",
    ],
)
