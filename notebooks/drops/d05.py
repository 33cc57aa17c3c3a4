"""Drop 05: when data parallelism sends, and how to hide it under backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from helpers import toy
from helpers.emulate import networks
from helpers.practice.engine import OnRanks
from helpers.practice.exercise import Answer, right
from helpers.practice.runs import Run
from helpers.ranks import current
from helpers.ranks.current import span
from helpers.ranks.memory import saved_activations
from helpers.ranks.world import World
from three_axes.count.clock import Timeline, shortest
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
        under_way.append((dist.all_reduce(p.grad, async_op=True), p))

    def finish():
        for work, p in under_way:
            work.wait()
            p.grad /= world_size
        under_way.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(start)
    return finish


STEPS, LAYERS, WIDTH, PAUSE = 3, 6, 192, 0.030  # few parameters: each can have an all-reduce of its own
NO_GRADIENT = "(?s)torch.Tensor.*NoneType"


def _train(attempt: Callable, facts: dict) -> None:
    """Run a few steps. Note what the gradients were after each, and what was begun and under way when.

    When means before which layer's backward: an order of events, which no busy machine changes.
    """
    rank, n, recorder = dist.get_rank(), dist.get_world_size(), current.rank.recorder
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    model = deepcopy(plain)
    count = lambda what: sum(getattr(row, what) for row in recorder.rows.values())
    loss_of = lambda net, rows: 100 * net(rows).square().mean()
    gradients = lambda rows: torch.autograd.grad(loss_of(plain, rows), list(plain.parameters()))
    facts |= {"values": [], "in": "overlap", "begun": 0, "calls": 0, "off": "", "left": False, "unwaited": 0}
    facts |= {"beside": False}  # whether an all-reduce was under way when a layer's backward began

    def begins(dy):
        # The layer whose backward begins last is the first one: `early` keeps what it was then.
        facts.update(early=count("payload"), beside=facts["beside"] or not recorder.calm())

    for layer in model:
        toy.pace(layer, 0.0, PAUSE)
    finish = attempt(model, n)
    facts["returned"] = "" if callable(finish) else f"You return {finish!r:.60}."
    if facts["returned"]:
        return
    for layer in model:
        layer.register_forward_hook(lambda _, args, y: y.register_hook(begins) and None)
    for step in range(STEPS):
        batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        share = toy.my_share(batch, rank, n)
        model.zero_grad()
        loss = loss_of(model, share)
        calls, sent, forgotten = count("calls"), count("payload"), recorder.not_waited()
        facts["in"] = "backward"
        loss.backward()
        facts["begun"] += count("calls") - calls
        facts["in"] = "finish, open" if recorder.not_waited() > forgotten else "finish"
        finish()
        facts["unwaited"] = max(facts["unwaited"], recorder.not_waited() - forgotten)
        facts["left"] |= not recorder.calm()
        facts["calls"] = count("calls") - calls
        facts["share"] = (facts["early"] - sent) / max(1, count("payload") - sent)
        recorder.finish()
        mine = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        facts["off"] = facts["off"] or _off(step, mine, gradients(batch), gradients(share), n)


def _off(step: int, mine: Sequence, whole: Sequence, own: Sequence, n: int) -> str:
    """What gradients are after a step; "" where they are the twin's, `whole`. own: of this rank alone."""
    near = lambda scale, others: [
        torch.allclose(a, scale * b, atol=1e-6, rtol=1e-3) for a, b in zip(mine, others)
    ]
    if all(near(1, whole)):
        return ""
    if all(near(n, whole)):
        return "the sum"
    if any(kept := [a or b for a, b in zip(near(1, own), near(1 / n, own))]):
        return "own" if all(kept) else "some own"
    if step > 0:
        return "earlier"
    return "twice" if all(near(1 / n, whole)) else f"{float(mine[0].norm() / whole[0].norm()):.2f}"


def _rank(holds: Callable[[dict], object]) -> Callable[[Run, Run], object]:
    """Shows whether holds(facts) of any rank, after no crash."""
    return lambda run, _: not run.error and next(filter(None, map(holds, run.ranks)), False)


def _raised(run: Run, place: str, pattern: str) -> bool:
    """Whether a rank that was in `place` raised such an error."""
    known = run.ranks[run.error.ranks[0]] if run.error and run.error.ranks else {}
    return known.get("in") == place and any(re.search(pattern, error) for error in run.errors)


def _stands_still(run: Run, _) -> str:
    """Shows that nothing was ever under way when a layer's backward began, though most was sent by then."""
    still = not run.error and all(facts["share"] >= 0.5 and not facts["beside"] for facts in run.ranks)
    return "Each all-reduce had ended before the next layer's backward began." if still else ""


def _figures(run: Run, _) -> list[tuple[str, str, str]]:
    if any(facts["returned"] for facts in run.ranks):
        return []
    what = "share of the gradients on their way before the first layer's backward"
    return [(what, f"{min(facts['share'] for facts in run.ranks):.2f}", "at least 0.50")]


def _praise(run: Run) -> Answer:
    text = "Every gradient is the twin's, and most of the all-reduce ran under backward."
    if unwaited := max(facts["unwaited"] for facts in run.ranks):
        text += (
            f" But nobody called wait() for {unwaited} of {LAYERS} all-reduces. They had ended here; nothing"
            " promises that they end in order. Wait for each."
        )
    return right(text, *_figures(run, run))


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
    compares=False,
    must_wait=False,
    world={"timeout": 8, "fabric": NETWORK},
    praise=_praise,
    figures=_figures,
    shows={
        "the work is not kept": lambda run, _: _raised(run, "finish, open", "has no attribute 'wait'"),
        "an all-reduce before backward": lambda run, _: _raised(run, "overlap", NO_GRADIENT),
        "no finish() returned": _rank(lambda f: f["returned"]),
        "gradients never exchanged": _rank(lambda f: f["begun"] == f["calls"] == 0),
        "averaging twice": _rank(lambda f: f["off"] == "twice"),
        "the sum, not the mean": _rank(lambda f: f["off"] == "the sum"),
        "never waiting before the step": _rank(lambda f: f["left"]),
        "a sum that never comes back": _rank(lambda f: f["off"] == "own"),
        "some gradients never exchanged": _rank(lambda f: f["off"] == "some own"),
        "work of earlier steps still in the list": _rank(lambda f: f["off"] == "earlier"),
        "other gradients than the twin's": _rank(
            lambda f: f["off"] and f"The gradients are {f['off']} times as long as the twin's."
        ),
        "waiting inside the hook": _stands_still,
        "all sent after backward": _rank(lambda f: f["begun"] == 0),
        "most of it after backward": _rank(lambda f: f["share"] < 0.5),
    },
    mistakes=f"""
        the work is not kept
            The hooks began their all-reduces, and finish() has None in place of what all_reduce returned. A
            name that a hook assigns is gone when it returns. Append to a list that is made outside.
        a hook that takes no parameter
            PyTorch calls your hook f as f(p), with the parameter whose gradient is ready.
            ! takes 0 positional arguments but 1 was given
        no finish() returned
            Return the function finish itself, without brackets behind its name.
            ! for /=: 'NoneType'
        an all-reduce before backward
            overlap() itself calls all_reduce. It runs once, before the first backward, when p.grad is not
            there yet. Only the hook may call it. Register the hook itself, without brackets behind its
            name.
        a hook that comes too early
            When your hook runs, p.grad is not there yet. register_post_accumulate_grad_hook calls it after
            the gradient has been put into p.grad.
            ! {NO_GRADIENT}
        gradients never exchanged
            No all-reduce was called. Is the hook registered on every parameter?
        averaging twice
            The gradients are the mean, divided by the number of ranks once more. Divide in one place only.
        the sum, not the mean
            all_reduce adds. Divide by world_size, once, after you have waited.
        never waiting before the step
            After finish() an all-reduce was still under way. An optimizer that steps now may use unfinished
            sums, even where the gradients come out right.
        a sum that never comes back
            The gradients are this rank's own: what was reduced is not what lies in p.grad.
        some gradients never exchanged
            Some gradients are still this rank's own. Is the hook on every parameter? Does it use the p that
            it is given? (A lambda made in a loop sees the last p of the loop.) Does it sum p.grad itself,
            and no other tensor?
        work of earlier steps still in the list
            The first step's gradients are the twin's, later ones are not. Empty your list at the end of
            finish().
        other gradients than the twin's
            Does anything change p.grad while it is being summed?
        waiting inside the hook
            A hook that waits for its own all-reduce makes backward stand still, and nothing overlaps.
            Without async_op=True, all_reduce waits, and returns None. Start it with async_op=True, keep
            what it returns, and wait in finish().
            ! has no attribute 'wait'
        all sent after backward
            Right gradients, but nothing was sent while backward ran. The hook itself must start the
            all-reduce.
        more bytes than needed
            Right gradients, but more was reduced than the gradients.
            $ bytes
        most of it after backward
            Right, but most gradients are sent when backward is nearly over. Start each all-reduce as soon
            as its gradient is there.
    """,
)


# -- what the cells show --------------------------------------------------------------------------

NAMES = ("embedding", "block 0", "block 1", "block 2", "block 3", "head")


def _follow() -> list[tuple[str, str, int, int]]:
    model = toy.ToyTransformer(hidden=64, seed=0)
    rank, size = dist.get_rank(), dist.get_world_size()
    x, targets = (toy.my_share(t, rank, size) for t in toy.make_batch(16, 16))
    current.count_from_here()
    sent = lambda: int(sum(row.payload for row in current.counted_so_far()))
    lines = [("tokens", " × ".join(map(str, x.shape)), 0, sent())]
    with saved_activations(model) as held:
        for name, layer in zip(NAMES, model):
            x = layer(x)
            lines.append((name, " × ".join(map(str, x.shape)), held.now, sent()))
        loss = toy.loss_of(x, targets)
        lines.append(("loss", f"{loss.item():.2f}", held.now, sent()))
    return lines


def forward(world: World) -> Table:
    """What each layer of one forward pass gives, how much is kept for backward by then, and what was sent.

    Every rank takes its share of 16 sequences of 16 tokens. Ranks must agree on all but the loss, which is
    shown for each.
    """
    ranks = world.run(_follow)
    if any(lines[:-1] != ranks[0][:-1] for lines in ranks):
        raise RuntimeError(
            "the ranks' forward passes differ in shape, in what they keep or in what they send"
        )
    losses = " | ".join(lines[-1][1] for lines in ranks)
    rows = [*ranks[0][:-1], ("loss", losses, *ranks[0][-1][2:])]
    return Table(
        ["after", "a rank has", "kept for backward", "sent so far"],
        [[name, has, human(kept), human(sent)] for name, has, kept, sent in rows],
        title=f"one forward on {len(ranks)} ranks, {16 // len(ranks)} sequences each",
    )


def paced_model() -> toy.ToyTransformer:
    """The toy with hidden 64, whose blocks take as long as if each rank had a device of its own."""
    model = toy.ToyTransformer(hidden=64, seed=0)
    for block in model.blocks:
        toy.pace(block, FORWARD, BACKWARD)
    return model


def step(model, average, optimizer, batch) -> None:
    """One step with its parts on the clock. average(): what is left to do after backward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, targets = (toy.my_share(t, rank, size) for t in batch)
    with span("F"):
        loss = toy.loss_of(model(tokens), targets)
    with span("B"):
        loss.backward()
    average()
    with span("step"):
        optimizer.step()
        optimizer.zero_grad()


def _trace(how: str) -> None:
    model = paced_model()
    average = lambda: None
    if how == "after":
        average = lambda plain=model: toy.average_gradients(plain)
    elif how == "buckets":
        average = toy.overlap_gradients(model, BUCKET)
    elif how == "DDP":
        model = DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(3):  # DDP makes its buckets after the first step
        current.count_from_here()  # the last step only
        dist.barrier()
        step(model, average, optimizer, toy.make_batch(16, 16, seed=i))


def trace(world: World, how: str) -> tuple[Timeline, Traffic]:
    """A data-parallel step on the clock, and its bytes: the shortest of a few.

    how: 'alone' (nothing is sent), 'after' backward, in 'buckets' under it, or PyTorch's 'DDP'.
    """

    def once():
        world.run(_trace, how)
        return world.timeline, world.traffic

    return shortest(once, lambda pair: pair[0].makespan)


def exposed(timeline: Timeline, alone: Timeline) -> float:
    """Seconds by which communication makes a step longer than the same step without."""
    return timeline.makespan - alone.makespan
