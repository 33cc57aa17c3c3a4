"""Drop 07: schedules on paper and on real ranks, and an order of the reader's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from drops.d04 import step_by, timed_step
from helpers import toy
from helpers.practice import diagnose
from helpers.practice.engine import Asked
from helpers.practice.exercise import Answer, right
from helpers.practice.runs import Run, number
from helpers.ranks import current, memory
from helpers.ranks.world import World
from three_axes.count import clock
from three_axes.count.clock import Timeline
from three_axes.count.traffic import Traffic
from three_axes.paper import schedules, simulation
from three_axes.paper.schedules import Schedule
from three_axes.paper.simulation import Times, simulate

# -- practice: the order of 1F1B ------------------------------------------------------------------


def order(rank, p, m):
    """What pipeline rank `rank` of p runs for m microbatches under 1F1B: a list such as ["F0", "F1", "B0",
    ...].
    """
    # The first gradient comes when a microbatch has been at the last stage: p − 1 − rank forwards fit
    # before it, and one more begins the pairs.
    warmup = min(m, p - 1 - rank)
    ops = [f"F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        ops += [f"F{warmup + i}", f"B{i}"]
    return ops + [f"B{i}" for i in range(m - warmup, m)]


P, M = 4, 8
SIZES = ((P, M), (P, 2), (8, 32))


def _orders(run: Run) -> list[list[list[str]]]:
    """What all ranks run, for each of SIZES."""
    rest = iter(run.values)
    return [[next(rest) for _ in range(p)] for p, _ in SIZES]


def _first(run: Run) -> tuple[str, str, simulation.Timeline | None]:
    """Of the first order that is illegal, or longer or fuller than 1F1B: the mistake, what shows it, and the
    run on paper of a legal one. ('', '', None) where there is none.
    """
    each = (_judged(orders, m) for orders, (_, m) in zip(_orders(run), SIZES))
    return next((one for one in each if one[0]), ("", "", None))


def _judged(orders: list[list[str]], m: int) -> tuple[str, str, simulation.Timeline | None]:
    p = len(orders)
    listed = [ops if isinstance(ops, (list, tuple)) else () for ops in orders]
    leading = [len(list(takewhile(lambda op: str(op).startswith("F"), ops))) for ops in listed]
    try:
        line = diagnose.run(diagnose.read(orders, m))
    except diagnose.Illegal as e:
        text = f"With p = {p}, m = {m}: {str(e).rstrip('.')}."
        if leading == sorted(leading) and leading[0] < leading[-1]:
            return "the warm-up the wrong way round", f"Your later ranks warm up longer. {text}", None
        return e.misconception, text, None
    best, name = simulate(schedules.one_f_one_b(p, m)), line.schedule.name
    if any(op[0] in "IW" for ops in orders for op in ops):
        return "a backward in two parts", f"This is {name}.", line
    if name.startswith("GPipe"):
        return "GPipe instead of 1F1B", f"This is {name}.", line
    for r in range(p):
        if (held := line.in_flight(r)) > best.in_flight(r):
            does = f"Rank {r} runs {leading[r]} forwards before its first backward, and holds {held}"
            enough = f"A warm-up of {min(m, p - 1 - r)}, and one more forward, is enough."
            return "a warm-up that is too long", f"{does} microbatches at once. {enough}", line
    if line.makespan <= best.makespan:
        return "", "", line
    backwards = [[int(op[1:]) for op in ops if op.startswith("B")] for ops in orders]
    for rank, done in enumerate(backwards):
        if done != sorted(done):
            order = ", ".join(f"B{i}" for i in done)
            return "backwards out of order", f"Rank {rank} of {p} goes backward by {order}.", line
    short = any(leading[r] < min(m, p - r) for r in range(p))
    text = f"A legal order, but it takes {line.makespan:.0f} units where {best.makespan:.0f} are enough."
    theirs = diagnose.idle(best)
    for rank, a, b, why in diagnose.idle(line):
        if not any(rank == r and since <= a and b <= until for r, since, until, _ in theirs):
            text += f" An idle time that 1F1B does not have: rank {rank}, from {a:.0f} to {b:.0f}: {why}."
            break
    return "a warm-up that is too short" if short else "longer than need be", text, line


def _on_paper(line: simulation.Timeline | None) -> list[tuple[str, str, str]]:
    """Time and microbatches in flight of an order, beside 1F1B's."""
    if not line:
        return []
    p, m = line.schedule.p, line.schedule.m
    both = line, simulate(schedules.one_f_one_b(p, m))
    return [
        (f"time for p = {p}, m = {m}, backward = 2 × forward", *(f"{x.makespan:.0f} units" for x in both)),
        ("microbatches in flight, by rank", *(str([x.in_flight(r) for r in range(p)]) for x in both)),
    ]


def _drawn(run: Run, _):
    from helpers.draw import gantt  # ranks import this module, and need no matplotlib

    line = _first(run)[2]
    small = line and line.schedule.p * line.schedule.m <= 64
    return gantt.timeline(line, "yours, on paper, with its critical path", critical=True) if small else None


def _praised(run: Run) -> Answer:
    from helpers.draw import gantt

    small, _, large = _orders(run)
    mine, best = diagnose.read(small, M), schedules.one_f_one_b(P, M)
    with World(P, timeout=5) as world:
        yours, theirs = (on_ranks(world, schedule, 1, 0.008) for schedule in (mine, best))
    paper, equal = simulate(mine), Times(1, 0.5, 0.5)
    name = "This is 1F1B." if mine.name == "1F1B" else "This is not 1F1B to the letter, and as good."
    time, (held, _, fewest) = _on_paper(paper)
    large = diagnose.read(large, 32), schedules.one_f_one_b(8, 32)
    answer = right(
        f"{name} The bubble is GPipe's, {paper.bubble:.2%} of wall time; what shrank is the number of"
        " microbatches in flight. Below: on paper, with the critical path; and on four real ranks.",
        time,
        (held, str([yours.in_flight(r) for r in range(P)]), fewest),
        ("slots for p = 8, m = 32, equal times", *(f"{simulate(x, equal).makespan:.0f}" for x in large)),
    )
    answer.picture = gantt.timeline(
        {"yours, on paper": paper, "yours, on real ranks": yours, "1F1B, on real ranks": theirs},
        critical=True,
    )
    return answer


one_f_one_b = Asked(
    "the order of one stage",
    order,
    minutes=9,
    hints=[
        "Three parts: a warm-up of forwards; then one forward and one backward in turn; then the backwards"
        " that are left.",
        "How long is the warm-up? The last rank can go backward at once: 0. The one before it must wait for"
        " one more: 1. So p - 1 - rank.",
        "After the warm-up, forwards run out first. As many backwards are left as there were warm-up"
        " forwards: the drain.",
    ],
    without=("schedules",),
    cases=[(rank, p, m) for p, m in SIZES for rank in range(p)],
    compares=False,
    praise=_praised,
    figures=lambda run, _: _on_paper(_first(run)[2]),
    picture=_drawn,
    finds=lambda run, _: _first(run)[:2],
    mistakes="""
        nothing returned
            append and extend change a list, and return None.
            ~ form
        no list of operations
        the lists of all ranks
        microbatches counted from 1
        a forward too many
        an operation twice
        a backward before its forward
        a W before its I
        a forward is missing
        a missing drain
        a backward is missing
        a W is missing
        the warm-up the wrong way round
            The first rank waits longest for its first backward: its warm-up is the longest, and the last
            one has none.
        ranks that wait for each other
        a backward in two parts
            Its backward is split in two, I and W. Drop 12 comes to that. Here write B.
        GPipe instead of 1F1B
            It takes as long as 1F1B, since both have the same bubble. But every rank holds all
            microbatches.
        a warm-up that is too long
        backwards out of order
            The oldest microbatch goes backward first: it came first, and all later stages are done with it
            first.
        a warm-up that is too short
        longer than need be
    """,
)

# -- practice: the share of the bubble ------------------------------------------------------------


def bubble(schedule, p, m):
    """The share of wall time in which a rank idles, for "GPipe" or "1F1B", on p equal stages with m
    microbatches.
    """
    # A stage works m forwards and backwards, and waits as long as p − 1 of them take, in both schedules.
    return (p - 1) / (m + p - 1)


MAKE = {"GPipe": schedules.gpipe, "1F1B": schedules.one_f_one_b}
BUBBLES = [(name, p, m) for name in MAKE for p, m in ((4, 8), (8, 32), (2, 1), (1, 4), (3, 5))]


def _off(run: Run, truth: Run) -> list[int]:
    """The cases in which the answer is not the bubble."""
    return [i for i, (mine, right_) in enumerate(zip(run.values, truth.values)) if abs(mine - right_) >= 5e-4]


def _smaller(run: Run, truth: Run) -> str:
    """Shows that 1F1B alone is given another bubble, and a smaller one."""
    if run.error or not (off := _off(run, truth)):
        return ""
    smaller = all(BUBBLES[i][0] == "1F1B" and run.values[i] < truth.values[i] for i in off)
    return f"Measured just now: {_measured()[1]}." if smaller else ""


def _shares(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    return [
        (f"{name}, p = {p}, m = {m}", f"{run.values[i]:.4f}", f"{truth.values[i]:.4f}")
        for i in _off(run, truth)[:1] or (0, 1)
        for name, p, m in [BUBBLES[i]]
    ]


def _measured() -> tuple[str, str, str]:
    """The bubbles of both schedules on four ranks."""
    with World(P, timeout=10) as world:
        bubbles = [on_ranks(world, make(P, M), 1).bubble for make in MAKE.values()]
    return (
        "measured just now on four ranks",
        " and ".join(f"{x:.2f} with {name}" for x, name in zip(bubbles, MAKE)),
        f"both a little over {bubble('GPipe', P, M):.2f}",
    )


share = Asked(
    "the share of the bubble",
    bubble,
    minutes=6,
    hints=[
        "Count one rank's time: m forwards and m backwards. And the whole: the last stage starts p-1 forwards"
        " late. After its last backward p-1 more follow, one on each stage before it.",
        "Count a forward and its backward together as one. Then a stage's work is m, and the whole time"
        " is m + p - 1.",
    ],
    without=("schedules", "simulation", "simulate"),
    cases=BUBBLES,
    reads=number,
    tolerance=5e-4,
    praise=lambda run: right(
        "Both have the same bubble, by formula and on real ranks.", *_shares(run, run), _measured()
    ),
    figures=_shares,
    shows={"1F1B shrinks the bubble": _smaller},
    mistakes="""
        no number
            Return one number for each schedule, p and m.
            ~ form
        percent instead of a share
            The number is right, as percent. Return a share of 1.
            - (p - 1) / => 100 * (p - 1) /
            - (p - 1) / (m + p - 1) => round(100 * (p - 1) / (m + p - 1))
        the busy share
            That is the share in which a rank works. The bubble is the rest.
            - (p - 1) / => m /
        a missing drain
            You count the wait before the first forward of the last stage, but not the drain: after its last
            backward, p-1 more backwards follow, one on each stage before it.
            - (m + p => (3 * m + p
            - (m + p => (2 * m + p
        the other definition of bubble
            You divide by the ideal time: (p-1)/m. Here the bubble is a share of wall time, which has the
            bubble in it.
            - (m + p - 1) => m
        not p - 1 of m + p - 1
            Count a forward and its backward together as one. Then the work is m, the last stage starts
            after p-1 others, and the whole takes m + p-1.
            - (p - 1) / (m + p - 1) => p / (m + p)
            - (p - 1) / => p /
            - (m + p - 1) => (m + p)
            - (m + p - 1) => (m + p + 1)
            - p - 1 => p + 1
            - (p - 1) / (m + p - 1) => 2 * (p - 1) / (m + 2 * (p - 1))
            - (p - 1) / => 2 * (p - 1) /
        rounded
            Return the number as it is.
            - (p - 1) / (m + p - 1) => round((p - 1) / (m + p - 1), 2)
        GPipe counted twice
            Both schedules wait as long: GPipe too fills once and drains once.
            - return (p - 1) / (m => p = 2 * p - 1 if schedule == "GPipe" else p⏎    return (p - 1) / (m
        what is in flight taken for m
            1F1B holds fewer microbatches at a time, but runs all m.
            - return (p - 1) / (m => m = min(m, p) if schedule == "1F1B" else m⏎    return (p - 1) / (m
        brackets left out
            Python divides before it adds: write brackets around the whole numerator and denominator.
            - (m + p - 1) => m + p - 1
            - (p - 1) => p - 1
            - (p - 1) / (m + p - 1) => p - 1 / m + p - 1
        nothing but 0
            A division with // gives whole numbers; / keeps the fraction.
            - / => //
        a share that grows with m
            You return (m-1)/(m+p-1). More microbatches make the bubble smaller.
            - (p - 1) / => (m - 1) /
        the units, not their share
            You return an idle time. The bubble is its share of the whole time, m + p-1.
            - (p - 1) / (m + p - 1) => p - 1
            - (p - 1) / (m + p - 1) => 2 * (p - 1)
            - (p - 1) / (m + p - 1) => 3 * (p - 1)
        1F1B shrinks the bubble
            GPipe was right; to 1F1B you give less. 1F1B begins and ends as GPipe does. It only holds less
            in between.
    """,
)

# -- what the cells show --------------------------------------------------------------------------

UNIT = 0.030  # seconds of a stand-in's forward; its backward takes two of them


def on_ranks(
    world: World, schedule: Schedule, tries: int = clock.TRIES, unit: float = UNIT, work: Sequence[float] = ()
) -> Timeline:
    """A schedule run on real ranks with timed stand-ins for compute; a stage in v chunks takes 1/v of `unit`
    for each.

    work: how many times `unit` each stage takes, if they differ. tries: see `clock.shortest`.
    """

    def run():
        chunks = {
            k: toy.StandIn(*[unit / schedule.v * (work[k] if work else 1)] * 3)
            for k, at in enumerate(schedule.rank_of)
            if at == dist.get_rank()
        }
        with memory.saved_activations(torch.nn.ModuleList(chunks.values())):
            dist.barrier()
            step_by(schedule, chunks, toy.make_batch(schedule.m, 1), around=current.around)

    def once():
        world.run(run)
        return world.timeline

    return clock.shortest(once, lambda t: t.makespan, tries)


def on_paper(schedule: Schedule, unit: float = UNIT) -> simulation.Timeline:
    """The same on paper, in seconds, so that both have one scale."""
    line = simulate(schedule)  # in whole units, which add up without rounding: ties stay ties
    return replace(line, start=unit * line.start, end=unit * line.end, unit="s")


def with_real_compute(world: World, schedule: Schedule) -> Timeline:
    """The toy itself, hidden 256, on this machine's cores."""
    return timed_step(world, schedule, memory.saved_activations)


def bytes_of(world: World, m: int, by: str) -> Traffic:
    """The bytes of one 1F1B step of the toy in m microbatches, by this course's loop ('ours') or by PyTorch's
    ('torch').
    """

    def run():
        rank, p = dist.get_rank(), dist.get_world_size()
        stage, batch = toy.split_depth(toy.ToyTransformer()), toy.make_batch()
        if by == "ours":
            step_by(schedules.one_f_one_b(p, m), {rank: stage}, batch)
            return
        pipe = Schedule1F1B(PipelineStage(stage, rank, p, torch.device("cpu")), m, loss_fn=toy.loss_of)
        last = {"target": batch[1], "losses": []} if rank == p - 1 else {}
        pipe.step(*[batch[0]] * (rank == 0), **last)

    world.run(run)
    return world.traffic
