"""Drop 05: when data parallelism sends, and how to hide it under backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers import toy
from helpers.emulate import networks
from helpers.practice.engine import OnRanks
from helpers.practice.exercise import names_in
from helpers.practice.runs import Run
from helpers.ranks import current
from helpers.ranks.current import span
from helpers.ranks.memory import saved_activations
from helpers.ranks.world import World
from three_axes.count.clock import Span, Timeline, shortest
from three_axes.count.traffic import Traffic
from three_axes.table import Table, human

# Emulated: four machines with one rank each, on 100 Mb/s Ethernet. Compute is emulated too, 20 and 40 ms a
# block.
NETWORK = networks.ETHERNET
FORWARD, BACKWARD = 0.020, 0.040
BUCKET = 100_000

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
        # The list is of one step.
        under_way.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(start)
    return finish


STEPS, LAYERS, WIDTH, PAUSE = 3, 6, 192, 0.030  # few parameters: each can have an all-reduce of its own
FUNCTION = "a function"


def _train(attempt: Callable, facts: dict) -> None:
    """Run a few steps. Note what the gradients were after each, and what was under way when.

    When means before which layer's backward: an order of events, which no busy machine changes.
    """
    rank, n, recorder = dist.get_rank(), dist.get_world_size(), current.rank.recorder
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = deepcopy(plain)
    sent = lambda: sum(row.payload for row in recorder.rows.values())
    loss_of = lambda net, rows: 100 * net(rows).square().mean()
    gradients = lambda rows: torch.autograd.grad(loss_of(plain, rows), list(plain.parameters()))
    # beside: whether an all-reduce was under way when a layer's backward began
    facts |= {"off": "", "left": False, "unwaited": 0, "beside": False}

    def begins(dy):
        # The layer whose backward begins last is the first one: `early` keeps what it was then.
        facts.update(early=sent(), beside=facts["beside"] or not recorder.calm())

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
        before, forgotten = sent(), recorder.not_waited()
        loss.backward()
        finish()
        facts["unwaited"] = max(facts["unwaited"], recorder.not_waited() - forgotten)
        facts["left"] |= not recorder.calm()
        facts["share"] = (facts["early"] - before) / max(1, sent() - before)
        facts["late"] = facts.get("late", False) or bool(step and not before and sent())
        recorder.finish()
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        facts["off"] = facts["off"] or _off(step, mine, gradients(batch), gradients(share), n)


def _off(step: int, mine: Sequence, whole: Sequence, own: Sequence, n: int) -> str | tuple[str, str]:
    """The mistake in the gradients after a step; "" where they are the twin's, `whole`. own: of this rank."""
    near = lambda scale, others: [
        torch.allclose(a, scale * b, atol=1e-6, rtol=1e-3) for a, b in zip(mine, others)
    ]
    if all(near(1, whole)):
        return ""
    if all(near(n, whole)):
        return "the sum, not the mean"
    if any(near(1, own)) or any(near(1 / n, own)):
        return "gradients never exchanged"
    if step > 0:
        return "work of earlier steps still in the list"
    if all(near(1 / n, whole)):
        return "averaging twice"
    times = float(mine[0].norm() / whole[0].norm())
    said = f"The gradients are {times:.2f} times as long as the twin's." * (abs(times - 1) > 0.005)
    return "other gradients than the twin's", said


def _share(run: Run) -> float:
    """Share of the gradients on their way before the first layer's backward, on the rank with the least."""
    return min(facts["share"] for facts in run.ranks)


def _found(run: Run, _) -> str | tuple[str, str] | None:
    """What is wrong on any rank with the gradients, or with when they were sent."""
    if any(facts["left"] for facts in run.ranks):
        return "an all-reduce that nobody waits for", "After finish() an all-reduce was still under way."
    if any(facts["late"] for facts in run.ranks):
        return "hooks that come after backward"
    if off := next((facts["off"] for facts in run.ranks if facts["off"]), None):
        return off
    if _share(run) < 0.5:
        return "most of it after backward"
    if not any(facts["beside"] for facts in run.ranks):
        return "waiting inside the hook", "Each all-reduce had ended before the next layer's backward began."
    unwaited = max(facts["unwaited"] for facts in run.ranks)
    if unwaited and "is_completed" not in names_in(run.attempt):
        said = f"Nobody called wait() for {unwaited} of {2 * LAYERS} all-reduces. This time they had ended."
        return "an all-reduce that nobody waits for", said
    return None


def _figures(run: Run, _) -> list[tuple[str, str, str]]:
    what = "share of the gradients on their way before the first layer's backward"
    return [(what, f"{_share(run):.2f}", "at least 0.50")]


overlapped = OnRanks(
    "overlap the gradients",
    overlap,
    minutes=8,
    hints=[
        "p.register_post_accumulate_grad_hook(f) calls f(p) as soon as backward has put the gradient into"
        " p.grad.",
        "dist.all_reduce(p.grad, async_op=True) returns at once. What it returns has wait(); keep it, with p,"
        " in a list.",
        "finish() goes through the list: wait, then p.grad /= world_size. Empty the list for the next step.",
    ],
    tries=((4,),),
    watch=_train,
    reads=(FUNCTION,).index,
    compares=False,
    must_wait=False,
    world={"fabric": NETWORK},
    praise="Every gradient is the twin's, and most of the all-reduce ran under backward.",
    figures=_figures,
    finds=_found,
    mistakes="""
        nothing to wait for
            all_reduce returns what can be waited for with async_op=True only. A name that a hook assigns is
            gone when the hook returns: append what all_reduce returns to a list that is made outside.
            ! has no attribute 'wait'
        a hook that takes no parameter
            PyTorch calls your hook f as f(p), with the parameter whose gradient is ready.
            ! takes 0 positional arguments but 1 was given
        a hook that returns something
            What a tensor's hook returns takes the place of its gradient. Keep the work in a list, and return
            nothing.
            ! expected Variable|hooks should return None
        no finish() returned
            Return the function finish itself, without brackets behind its name.
            ! for /=: 'NoneType'
            ~ form
        an all-reduce that comes too early
            p.grad is not there yet. overlap() itself runs before the first backward: register the hook
            itself, without brackets behind its name. register_post_accumulate_grad_hook calls it after the
            gradient has been put into p.grad.
            ! (?s)torch.Tensor.*NoneType
        gradients never exchanged
            Some gradients are still this rank's own. Is the hook on every parameter? Does it sum p.grad
            itself, of the p that it is given? (A lambda made in a loop sees the last p of the loop. A hook by
            register_hook comes before p.grad is there.)
        averaging twice
            The gradients are the mean, divided by the number of ranks once more. Divide in one place only.
        the sum, not the mean
            all_reduce adds. Divide by world_size, once, after you have waited.
        hooks that come after backward
            In the first step nothing was sent. finish() is called after backward, and a hook that it
            registers is too late by one step. Register the hooks in overlap() itself.
        an all-reduce that nobody waits for
            An optimizer that steps then may use unfinished sums. Nothing promises that all-reduces end in
            order, or in time: call wait() on each, in finish().
        work of earlier steps still in the list
            The first step's gradients are the twin's, later ones are not. Empty your list in finish().
        other gradients than the twin's
            Does anything change p.grad while it is being summed?
        waiting inside the hook
            A hook that waits for its own all-reduce makes backward stand still, and nothing overlaps. Start
            it with async_op=True, keep what it returns, and wait in finish().
        more bytes than needed
            Right gradients, but more was reduced than the gradients.
            $ bytes
        most of it after backward
            Right gradients. The hook itself must start each all-reduce, as soon as its gradient is there.
    """,
)


# -- what the cells show --------------------------------------------------------------------------


def forward(world: World) -> Table:
    """What each layer of one forward pass gives, how much is kept for backward by then, and what was sent.

    Every rank takes its share of 16 sequences of 16 tokens. The loss is shown for each.
    """

    def follow():
        model = toy.ToyTransformer(hidden=64)
        rank, size = dist.get_rank(), dist.get_world_size()
        x, targets = (toy.my_share(t, rank, size) for t in toy.make_batch(16, 16))
        lines = []

        def note(name: str, has: str) -> None:
            sent = sum(row.payload for row in current.counted_so_far())
            lines.append([name, has, human(held.now), human(sent)])

        with saved_activations(model) as held:
            note("tokens", " × ".join(map(str, x.shape)))
            for name, layer in zip(("embedding", *(f"block {k}" for k in range(4)), "head"), model):
                x = layer(x)
                note(name, " × ".join(map(str, x.shape)))
            loss = toy.loss_of(x, targets)
            note("loss", f"{loss.item():.2f}")
        return lines

    ranks = world.run(follow)
    *rows, (loss, _, *more) = ranks[0]
    losses = " | ".join(lines[-1][1] for lines in ranks)
    columns = ["after", "a rank has", "kept for backward", "sent so far"]
    title = f"one forward on {len(ranks)} ranks, {16 // len(ranks)} sequences each"
    return Table(columns, [*rows, [loss, losses, *more]], title=title)


def paced_model() -> toy.ToyTransformer:
    """The toy with hidden 64, whose blocks take as long as if each rank had a device of its own."""
    model = toy.ToyTransformer(hidden=64)
    for block in model.blocks:
        toy.pace(block, FORWARD, BACKWARD)
    return model


def trace(world: World, how: str) -> tuple[Timeline, Traffic]:
    """A data-parallel step on the clock, and its bytes: the shortest of a few.

    how: 'alone' (nothing is sent), 'after' backward, in 'buckets' under it, or PyTorch's 'DDP'.
    """

    def steps():
        model, average = paced_model(), lambda: None
        if how == "after":
            average = partial(toy.average_gradients, model)
        elif how == "buckets":
            average = toy.overlap_gradients(model, BUCKET)
        elif how == "DDP":
            model = DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)
        optimizer = torch.optim.AdamW(model.parameters())
        rank, size = dist.get_rank(), dist.get_world_size()
        for i in range(3):  # DDP makes its buckets after the first step
            tokens, targets = (toy.my_share(t, rank, size) for t in toy.make_batch(16, 16, seed=i))
            current.count_from_here()  # the last step only
            dist.barrier()
            with span("F"):
                loss = toy.loss_of(model(tokens), targets)
            with span("B"):
                loss.backward()
            average()
            with span("step"):
                optimizer.step()
                optimizer.zero_grad()

    def once():
        world.run(steps)
        line = world.timeline
        line.streams = [[_as_lane(s) for s in row] for row in line.streams]
        # The barrier before the step is none of it.
        line.rows = [[s for s in row if not s.label.startswith("barrier")] for row in line.rows]
        return line, world.traffic

    return shortest(once, lambda pair: pair[0].makespan)


def _as_lane(sent: Span) -> Span:
    """An all-reduce as what a timeline draws in the network's lane, under what the rank computes."""
    return sent._replace(kind="reduce") if sent.label.startswith("all_reduce") else sent


def ready_last() -> float:
    """The share of the gradients that are there only when backward ends: block 0's and the embedding's."""
    model = paced_model()
    size = lambda part: sum(p.numel() for p in part.parameters())
    return (size(model) - sum(map(size, model.blocks[1:])) - size(model[-1])) / size(model)


def exposed(timeline: Timeline, alone: Timeline) -> float:
    """Seconds by which communication makes a step longer than the same step without."""
    return timeline.makespan - alone.makespan


def begun_in_backward(timeline: Timeline) -> str:
    """How many of a rank's all-reduces began before its backward had ended, of all of them: "7 of 7".

    It is an order of events on one rank, so a busy machine does not change it. Of the ranks, the fewest.
    """
    counts = []
    for row, stream in zip(timeline.rows, timeline.streams):
        ends = max(s.end for s in row if s.kind == "B")
        begins = [s.start for s in stream if s.label.startswith("all_reduce")]
        counts.append((sum(at < ends for at in begins), len(begins)))
    early, of = min(counts)
    return f"{early} of {of}"
