"""Drop 04: the loop of a pipeline stage, and how little of the time each stage works."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from helpers import toy
from helpers.practice.engine import OnRanks
from helpers.practice.runs import Run, alike
from helpers.ranks import current
from helpers.ranks.world import World
from three_axes.count import clock
from three_axes.count.clock import Timeline
from three_axes.paper.schedules import gpipe

# -- practice: the loop of a stage ----------------------------------------------------------------


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
        dist.send(y, rank + 1)  # the numbers: a message carries no graph
        dy = torch.empty_like(y)
        dist.recv(dy, rank + 1)
        y.backward(dy)
    if rank > 0:
        dist.send(x.grad, rank - 1)
    return loss.item() if rank == last else None


def _step(attempt: Callable, facts: dict) -> None:
    """Run one step. Note what goes through the stage, and which of its tensors are sent how many ranks on."""
    sizes, batch = dict(hidden=256, seq_len=16), toy.make_batch(4, 16)
    rank, p = dist.get_rank(), dist.get_world_size()
    twin, stage = toy.ToyTransformer(**sizes), toy.split_depth(toy.ToyTransformer(**sizes))
    toy.twin_step(twin, *batch)
    facts |= {"forwards": 0, "backwards": 0, "asked": True, "sent": set(), "none": False}
    known: dict[str, torch.Tensor] = {}

    def backward(dy):
        facts["backwards"] += 1
        known["dy"] = dy.detach().clone()

    def forward(_, args, y):
        facts["forwards"] += 1
        facts["asked"] = args[0].requires_grad or not args[0].is_floating_point()
        known.update(x=args[0], y=y.detach().clone())
        y.requires_grad and y.register_hook(backward)

    def message(op, peer, tensor):
        x = known.get("x")
        tensors = known | {"x.grad": x.grad if x is not None and x.is_leaf else None}
        if op == "send":
            facts["sent"] |= {(name, peer - rank) for name, t in tensors.items() if alike(tensor, t, 1e-12)}

    stage.register_forward_hook(forward)
    current.rank.recorder.watch = message
    try:
        answer = attempt(stage, *batch, torch.empty(4, 16, 256), rank, p)
    except TypeError as e:  # None is sent
        facts["none"] = "Expected parameter `tensor`" in str(e) and "NoneType" in str(e)
        raise
    facts["values"] = [answer.item() if isinstance(answer, torch.Tensor) and answer.numel() == 1 else answer]
    facts["same"] = all(
        mine.grad is not None and torch.allclose(mine.grad, theirs.grad, atol=1e-5)
        for mine, theirs in zip(stage.parameters(), toy.split_depth(twin).parameters())
    )


def _where(holds: Callable[[dict], bool]) -> Callable[[Run, Run], str]:
    """Shows the first rank of which holds(its facts), in a step that is not the twin's."""

    def shown(run: Run, truth: Run) -> str:
        same = not run.error and all(facts["same"] for facts in run.ranks)
        if same and loop.alike(run.ranks[-1]["values"], truth.ranks[-1]["values"]):
            return ""
        return next((f"See rank {r}." for r, facts in enumerate(run.ranks) if facts and holds(facts)), "")

    return shown


def _left(run: Run, op: str) -> list[dict]:
    """The facts of ranks that stand in `op` with a rank that has finished."""
    done = {r for r, seen in enumerate(run.error.seen if run.error else []) if seen.finished}
    return [run.ranks[r] for r, at in run.standing.items() if at["op"] == op and at["needs"][0] in done]


loop = OnRanks(
    "the loop of a stage",
    pipeline,
    minutes=12,
    hints=[
        "There are three kinds of rank: the first has no previous stage, the last has no next stage. Write"
        " the loop for a middle one. Then leave out what the first and the last do not do.",
        "Forward: recv x from rank − 1, y = stage(x), send y to rank + 1. The last rank computes the loss"
        " instead of sending.",
        "Backward: recv dy from rank + 1, y.backward(dy), send x.grad to rank − 1. The last rank begins with"
        " loss.backward().",
        "x must require a gradient before the forward: x.requires_grad_().",
    ],
    tries=((2,), (4,)),
    watch=_step,
    tolerance=2e-5,
    world={"timeout": 4},
    praise="The loss, and every stage's gradients, are the twin's, and no stage sent more than an activation"
    " on and a gradient back.",
    figures=lambda run, truth: [
        (
            "bytes sent by the busiest stage, in activations",
            *(f"{one.most('bytes') / (4 * 4 * 16 * 256):.0f}" for one in (run, truth)),
        )
    ],
    shows={
        "dy in the shape of the tokens": lambda run, _: "called recv of int64" in str(run.error),
        "a gradient sent by the first rank": lambda run, _: run.ranks[0].get("none"),
        "the loss on every stage": lambda run, _: (
            not run.error and any(f["values"] != [None] for f in run.ranks[:-1])
        ),
        "the input sent on": _where(lambda f: ("x", 1) in f["sent"]),
        "a received activation that does not require grad": _where(lambda f: not f["asked"]),
        "dy sent back": _where(lambda f: ("dy", -1) in f["sent"]),
        "an activation sent back": _where(lambda f: f["sent"] & {("x", -1), ("y", -1)}),
        "a gradient sent downstream": _where(
            lambda f: any(name in ("x.grad", "dy") and to != -1 for name, to in f["sent"])
        ),
        "backward run twice": _where(lambda f: f["backwards"] > 1),
        "a stage without backward": _where(
            lambda f: f["forwards"] > f["backwards"] == 0 and ("values" in f or f["none"])
        ),
        "a gradient that is not there": _where(lambda f: f["none"]),
        "a gradient that nobody receives": lambda run, _: any(
            ("x.grad", -1) in f.get("sent", ()) for f in _left(run, "send")
        ),
        "a message that nobody receives": lambda run, _: _left(run, "send"),
        "a message that nobody sends": lambda run, _: _left(run, "recv"),
        "neighbours that wait for each other": lambda run, _: run.standing,
        "other gradients than the twin's": _where(lambda f: not f.get("same", True)),
    },
    mistakes="""
        a loss asked of every rank
            Only the last rank has a loss. The others return None.
            ! 'NoneType' object has no attribute 'item'
        the value of recv
            dist.recv returns the sender's rank, a number. The message is in the tensor that you give it.
            ! 'int' object has no attribute 'requires_grad
        backward of y without dy
            Only a loss is one number, and knows where its backward begins. A stage's y is a tensor. Write
            y.backward(dy), with the gradient that the next stage sent.
            ! grad can be implicitly created only for scalar
        a gradient asked of tokens
            Rank 0's tokens are whole numbers, which have no gradient. Ask for it where rank > 0.
            ! only Tensors of floating point
        a message to itself
            Every rank runs your function, and `rank` says which stage it is: no loop over ranks is needed.
            ! should not be the same as the rank of the current process
        dy in the shape of the tokens
            A gradient comes to a tensor of whole numbers. (On rank 0 x is the tokens.) Receive dy into
            torch.empty_like(y).
        a gradient sent by the first rank
            Rank 0's tokens get no gradient, and no rank comes before it. Send x.grad only where rank > 0.
        a neighbour that does not exist
            No rank comes before the first, and none after the last.
            ! which does not exist
        the loss on every stage
            Only the last stage has the scores that a loss compares with the targets. The others have
            activations: let them return None.
        the input sent on
            It sends its x to the next stage. What goes on is y = stage(x).
        a received activation that does not require grad
            Its x is a new tensor, and autograd does not know that you need its gradient. Write
            x.requires_grad_() before the forward.
        dy sent back
            It sends back the gradient of its output, dy. The stage before needs the gradient of what it
            sent: x.grad, which y.backward(dy) leaves.
        an activation sent back
            It sends an activation to the stage before. What goes back is a gradient: x.grad.
        a gradient sent downstream
            Its gradient goes to another rank than the one before. Activations go down the line, gradients
            come back up: to rank − 1.
        backward run twice
            With one batch each stage runs backward once.
            ! backward through the graph a second time
        a stage without backward
            It runs forward, and no backward after it. The last stage begins with loss.backward(), the
            others with y.backward(dy).
        a gradient that is not there
            It sends None. Backward leaves a gradient only in a tensor that the stage did not make itself
            and that requires one: in x, not in y. Send x.grad, after backward.
        a gradient that nobody receives
            Only the last stage begins its backward from a loss. The others receive dy from rank + 1 and
            begin with y.backward(dy).
        a message that nobody receives
            For each send some rank must receive.
        a message that nobody sends
            For each recv some rank must send.
        neighbours that wait for each other
            For each recv some rank must send, and in the same order: forward from the first to the last,
            backward from the last to the first.
        another loss than the twin's
            The loss is toy.loss_of(y, targets), on the last rank.
            ~ form
            ~ values
        other gradients than the twin's
            Its gradients differ. Does each stage run backward from the gradient that came from the next
            one? Did you receive that into a tensor of its own? `empty` is your x, and backward still needs
            it.
        more bytes than needed
            An activation on and a gradient back are enough.
            $ bytes
    """,
)


# -- what the cells show --------------------------------------------------------------------------


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
                **{"around": current.around} if record else {},
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


def working(timeline: Timeline) -> float:
    """Share of the step in which a rank computed, from the first forward to the last backward; the mean of
    the ranks.
    """
    spans = [s for row in timeline.rows for s in row if s.kind in clock.COMPUTE]
    step = max(s.end for s in spans) - min(s.start for s in spans)
    return sum(s.end - s.start for s in spans) / step / len(timeline.rows)
