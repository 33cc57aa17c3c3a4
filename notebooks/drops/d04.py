"""Drop 04: a pipeline stage by hand, and how little of the time each stage works."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist

from drops import measured
from drops.measured import Step
from helpers import toy
from helpers.practice.engine import OnRanks
from helpers.practice.exercise import names_in
from helpers.practice.runs import Run, alike
from helpers.ranks import current
from helpers.ranks.world import World
from three_axes.count import clock
from three_axes.count.clock import Timeline
from three_axes.paper.schedules import Schedule, gpipe

# -- practice: a middle stage, and the loop of any stage ------------------------------------------


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


def _middle_only(attempt: Callable) -> Callable:
    """A whole step, with the attempt on the stages between the first and the last."""

    def step(stage, tokens, targets, empty, rank, world_size):
        if 0 < rank < world_size - 1:
            return attempt(stage, empty, rank)
        return pipeline(stage, tokens, targets, empty, rank, world_size)

    return step


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
    whole = isinstance(answer, torch.Tensor)
    facts["values"] = [
        answer.item() if whole and answer.numel() == 1 else answer.detach() if whole else answer
    ]
    pairs = [(p.grad, q.grad) for p, q in zip(stage.parameters(), toy.split_depth(twin).parameters())]
    scale = float(pairs[-1][0].norm() / pairs[-1][1].norm()) if pairs[-1][0] is not None else 1.0
    multiple = abs(scale - 1) > 1e-3 and all(
        mine is not None and torch.allclose(mine, scale * theirs, atol=1e-5) for mine, theirs in pairs
    )
    facts["times"] = f"{scale:.2f}" * multiple
    facts["same"] = all(
        mine.grad is not None and torch.allclose(mine.grad, theirs.grad, atol=1e-5)
        for mine, theirs in zip(stage.parameters(), toy.split_depth(twin).parameters())
    )


def _where(holds: Callable[[dict], bool]) -> Callable[[Run, Run], str]:
    """Shows the last rank of which holds(its facts), in a step that is not the twin's."""

    def shown(run: Run, truth: Run) -> str:
        same = not run.error and all(facts["same"] for facts in run.ranks)
        if same and loop.alike(run.ranks[-1]["values"], truth.ranks[-1]["values"]):
            return ""
        # A wrong gradient goes down the ranks: the last one is its source.
        guilty = [r for r, facts in enumerate(run.ranks) if facts and holds(facts)]
        return f"See rank {guilty[-1]}." if guilty else ""

    return shown


NO_BACKWARD = _where(lambda f: f["forwards"] > f["backwards"] == 0 and ("values" in f or f["none"]))


def _left(run: Run) -> list[dict]:
    """The facts of ranks that stand in a message with a rank that has finished."""
    done = {r for r, seen in enumerate(run.error.seen if run.error else []) if seen.finished}
    return [run.ranks[r] for r, at in run.standing.items() if at["needs"][0] in done]


SHOWS = {
    "gradients thrown away": lambda run, truth: (
        "zero_grad" in names_in(run.attempt) and _where(lambda f: not f.get("same", True))(run, truth)
    ),
    "the input sent on": _where(lambda f: ("x", 1) in f["sent"]),
    "a received activation that does not require grad": _where(lambda f: not f["asked"]),
    "not x.grad sent back": _where(lambda f: f["sent"] & {("dy", -1), ("x", -1), ("y", -1)}),
    "a gradient sent downstream": _where(
        lambda f: any(name in ("x.grad", "dy") and to != -1 for name, to in f["sent"])
    ),
    "a gradient that is divided, or multiplied": _where(lambda f: f.get("times")),
    "backward run twice": _where(lambda f: f["backwards"] > 1),
    "a backward that misses the stage": lambda run, truth: (
        "detach" in names_in(run.attempt) and NO_BACKWARD(run, truth)
    ),
    "a stage without backward": NO_BACKWARD,
    "forward run twice": lambda run, _: not run.error and any(f["forwards"] > 1 for f in run.ranks),
    "a gradient that is not there": _where(lambda f: f["none"]),
    "a gradient that nobody receives": lambda run, _: any(("x.grad", -1) in f["sent"] for f in _left(run)),
    "a message with one end": lambda run, _: _left(run),
    "neighbours that wait for each other": lambda run, _: run.standing,
    "other gradients than the twin's": _where(lambda f: not f.get("same", True)),
}

MISTAKES = """
        gradients thrown away
            zero_grad() empties what backward has just left. Call it before the step, or leave it out.
        the value of recv
            dist.recv returns the sender's rank, a number. The message is in the tensor that you give it.
            ! 'int' object has no attribute 'requires_grad
        backward of y without dy
            Only a loss knows where its backward begins. A stage's y is a tensor: write y.backward(dy), with
            the gradient that the next stage sent.
            ! grad can be implicitly created only for scalar
        a message to itself
            Every rank runs your function, and `rank` says which stage it is: no loop over ranks is needed.
            ! should not be the same as the rank of the current process
        a neighbour that does not exist
            No rank comes before the first, and none after the last.
            ! which does not exist
        the input sent on
            It sends its x to the next stage. What goes on is y = stage(x).
        a received activation that does not require grad
            Its x is a new tensor, and autograd does not know that you need its gradient. Write
            x.requires_grad_() before the forward.
        not x.grad sent back
            What goes back is the gradient of what the stage before sent: x.grad, which y.backward(dy)
            leaves. It sends dy back, or an activation.
        a gradient sent downstream
            Activations go down the line, gradients come back up: to rank − 1.
        backward run twice
            With one batch each stage runs backward once.
            ! backward through the graph a second time
        a backward that misses the stage
            Backward was called on a tensor that no stage made: a message, or y cut off by detach(). A message
            carries numbers alone, so send y as it is, and call y.backward(dy).
            ! does not require grad and does not have a grad_fn
        a stage without backward
            Nothing runs backward through what stage(x) gave. The last stage begins with loss.backward(), the
            others with y.backward(dy); and nothing of it is under torch.no_grad().
        a gradient that is not there
            It sends None. Backward leaves a gradient only in a tensor that the stage did not make itself
            and that requires one: in x, not in y. Send x.grad, after backward.
        a gradient that nobody receives
            Only the last stage begins its backward from a loss. The others receive dy from rank + 1 and
            begin with y.backward(dy).
        a message with one end
            For each send some rank must receive, and for each recv some rank must send.
        neighbours that wait for each other
            For each recv some rank must send, and in the same order: forward from the first to the last,
            backward from the last to the first.
        a gradient that is divided, or multiplied
            All its gradients are the same multiple of the twin's. The stages share one batch: nothing is
            averaged over them.
        other gradients than the twin's
            Does each stage run backward from the gradient that came from the next one? Did you receive that
            into a tensor of its own, and not into your x, which backward still needs?
        forward run twice
            The gradients are right, but a stage runs its layers twice. Keep y = stage(x), send it, and call
            backward on it.
        more bytes than needed
            An activation on and a gradient back are enough.
            $ bytes
    """


def middle(stage, empty, rank):
    """One step of a stage that is neither the first nor the last.

    stage: this rank's layers. empty: a tensor of an activation's shape to receive into; it becomes x. Leave
    the gradients in the stage's parameters.
    """
    x = empty
    dist.recv(x, rank - 1)
    x.requires_grad_()  # so that backward leaves a gradient to send
    y = stage(x)
    dist.send(y, rank + 1)
    dy = torch.empty_like(y)
    dist.recv(dy, rank + 1)
    y.backward(dy)
    dist.send(x.grad, rank - 1)


middle_stage = OnRanks(
    "the middle stage",
    middle,
    minutes=7,
    hints=[
        "Six lines: receive x from rank − 1, y = stage(x), send y to rank + 1; receive dy from rank + 1, go"
        " backward, send a gradient to rank − 1.",
        "y.backward(dy) goes backward from the gradient that came. What goes on to rank − 1 is x.grad.",
        "x must require a gradient before the forward: x.requires_grad_(). Receive dy into a tensor of its"
        " own: torch.empty_like(y).",
    ],
    tries=((4,),),
    watch=lambda attempt, facts: _step(_middle_only(attempt), facts),
    tolerance=2e-5,
    praise="Every gradient is the twin's, on stages 1 and 2 of four, and no stage sent more than it must.",
    shows=SHOWS,
    mistakes=MISTAKES,
)


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
        "something returned by every stage": lambda run, _: (
            not run.error and any(f["values"] != [None] for f in run.ranks[:-1])
        ),
    }
    | SHOWS,
    mistakes="""
        a loss asked of every rank
            Only the last rank has a loss. The others return None.
            ! 'NoneType' object has no attribute 'item'
        a gradient asked of tokens
            Rank 0's tokens are whole numbers, which have no gradient. Ask for it where rank > 0.
            ! only Tensors of floating point
        dy in the shape of the tokens
            On rank 0 x is the tokens, whole numbers. Receive dy into torch.empty_like(y).
        a gradient sent by the first rank
            Rank 0's tokens get no gradient, and no rank comes before it. Send x.grad only where rank > 0.
        something returned by every stage
            Only the last stage knows the loss. Let the others return None.
        a loss that is divided
            The stages share one batch. Nothing is averaged over them.
            - toy.loss_of(y, targets) => toy.loss_of(y, targets) / world_size
        not a loss
            The loss is toy.loss_of(y, targets), on the last rank.
            ~ form
    """
    + MISTAKES,
)


# -- what the cells show --------------------------------------------------------------------------


def step_by(schedule: Schedule, chunks: dict[int, torch.nn.Module], batch: tuple, **options) -> float | None:
    """On a rank: its part of a step by a schedule, with `toy.run_schedule` and its options."""
    tokens, targets = (whole.chunk(schedule.m) for whole in batch)
    ops = schedule.ops[dist.get_rank()]
    return toy.run_schedule(chunks, ops, schedule.rank_of, tokens, targets, **options)


def timed_step(
    world: World, schedule: Schedule = gpipe(4, 1), watch: Callable = lambda stage: nullcontext()
) -> Timeline:
    """One step of the toy by a schedule, by default with one batch, on the clock. watch(stage): what it runs
    in.
    """

    def run():
        stage = toy.split_depth(toy.ToyTransformer())
        for _ in range(2):  # once to warm up
            current.count_from_here()
            dist.barrier()
            with watch(stage):
                step_by(schedule, {dist.get_rank(): stage}, toy.make_batch(16, 64), around=current.around)

    world.run(run)
    return world.timeline


def one_step(world: World) -> Step:
    """What a step moved on four stages, and what each of them keeps."""
    return measured.one_step(world, {"pp": 4}, toy.split_depth, toy.pipeline_step)


def together(timeline: Timeline) -> float:
    """How long ranks worked while others did, as a share of the time in which any worked."""
    ranks = range(len(timeline.rows))
    any_rank = Timeline([sum(timeline.rows, [])], [[]]).seconds(0, *clock.COMPUTE)
    return sum(timeline.seconds(r, *clock.COMPUTE) for r in ranks) / any_rank - 1


def working(timeline: Timeline) -> float:
    """Share of the step in which a rank computed, the mean of the ranks."""
    return 1 - timeline.bubble
