"""Drop 04's practice: the loop of a pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .... import toy
from ....runtime.failure import RankError
from ....runtime.world import World
from ...practice import Answer, Exercise, right, waits, wrong
from .seen import Seen, told, watch


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


def _on_rank(attempt):
    """One rank's part: the attempt's answer, the twin's loss, whether the stage's gradients are the twin's,
    and what was seen.
    """
    sizes, batch = dict(hidden=256, seq_len=16), toy.make_batch(4, 16)
    rank, size = dist.get_rank(), dist.get_world_size()
    twin = toy.ToyTransformer(**sizes)
    expected = toy.twin_step(twin, *batch)
    stage = toy.split_depth(toy.ToyTransformer(**sizes))
    seen = watch(stage)
    answer = attempt(stage, *batch, torch.empty(4, 16, 256), rank, size)
    if isinstance(answer, torch.Tensor) and answer.numel() == 1:
        answer = answer.item()  # the loss before .item() will do
    same = all(
        mine.grad is not None and torch.allclose(mine.grad, theirs.grad, atol=1e-5)
        for mine, theirs in zip(stage.parameters(), toy.split_depth(twin).parameters())
    )
    return answer, expected, same, seen


def judge(attempt) -> Answer:
    for p in (2, 4):
        with World(p, timeout=4) as world:
            try:
                results = world.run(_on_rank, attempt)
            except RankError as e:
                seen = world.run(told) if e.state_kept else [Seen() for _ in range(p)]
                return _crashed(e, seen, p)
            sent = world.traffic.payload
        if early := [r for r, (answer, *_) in enumerate(results[:-1]) if answer is not None]:
            return wrong(
                "the loss on every stage",
                f"Rank {early[0]} returned a loss. Only the last stage has the scores that a loss compares"
                " with the targets; what the others have are activations.",
            )
        activation = 4 * 4 * 16 * 256
        most = 2 * activation if p > 2 else activation
        answer, expected, *_ = results[-1]
        right_loss = isinstance(answer, float) and abs(answer - expected) <= 1e-4
        off = [r for r, (_, _, same, _) in enumerate(results) if not same]
        if (not right_loss or off) and (named := _mistake([r[-1] for r in results], p, range(p))):
            return wrong(*named)
        if not right_loss:
            return wrong(
                "another loss than the twin's",
                f"The last rank returned {answer!r}; the twin's loss is {expected:.4f}.",
            )
        if off:
            return wrong(
                "other gradients than the twin's",
                f"On {p} stages the gradients of rank {off[0]} differ. Does each stage run backward from the"
                " gradient that came from the next one, and did you receive that into a tensor of its own?"
                " `empty` is your x, and backward still needs it.",
            )
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


def _mistake(seen: list[Seen], p: int, over: Sequence[int] = ()) -> tuple[str, str] | None:
    """(name, text) of what was seen to be wrong. over: ranks that must have had their backward."""
    for r, rank in enumerate(seen):
        if r < p - 1 and rank.tells("x", to=r + 1):
            return (
                "the input sent on",
                f"Rank {r} sends its x to the next stage. What goes on is y = stage(x).",
            )
        if r and not rank.asked:
            return (
                "a received activation that does not require grad",
                f"On rank {r} the stage's input does not require a gradient. What comes from the stage before"
                " is a new tensor, and autograd does not know that you need its gradient: x.requires_grad_()"
                " before the forward.",
            )
        if r and rank.tells("dy", to=r - 1):
            return (
                "dy sent back",
                f"Rank {r} sends back the gradient of its output, dy. The stage before needs that of what it"
                " sent: x.grad, which y.backward(dy) leaves.",
            )
        if r and rank.tells("x", "y", to=r - 1):
            return (
                "an activation sent back",
                f"Rank {r} sends an activation to the stage before. What goes back is a gradient: x.grad.",
            )
        if r < p - 1 and rank.tells("x.grad", "dy", to=r + 1):
            return (
                "a gradient sent downstream",
                f"Rank {r} sends a gradient to rank {r + 1}. Activations go down the line, gradients come"
                " back up: to rank − 1.",
            )
        if rank.forwards > 1 or rank.backwards > 1:
            way, times = ("forward", rank.forwards) if rank.forwards > 1 else ("backward", rank.backwards)
            return (
                f"{way} run twice",
                f"Rank {r} runs {times} times {way}. With one batch each stage runs once.",
            )
    if none := [r for r in over if seen[r].forwards and not seen[r].backwards]:
        return (
            "a stage without backward",
            f"Rank {none[-1]} ran forward, and no backward after it. The last stage begins with"
            " loss.backward(), the others with y.backward(dy).",
        )
    return None


# What an error says, how the mistake is called, what to do.
CRASHES = (
    (
        "'NoneType' object has no attribute 'item'",
        "a loss asked of every rank",
        "only the last rank has a loss. The others return None.",
    ),
    (
        "backward through the graph a second time",
        "backward run twice",
        "a backward is run twice. Once is enough.",
    ),
    (
        "'int' object has no attribute 'requires_grad",
        "the value of recv",
        "dist.recv returns the sender's rank, a number. It writes the message into the tensor that you give"
        " it: go on with that tensor.",
    ),
    (
        "grad can be implicitly created only for scalar",
        "backward of y without dy",
        "only a loss is one number, and knows where its backward begins. A stage's y is a tensor:"
        " y.backward(dy) begins with the gradient that the next stage sent.",
    ),
    (
        "only Tensors of floating point",
        "a gradient asked of tokens",
        "the tokens of rank 0 are whole numbers, which have no gradient. Ask for it where x was received:"
        " where rank > 0.",
    ),
    (
        "should not be the same as the rank of the current process",
        "a message to itself",
        "a rank sends to itself, or receives from itself. Every rank runs your function at the same time, and"
        " `rank` says which stage it is: it needs no loop over the ranks.",
    ),
)


def _crashed(error: RankError, seen: list[Seen], p: int) -> Answer:
    """A crash or a hang, with its name where what was seen proves one."""
    head, report = f"On {p} stages", f"\n\n{error.report}"
    messages = {r: s.error.message for r, s in enumerate(error.seen) if s.error and not s.error.aborted}
    for part, name, advice in CRASHES:
        if any(part in text for text in messages.values()):
            return Answer("crashed", f"{head}: {advice}{report}", name)
    if "called recv of int64" in error.report:
        return Answer(
            "crashed",
            f"{head} a gradient comes to a tensor of whole numbers. dy has the shape and the dtype of y, so"
            f" receive it into torch.empty_like(y). (On rank 0 x is the tokens.){report}",
            "dy in the shape of the tokens",
        )
    nothing = [
        r for r, text in messages.items() if "Expected parameter `tensor`" in text and "NoneType" in text
    ]
    if 0 in nothing:
        return Answer(
            "crashed",
            f"{head} rank 0 sends a gradient, and has none: tokens get no gradient, and no rank comes before"
            f" it. Send x.grad only where rank > 0.{report}",
            "a gradient sent by the first rank",
        )
    doing, last = waits(error), p - 1
    if doing.get(last, {}).get("op") == "send" and doing[last]["needs"] != [last - 1]:
        return Answer(
            "crashed",
            f"{head} the last rank sends to rank {doing[last]['needs'][0]}. Activations go down the line,"
            f" gradients come back up: to rank − 1.{report}",
            "a gradient sent downstream",
        )
    if any("which does not exist" in text for text in messages.values()):
        return Answer("crashed", f"{head}:{report}", "a neighbour that does not exist")
    over = [
        r
        for r in range(p)
        if r in nothing or error.seen[r].finished or seen[r].tells("x.grad", "dy", to=r - 1)
    ]
    if named := _mistake(seen, p, over):
        name, text = named
        return Answer("crashed", f"{head}: {text}{report}", name)
    if nothing:
        return Answer(
            "crashed",
            f"{head} rank {nothing[0]} sends a gradient that is None. Backward leaves a gradient only in a"
            " tensor that the stage did not make itself and that requires one: in x, not in y. So send"
            f" x.grad, after backward.{report}",
            "a gradient that is not there",
        )
    unheard = {
        r: at["needs"][0]
        for r, at in doing.items()
        if at["op"] == "send" and error.seen[at["needs"][0]].finished
    }
    if unheard:
        r, peer = next(iter(unheard.items()))
        what = next((name for name, to in reversed(seen[r].sent) if to == peer), "a tensor")
        return Answer(
            "crashed",
            f"{head} rank {r} sends {what} to rank {peer}, which has finished without receiving it. Only the"
            " last stage begins its backward from a loss. The others receive dy from rank + 1 and begin with"
            f" y.backward(dy).{report}",
            "a gradient that nobody receives" if what == "x.grad" else "a message that nobody receives",
        )
    if unsent := {
        r: at["needs"][0]
        for r, at in doing.items()
        if at["op"] == "recv" and error.seen[at["needs"][0]].finished
    }:
        r, peer = next(iter(unsent.items()))
        return Answer(
            "crashed",
            f"{head} rank {r} waits for a message of rank {peer}, which has finished without sending one. For"
            f" each recv some rank must send.{report}",
            "a message that nobody sends",
        )
    if doing:
        return Answer(
            "crashed",
            f"{head} the ranks wait for messages that do not come. For each recv some rank must send, and in"
            " the same order: forward from the first to the last, backward from the last to the first."
            f"{report}",
            "neighbours that wait for each other",
        )
    return Answer("crashed", f"{head}:\n{error.report}")


loop = Exercise(
    "the loop of a stage",
    pipeline,
    judge,
    minutes=12,
    hints=[
        (
            "There are three kinds of rank: the first has no previous stage, the last has no next stage."
            " Write the loop for a middle one. Then leave out what the first and the last do not do."
        ),
        (
            "Forward: recv x from rank − 1, y = stage(x), send y to rank + 1. The last rank computes"
            " the loss instead of sending."
        ),
        (
            "Backward: recv dy from rank + 1, y.backward(dy), send x.grad to rank − 1. The last rank begins"
            " with loss.backward()."
        ),
        "x must require a gradient before the forward: x.requires_grad_().",
    ],
)
