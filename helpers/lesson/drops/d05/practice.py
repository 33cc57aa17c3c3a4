"""Drop 05's practice: hide the all-reduce under backward."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .... import toy
from ....runtime import current
from ....runtime.failure import RankError
from ....runtime.world import World
from ...practice import Answer, Exercise, right, wrong
from .shown import NETWORK


def overlap(model, world_size):
    """Send gradients while backward runs.

    Register a hook on every parameter that starts the all-reduce of its gradient as soon as it is there.
    Return a function finish(), called after backward and before the optimizer's step: then every p.grad is
    the ranks' mean.
    """
    under_way = []

    def start(p):
        under_way.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish():
        for work, p in under_way:
            work.wait()
            p.grad /= world_size
        under_way.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(start)
    return finish


STEPS, LAYERS, WIDTH, PAUSE = 3, 6, 192, 0.030


def _layers(paced: bool) -> torch.nn.Sequential:
    """Six linear layers: few parameters, so that each can have an all-reduce of its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model if paced else ():
        toy.pace(layer, 0.0, PAUSE)
    return model


# What this rank is in, "overlap", "backward" or "finish", and whether an all-reduce was begun that nobody has
# waited for: kept here, it can be asked for after a crash.
_at = {"in": "", "open": False}


def _told() -> dict:
    return _at


def _on_rank(attempt):
    """One rank's part: what the gradients were after each step, and what was begun and under way when.

    When means before which layer's backward: an order of events, which no busy machine changes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    recorder = current.rank.recorder
    model, twin, alone = _layers(paced=True), _layers(paced=False), _layers(paced=False)
    _at["in"] = "overlap"
    finish = attempt(model, size)
    if not callable(finish):
        return {"finish": repr(finish)[:60]}
    seen = {
        "finish": None,
        "begun": 0,
        "early": 0.0,
        "left": 0,
        "off": None,
        "step": 0,
        "calls": 0,
        "not waited": 0,  # all-reduces of a step for which nobody called wait()
        "beside": False,  # whether an all-reduce was under way when a layer's backward began
    }
    payload = lambda: sum(row.payload for row in recorder.rows.values())
    count = lambda: sum(row.calls for row in recorder.rows.values())

    def begins(dy):
        # The layer whose backward begins last is the first one: `early` keeps what it was then.
        seen.update(early=payload(), beside=seen["beside"] or not recorder.calm())

    for layer in model:
        layer.register_forward_hook(lambda _, args, y: y.register_hook(begins) and None)
    for i in range(STEPS):
        batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(i))
        for net, rows in ((twin, batch), (alone, toy.my_share(batch, rank, size))):
            net.zero_grad()
            (100 * net(rows).square().mean()).backward()
        model.zero_grad()
        loss = 100 * model(toy.my_share(batch, rank, size)).square().mean()
        before, moved, forgotten = count(), payload(), recorder.not_waited()
        _at["in"] = "backward"
        loss.backward()
        seen["begun"] += count() - before
        _at.update({"in": "finish", "open": recorder.not_waited() > forgotten})
        finish()
        seen["not waited"] = max(seen["not waited"], recorder.not_waited() - forgotten)
        seen["left"] += not recorder.calm()
        seen["calls"] = count() - before
        seen["share"] = (seen["early"] - moved) / max(1, payload() - moved)
        recorder.finish()
        if seen["off"] is None:
            seen["off"], seen["step"] = _off(model, twin, alone, size), i
    return seen


def _off(model, twin, alone, size: int) -> str | None:
    """How the gradients differ from the twin's: None if they do not."""
    near = lambda a, scale, b: torch.allclose(a.grad, scale * b.grad, atol=1e-6, rtol=1e-3)
    same = lambda scale, other: all(
        a.grad is not None and near(a, scale, b) for a, b in zip(model.parameters(), other.parameters())
    )
    if same(1, twin):
        return None
    if same(size, twin):
        return "sum"
    if same(1 / size, twin):
        return "twice"
    if same(1, alone) or same(1 / size, alone):
        return "own"
    some_own = any(
        near(a, 1, b) or near(a, 1 / size, b) for a, b in zip(model.parameters(), alone.parameters())
    )
    return (
        "some own" if some_own else f"{(model[0].weight.grad.norm() / twin[0].weight.grad.norm()).item():.2f}"
    )


def _named_crash(error: RankError, at: dict) -> Answer | None:
    """at: what a rank that raised was in (see `_at`)."""
    messages = " ".join(s.error.message for s in error.seen if s.error and not s.error.aborted)
    if "has no attribute 'wait'" in messages and at["in"] == "finish" and at["open"]:
        return wrong(
            "the work is not kept",
            "The hooks began their all-reduces, and finish() has None in place of what all_reduce returned. A"
            " name that a hook assigns is the hook's own, and gone when it returns. Append to a list that is"
            " made outside.",
        )
    if "has no attribute 'wait'" in messages:
        return wrong(
            "waiting inside the hook",
            "Without async_op=True, all_reduce waits for its own end and returns None: there is"
            " nothing left to wait for, and nothing overlapped.",
        )
    if "for /=: 'NoneType'" in messages:
        return wrong(
            "no finish() returned",
            "finish ran before there was a gradient to divide. Return the function itself, without"
            " brackets behind its name.",
        )
    if "takes 0 positional arguments but 1 was given" in messages:
        return Answer(
            "crashed",
            "PyTorch calls your hook f as f(p), with the parameter whose gradient is ready. So f needs one"
            f" argument, p.\n\n{error.report}",
            "a hook that takes no parameter",
        )
    if "NoneType" in messages and "tensor" in messages.lower() and at["in"] == "overlap":
        return wrong(
            "an all-reduce before backward",
            "overlap() itself calls all_reduce. It runs once, before the first backward, when p.grad is not"
            " there yet. Only the hook may call it. Give register_post_accumulate_grad_hook the hook itself,"
            " without brackets behind its name.",
        )
    if "NoneType" in messages and "tensor" in messages.lower():
        return wrong(
            "a hook that comes too early",
            "When your hook runs, p.grad is not there yet. register_post_accumulate_grad_hook calls"
            " it after the gradient has been put into p.grad.",
        )
    return None


def judge(attempt) -> Answer:
    with World(4, timeout=8, fabric=NETWORK) as world:
        try:
            results = world.run(_on_rank, attempt)
        except RankError as e:
            if named := _named_crash(e, world.run(_told)[e.ranks[0]] if e.state_kept and e.ranks else _at):
                return named
            raise
        traffic = world.traffic
    first = results[0]
    if first["finish"] is not None:
        return wrong(
            "no finish() returned",
            f"You return {first['finish']}; return a function, finish, without brackets behind its name.",
        )
    off, step = next(((r["off"], r["step"]) for r in results if r["off"]), (None, 0))
    if first["begun"] == 0 and first["calls"] == 0:
        return wrong(
            "gradients never exchanged",
            "No all-reduce was called. Is the hook registered on every parameter?",
        )
    if off == "twice" and step == 0:
        return wrong(
            "averaging twice",
            "The gradients are the mean divided by the number of ranks once more. Divide in one place only.",
        )
    if off == "sum":
        return wrong(
            "the sum, not the mean", "all_reduce adds. Divide by world_size, once, after you have waited."
        )
    if any(r["left"] for r in results):
        return wrong(
            "never waiting before the step",
            "After finish() an all-reduce was still under way. Here the gradients"
            f" {'came out wrong' if off else 'came out right, by luck'}: an optimizer that steps now may use"
            " unfinished sums.",
        )
    if off == "own":
        return wrong(
            "a sum that never comes back",
            "The gradients are this rank's own: what was reduced is not what lies in p.grad.",
        )
    if off == "some own":
        return wrong(
            "some gradients never exchanged",
            "Some gradients are still this rank's own. Is the hook on every parameter? Does it use the p that"
            " it is given? (A lambda made in a loop sees the last p of the loop.) Does it sum p.grad itself,"
            " and no other tensor?",
        )
    if off and step > 0:
        return wrong(
            "work of earlier steps still in the list",
            f"The first step's gradients are the twin's, those of step {step + 1} are not. Empty your list at"
            " the end of finish().",
        )
    if off:
        return wrong(
            "other gradients than the twin's",
            f"The gradients differ from the twin's (length {off} times the twin's). Does anything change"
            " p.grad while it is being summed?",
        )
    bytes_ = 4 * LAYERS * WIDTH**2
    share = min(r["share"] for r in results)
    figures = [
        (
            "share of the gradients on their way before the first layer's backward",
            f"{share:.2f}",
            "at least 0.50",
        )
    ]
    # A hook that does not wait leaves its all-reduce under way: in one of all layers, steps and ranks
    # that is seen, however busy the machine is.
    if share >= 0.5 and not any(r["beside"] for r in results):
        return wrong(
            "waiting inside the hook",
            "Whenever the backward of a layer began, every all-reduce begun before it had ended already. A"
            " hook that waits for its own all-reduce makes backward stand still, and nothing overlaps. Start"
            " it with async_op=True, keep what it returns, and wait in finish().",
        )
    if first["begun"] == 0:
        return wrong(
            "all sent after backward",
            "Right gradients, but nothing was sent while backward ran: the hook itself must start the"
            " all-reduce.",
            *figures,
        )
    if max(traffic.payload) > 1.05 * STEPS * bytes_:
        return wrong(
            "more bytes than needed",
            f"The all-reduces were about {max(traffic.payload) / STEPS / 1e6:.2f} MB a step; the gradients"
            f" are {bytes_ / 1e6:.2f} MB.",
            *figures,
        )
    if share < 0.5:
        return wrong(
            "most of it after backward",
            "Right, but most gradients are sent when backward is nearly over. Start each all-reduce as soon"
            " as its gradient is there.",
            *figures,
        )
    unwaited = max(r["not waited"] for r in results)
    return right(
        "Every gradient is the twin's, and most of the all-reduce ran under backward."
        + (
            f" But nobody called wait() for {unwaited} of {LAYERS} all-reduces. They had ended here; nothing"
            " promises that they end in order. Wait for each."
            if unwaited
            else ""
        ),
        *figures,
    )


overlapped = Exercise(
    "overlap the gradients",
    overlap,
    judge,
    minutes=8,
    hints=[
        (
            "p.register_post_accumulate_grad_hook(f) calls f(p) as soon as backward has put the gradient into"
            " p.grad."
        ),
        (
            "dist.all_reduce(p.grad, async_op=True) returns at once. What it returns has wait(); keep it,"
            " with p, in a list."
        ),
        "finish() goes through the list: wait, then p.grad /= world_size. Empty the list for the next step.",
    ],
)
