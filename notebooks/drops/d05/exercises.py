"""Drop 05: when data parallelism sends, and how to hide it under backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
import torch.distributed as dist

from helpers import toy
from helpers.practice import OnRanks, Run, hear, multiple, names_in, needs_more, right
from helpers.ranks import current

from .cells import NETWORK

# -- practice: hide the all-reduce under backward -------------------------------------------------


def overlap(model, world_size):
    """Send gradients while backward runs.

    Register a hook on every parameter that starts the all-reduce of its gradient as soon as it is there.
    Return a function finish(), called after backward and before the optimizer's step: then every p.grad is
    the ranks' mean.
    """
    under_way = []

    def start(p):
        # No wait in here: it would stop backward until the sum is there.
        under_way.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish():
        for work, p in under_way:
            work.wait()
            p.grad /= world_size
        # The next step begins with an empty list.
        under_way.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(start)
    return finish


# The model of the check. It has few parameters, so each can have an all-reduce of its own. PAUSE: seconds for
# which each layer's backward sleeps.
STEPS, LAYERS, WIDTH, PAUSE = 3, 6, 192, 0.030
FUNCTION = "a function"


def _train(attempt: Callable, facts: dict) -> None:
    """Run a few steps. Record the mistake in the gradients after each, and which all-reduces were under way
    before the backward of which layer: an order of events, which no busy machine changes.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = deepcopy(plain)
    sent = lambda: sum(row.payload for row in current.counted_so_far())
    loss_of = lambda net, rows: 100 * net(rows).square().mean()
    gradients = lambda rows: torch.autograd.grad(loss_of(plain, rows), list(plain.parameters()))
    # beside: whether an all-reduce was under way when a layer's backward began
    facts |= {"off": None, "left": False, "unwaited": 0, "beside": False, "held": 0.0}
    forgotten = calls_before = 0
    given: list[tuple[torch.Tensor, int]] = []  # tensors being summed, with their versions before the sum
    hear(lambda call: given.append((call.first, call.first._version)) if call.first is not None else None)

    def begins(dy):
        # The first layer's backward begins last, so `early` and `held` keep the values of that moment.
        facts.update(early=sent(), beside=facts["beside"] or current.open_collectives().under_way)
        begun = len(facts["calls"]) - calls_before
        facts["held"] = 1 - (current.open_collectives().not_waited - forgotten) / max(1, begun)

    finish = attempt(model, n)
    facts["values"] = [FUNCTION if callable(finish) else f"{finish!r:.60}"]
    if not callable(finish):
        return
    for layer in model:
        toy.pace(layer, 0.0, PAUSE)
        layer.register_forward_hook(lambda _, args, y: y.register_hook(begins) and None)
    for step in range(STEPS):
        batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        share = toy.my_share(batch, rank, n)
        model.zero_grad()
        loss = loss_of(model, share)
        before, forgotten, calls_before = sent(), current.open_collectives().not_waited, len(facts["calls"])
        given.clear()
        loss.backward()
        changed = any(tensor._version > written for tensor, written in given)
        finish()
        under_way, not_waited = current.open_collectives()
        facts["unwaited"] = max(facts["unwaited"], not_waited - forgotten)
        facts["left"] |= under_way
        facts["share"] = (facts["early"] - before) / max(1, sent() - before)
        facts["late"] = facts.get("late", False) or bool(step and not before and sent())
        current.finish_collectives()
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        facts["off"] = facts["off"] or _off(step, mine, gradients(batch), gradients(share), n, changed)


def _off(
    step: int, mine: Sequence, whole: Sequence, own: Sequence, n: int, changed: bool
) -> tuple[str, str] | None:
    """(mistake, text) in the gradients after a step; None if they are the twin's, `whole`. own: the gradients
    of this rank alone. changed: whether one was written to between its all-reduce and the end of backward.
    """
    near = lambda scale, others: [
        torch.allclose(a, scale * b, atol=1e-6, rtol=1e-3) for a, b in zip(mine, others)
    ]
    if all(near(1, whole)):
        return None
    if all(near(n, whole)):
        return "the sum, not the mean", ""
    if any(near(1, own)) or any(near(1 / n, own)):
        return "gradients never exchanged", ""
    if changed:
        return "changed while it is summed", ""
    if step > 0:
        return "work of earlier steps still in the list", ""
    if all(near(1 / n, whole)):
        return "averaging twice", ""
    if not any(gradient.any() for gradient in mine):
        return "other gradients than the twin's", "All of them are zero behind finish()."
    times = float(mine[0].norm() / whole[0].norm())
    text = f"The gradients' length is {multiple(times)} the twin's." * (abs(times - 1) > 0.005)
    if text and all(near(times, whole)):
        return "right but for a factor", text
    mean = "A mean is the sum over the ranks, divided by world_size."
    return "other gradients than the twin's", f"{text} {mean}".strip()


def _share(run: Run) -> float:
    """The share of the gradients sent before the first layer's backward, on the rank with the least."""
    return min(facts["share"] for facts in run.ranks)


def _found(run: Run, truth: Run) -> tuple[str, str] | None:
    """The mistake on any rank in the gradients, or in the moment at which they were sent; None if there is
    none.
    """
    if run.error:
        return None
    if any(facts["left"] for facts in run.ranks):
        return "an all-reduce that nobody waits for", "After finish() an all-reduce was still under way."
    if any(facts["late"] for facts in run.ranks):
        return "hooks that come after backward", ""
    if off := next((facts["off"] for facts in run.ranks if facts["off"]), None):
        ways = {how for calls in run.calls for _, how, *_ in calls} - {"sum", ""}
        return ("reduced, not summed", f"You take the {min(ways)} of the ranks' gradients.") if ways else off
    more = needs_more(bytes="more bytes than needed")(run, truth)
    if _share(run) < 0.5:
        return more or ("most of it after backward", "")
    if not any(facts["beside"] for facts in run.ranks):
        return "waiting inside the hook", "Each all-reduce had ended before the next layer's backward began."
    # Where the hook takes an all-reduce's future, nothing says when that is waited for.
    if "get_future" not in names_in(run.attempt) and any(facts["held"] > 0.5 for facts in run.ranks):
        text = "Before the first layer's backward most all-reduces had been waited for, each in a hook."
        return "waiting inside the hook", text
    unwaited = max(facts["unwaited"] for facts in run.ranks)
    if unwaited and "is_completed" not in names_in(run.attempt):
        text = f"Nobody called wait() for {unwaited} of {2 * LAYERS} all-reduces. This time they had ended."
        return "an all-reduce that nobody waits for", text
    return more


def _figure(run: Run) -> tuple[str, str, str]:
    what = "share of the gradients on their way before the first layer's backward"
    return what, f"{_share(run):.2f}", "at least 0.50"


overlapped = OnRanks(
    "overlap the gradients",
    overlap,
    minutes=8,
    hints=[
        "Two moments: when a gradient is there, and when all are needed. What must happen in each? Which"
        " variable do both see?",
        "overlap() itself only makes an empty list and registers one hook for every parameter. The hook adds"
        " to the list.",
        "finish() goes through the list: wait, then p.grad /= world_size. Empty the list for the next step.",
    ],
    tries=((4,),),
    watch=_train,
    reads=(FUNCTION,).index,
    compares=False,
    must_wait=False,
    world={"fabric": NETWORK},
    praise=lambda run: right(
        "Every gradient is the twin's, and most of the all-reduce ran under backward.", _figure(run)
    ),
    figures=lambda run, _: [_figure(run)] if _share(run) < 0.5 else [],
    finds=_found,
)
