"""Drop 04: a pipeline stage by hand, and how little of the time each stage works."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from helpers import toy
from helpers.practice import OnRanks, Run, alike, first, hear, names_in, needs_more

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
        dist.send(y, rank + 1)  # y's numbers only: a message has no autograd graph
        dy = torch.empty_like(y)
        dist.recv(dy, rank + 1)
        y.backward(dy)
    if rank > 0:
        dist.send(x.grad, rank - 1)
    return loss.item() if rank == last else None


def _middle_only(attempt: Callable) -> Callable:
    """A function for a whole step, in which the stages between the first and the last run the attempt."""

    def step(stage, tokens, targets, empty, rank, world_size):
        if 0 < rank < world_size - 1:
            attempt(stage, empty, rank)
            return None  # the exercise does not ask for a middle stage's result
        return pipeline(stage, tokens, targets, empty, rank, world_size)

    return step


def _step(attempt: Callable, facts: dict) -> None:
    """Run one step. Record the stage's forwards and backwards, which of its tensors were sent, and by how
    many ranks further: "sent" has (name, distance), such as ("x.grad", -1). "x": a sentence if its forward or
    backward used something else than what the previous stage sent. "dy": whether its backward began from
    something else than what the next one sent.
    """
    sizes, batch = dict(hidden=256, seq_len=16), toy.make_batch(4, 16)
    rank, p = dist.get_rank(), dist.get_world_size()
    twin, stage = toy.ToyTransformer(**sizes), toy.split_depth(toy.ToyTransformer(**sizes))
    toy.twin_step(twin, *batch)
    facts |= {"forwards": 0, "backwards": 0, "x": "", "dy": False}
    facts |= {"asked": True, "sent": set(), "none": False}
    known: dict[str, torch.Tensor] = {}
    came: dict[int, torch.Tensor] = {}  # peer -> the tensor that received from it last

    def is_other(t, peer: int) -> bool:
        return 0 <= peer < p and not (peer in came and alike(t.flatten(), came[peer].flatten(), 1e-6))

    def backward(dy):
        facts["backwards"] += 1
        known["dy"] = dy.detach().clone()
        facts["dy"] = is_other(dy, rank + 1)
        if not facts["x"] and not torch.equal(known["x"], known["x as it was"]):
            facts["x"] = " Its x was written over before backward, which reads it again."

    def forward(_, args, y):
        facts["forwards"] += 1
        facts["asked"] = args[0].requires_grad or not args[0].is_floating_point()
        facts["x"] = " Its stage(x) ran on something else." * is_other(args[0], rank - 1)
        known.update({"x": args[0], "x as it was": args[0].detach().clone(), "y": y.detach().clone()})
        y.requires_grad and y.register_hook(backward)

    def message(call):
        x = known.get("x")
        tensors = known | {"x.grad": x.grad if x is not None and x.is_leaf else None}
        if call.op == "recv":
            came[call.root] = call.first
        if call.op == "send":
            tensors = {"dy": came.get(rank + 1)} | tensors
            sent = [name for name, t in tensors.items() if alike(call.first, t, 1e-12)]
            facts["sent"] |= {(name, call.root - rank) for name in sent}

    stage.register_forward_hook(forward)
    hear(message)
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


def _left(run: Run) -> list[dict]:
    """The facts of ranks that are blocked in a send or receive whose other rank has finished."""
    done = {r for r, status in enumerate(run.error.seen if run.error else []) if status.finished}
    return [run.ranks[r] for r, at in run.standing.items() if at["needs"][0] in done]


def _second_did_as_the_last(run: Run) -> bool:
    """Whether ranks 0 and 1 of four have finished, and the others wait for a message never sent."""
    done = [status.finished for status in run.error.seen] if run.error else []
    waits = {r for r, at in run.standing.items() if at["op"] == "recv"}
    return done == [True, True, False, False] and waits == {2, 3}


OTHER = "other gradients than the twin's"


def _found_in_stage(run: Run, truth: Run) -> tuple[str, str] | None:
    same = not run.error and all(facts["same"] for facts in run.ranks)
    same = same and loop.alike(run.ranks[-1]["values"], truth.ranks[-1]["values"])

    def see(holds: Callable[[dict], object], what: Callable[[dict], str] = lambda _: "") -> str:
        """In a step that is not the twin's, the last rank for which holds(facts) is true, and what it did;
        else ''.
        """
        # A wrong gradient is passed on to lower ranks, so the last of these ranks is its source.
        # If another rank crashes at once, a rank may not have begun.
        begun = [r for r, facts in enumerate(run.ranks) if "forwards" in facts and not same]
        guilty = [r for r in begun if holds(run.ranks[r])]
        return f"See rank {guilty[-1]}.{what(run.ranks[guilty[-1]])}" if guilty else ""

    uses, other = names_in(run.attempt), see(lambda f: not f.get("same", True))
    no_backward = see(lambda f: f["forwards"] > f["backwards"] == 0 and ("values" in f or f["none"]))
    downstream = lambda f: any(name in ("x.grad", "dy") and to != -1 for name, to in f["sent"])
    back = lambda f: {name for name, to in f["sent"] if to == -1}
    return first(
        {
            "gradients thrown away": "zero_grad" in uses and other,
            "the input sent on": see(lambda f: ("x", 1) in f["sent"]),
            "a received activation that does not require grad": see(lambda f: not f["asked"]),
            "not x.grad sent back": see(lambda f: back(f) and "x.grad" not in back(f)),
            "a gradient sent downstream": see(downstream),
            "backward run twice": see(lambda f: f["backwards"] > 1),
            "a backward that misses the stage": "detach" in uses and no_backward,
            "a stage without backward": no_backward,
            "a gradient that is not there": see(lambda f: f["none"]),
            "a gradient that nobody receives": any(("x.grad", -1) in facts["sent"] for facts in _left(run)),
            "a message with one end": bool(_left(run)),
            "neighbours that wait for each other": bool(run.standing),
            "x is not what came": see(lambda f: f["x"], lambda f: f["x"]),
            "a gradient that is divided, or multiplied": see(lambda f: f.get("times")),
            "a backward from another gradient": see(lambda f: f["dy"]),
            OTHER: other,
            "forward run twice": not run.error and any(f["forwards"] > 1 for f in run.ranks),
        }
    ) or needs_more(bytes="more bytes than needed")(run, truth)


def _found_in_loop(run: Run, truth: Run) -> tuple[str, str] | None:
    returned = not run.error and any(f["values"] != [None] for f in run.ranks[:-1])
    found = first(
        {
            "two stages written in": _second_did_as_the_last(run),
            "dy in the shape of the tokens": "called recv of int64" in str(run.error),
            "a gradient sent by the first rank": bool(run.ranks[0].get("none")),
            "something returned by every stage": returned,
        }
    ) or _found_in_stage(run, truth)
    losses = [one.ranks[-1].get("values") for one in (run, truth)]
    if found and found[0] == OTHER and losses[0] and not loop.alike(*losses):
        text = "The last stage got the twin's x, and its loss is another one: it is toy.loss_of(y, targets)."
        return "another loss", text
    return found


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
    finds=_found_in_stage,
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
    finds=_found_in_loop,
)
