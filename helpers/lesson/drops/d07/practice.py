"""Drop 07's practice: the order of 1F1B, and its bubble."""

from __future__ import annotations

import math
from collections.abc import Callable

from ....runtime.world import World
from ....theory import schedules
from ....theory.simulation import Times, simulate
from ... import diagnose
from ...diagnose import Illegal
from ...practice import Answer, Exercise, Mistake, ask, proven, right, wrong
from .shown import on_ranks


def order(rank, p, m):
    """What pipeline rank `rank` of p runs for m microbatches under 1F1B: a list such as ["F0", "F1", "B0",
    ...].
    """
    warmup = min(m, p - 1 - rank)
    ops = [f"F{i}" for i in range(warmup)]
    for i in range(m - warmup):
        ops += [f"F{warmup + i}", f"B{i}"]
    return ops + [f"B{i}" for i in range(m - warmup, m)]


P, M = 4, 8


def _orders(attempt, p: int, m: int):
    return [attempt(rank, p, m) for rank in range(p)]


def judge(attempt) -> Answer:
    from ... import gantt  # ranks import this module, and need no matplotlib

    with World(P, timeout=5) as world:
        small, few, large = world.run(
            lambda: (_orders(attempt, P, M), _orders(attempt, P, 2), _orders(attempt, 8, 32))
        )[0]
        for orders, m in ((small, M), (few, 2), (large, 32)):
            try:
                timeline = diagnose.run(diagnose.read(orders, m))
            except Illegal as e:
                # Forwards before the first backward.
                first = [
                    next((k for k, op in enumerate(order or ()) if str(op).startswith("B")), 0)
                    for order in orders
                ]
                if first == sorted(first) and first[0] < first[-1]:
                    return wrong(
                        "the warm-up the wrong way round",
                        f"With p = {len(orders)}, m = {m} your later ranks warm up longer, so {e}. The first"
                        " rank waits longest for its first backward: its warm-up is the longest, and the"
                        " last one has none.",
                    )
                return wrong(e.misconception, f"With p = {len(orders)}, m = {m}: {e}")
            if answer := _measure(orders, timeline):
                return answer
        mine, reference = diagnose.read(small, M), schedules.one_f_one_b(P, M)
        yours, theirs = on_ranks(world, mine, 1, 0.008), on_ranks(world, reference, 1, 0.008)
    slots = simulate(diagnose.read(large, 32), Times(1, 0.5, 0.5)).makespan
    paper = diagnose.run(mine)
    name = (
        "This is 1F1B."
        if mine.name == "1F1B"
        else f"This one is {mine.name}: not 1F1B to the letter, and as good."
    )
    answer = right(
        f"{name} The bubble is GPipe's, {paper.bubble:.2%} of wall time; what shrank is the number of"
        " microbatches in flight. Below: on paper, with the critical path; and on four real ranks.",
        ("time for p = 4, m = 8, backward = 2 × forward", f"{paper.makespan:.0f} units", "33 units"),
        ("microbatches in flight, by rank", str([yours.in_flight(r) for r in range(P)]), "[4, 3, 2, 1]"),
        ("slots for p = 8, m = 32, equal times", f"{slots:.0f}", "78"),
    )
    answer.picture = gantt.timeline(
        {"yours, on paper": paper, "yours, on real ranks": yours, "1F1B, on real ranks": theirs},
        critical=True,
    )
    return answer


def _measure(orders, timeline) -> Answer | None:
    """What is wrong with a legal order that is longer, or holds more, than 1F1B."""
    from ... import gantt

    p, m = timeline.schedule.p, timeline.schedule.m
    reference = simulate(schedules.one_f_one_b(p, m))
    held = [timeline.in_flight(r) for r in range(p)]
    figures = [
        (f"time for p = {p}, m = {m}", f"{timeline.makespan:.0f} units", f"{reference.makespan:.0f} units"),
        ("microbatches in flight, by rank", str(held), str([reference.in_flight(r) for r in range(p)])),
    ]
    leading = [next((i for i, op in enumerate(order) if op[0] != "F"), len(order)) for order in orders]
    if any(op.kind in "IW" for ops in timeline.schedule.ops for op in ops):
        return Answer(
            "wrong",
            f"This is {timeline.schedule.name}: its backward is split in two, I and W. Drop 12 comes to that."
            " Here write B.",
            "a backward in two parts",
            figures,
        )
    gap = next(
        (
            (r, a, b, why)
            for r, a, b, why in diagnose.idle(timeline)
            if not any(r == r2 and a2 <= a and b <= b2 for r2, a2, b2, _ in diagnose.idle(reference))
        ),
        None,
    )
    longer = timeline.makespan > reference.makespan
    why = (
        f" An idle time that 1F1B does not have: rank {gap[0]}, from {gap[1]:.0f} to {gap[2]:.0f}: {gap[3]}."
        if gap and longer
        else ""
    )
    picture = (
        gantt.timeline(timeline, "yours, on paper, with its critical path", critical=True)
        if p * m <= 64
        else None
    )
    if timeline.schedule.name.startswith("GPipe"):
        return Answer(
            "wrong",
            f"This is {timeline.schedule.name}. It takes as long as 1F1B, since both have the same bubble."
            f" But every rank holds all {m} microbatches.",
            "GPipe instead of 1F1B",
            figures,
            picture,
        )
    if any(mine > theirs for mine, theirs in zip(held, (reference.in_flight(r) for r in range(p)))):
        late = next(r for r in range(p) if held[r] > p - r)
        return Answer(
            "wrong",
            f"Rank {late} runs {leading[late]} forwards before its first backward, and holds {held[late]}"
            f" microbatches at once. It need not: its first backward can come after a warm-up of"
            f" {p - 1 - late} and one more forward." + why,
            "a warm-up that is too long",
            figures,
            picture,
        )
    if longer:
        short = next((r for r in range(p) if leading[r] < p - r), None)
        name = "a warm-up that is too short" if short is not None else "longer than need be"
        return Answer(
            "wrong",
            f"A legal order, but it takes {timeline.makespan:.0f} units where {reference.makespan:.0f} are"
            " enough." + why,
            name,
            figures,
            picture,
        )
    return None


one_f_one_b = Exercise(
    "the order of one stage",
    order,
    judge,
    minutes=9,
    hints=[
        (
            "Three parts: a warm-up of forwards; then one forward and one backward in turn; then the"
            " backwards that are left."
        ),
        (
            "How long is the warm-up? The last rank can go backward at once: 0. The one before it must wait"
            " for one more: 1. So p - 1 - rank."
        ),
        (
            "After the warm-up, forwards run out first. As many backwards are left as there were warm-up"
            " forwards: the drain."
        ),
    ],
    without=("schedules",),
)


def bubble(schedule, p, m):
    """The share of wall time in which a rank idles, for "GPipe" or "1F1B", on p equal stages with m
    microbatches.
    """
    return (p - 1) / (m + p - 1)


def _mistake(name: str, text: str, of: Callable) -> Mistake:
    return Mistake(name, text, lambda schedule, p, m: of(p, m))


BUBBLES = [(name, p, m) for name in ("GPipe", "1F1B") for p, m in ((4, 8), (8, 32), (2, 1), (1, 4), (3, 5))]
DRAIN = (
    "You count the wait before the first forward of the last stage, but not the drain: after its last"
    " backward, p-1 more backwards follow, one on each stage before it."
)
OFF_BY_ONE = (
    "Count a forward and its backward together as one. Then the work is m, the last stage starts after p-1"
    " others, not p, and the whole takes m + p-1."
)
BRACKETS = "Python divides before it adds: write brackets around the whole numerator and denominator."
MISTAKES = (
    _mistake(
        "percent instead of a share",
        "The number is right, as percent. Return a share of 1.",
        lambda p, m: 100 * (p - 1) / (m + p - 1),
    ),
    _mistake(
        "the busy share",
        "That is the share in which a rank works. The bubble is the rest.",
        lambda p, m: m / (m + p - 1),
    ),
    _mistake("a missing drain", DRAIN, lambda p, m: (p - 1) / (3 * m + p - 1)),
    _mistake("a missing drain", DRAIN, lambda p, m: (p - 1) / (2 * m + p - 1)),
    _mistake(
        "the other definition of bubble",
        "You divide by the ideal time: (p-1)/m. Here the bubble is a share of wall time, which has the"
        " bubble in it.",
        lambda p, m: (p - 1) / m,
    ),
    _mistake("p where p-1 was meant", OFF_BY_ONE, lambda p, m: p / (m + p)),
    _mistake("p where p-1 was meant", OFF_BY_ONE, lambda p, m: p / (m + p - 1)),
    _mistake("p where p-1 was meant", OFF_BY_ONE, lambda p, m: (p - 1) / (m + p)),
    _mistake("p+1 where p-1 was meant", OFF_BY_ONE, lambda p, m: (p - 1) / (m + p + 1)),
    _mistake("p+1 where p-1 was meant", OFF_BY_ONE, lambda p, m: (p + 1) / (m + p + 1)),
    _mistake("brackets left out", BRACKETS, lambda p, m: (p - 1) / m + p - 1),
    _mistake("brackets left out", BRACKETS, lambda p, m: p - 1 / (m + p - 1)),
    _mistake("brackets left out", BRACKETS, lambda p, m: p - 1 / m + p - 1),
    _mistake(
        "nothing but 0",
        "You return 0 for every p and m. A division with // gives whole numbers; / keeps the fraction.",
        lambda p, m: 0.0,
    ),
    _mistake(
        "a share that grows with m",
        "You return (m-1)/(m+p-1), which grows with the microbatches. More of them make the bubble smaller.",
        lambda p, m: (m - 1) / (m + p - 1),
    ),
    _mistake(
        "the units, not their share",
        "You return p-1: the idle time, if a forward and its backward together are one. The bubble is its"
        " share of the whole time, m + p-1.",
        lambda p, m: p - 1,
    ),
    _mistake(
        "the wait counted twice",
        "Count a forward and its backward together as one. Then the wait is p-1, not twice that.",
        lambda p, m: 2 * (p - 1) / (m + 2 * (p - 1)),
    ),
    _mistake(
        "the wait counted twice",
        "Count a forward and its backward together as one. Then the wait is p-1, not twice that.",
        lambda p, m: 2 * (p - 1) / (m + p - 1),
    ),
)


def _judge_bubble(attempt) -> Answer:
    make = {"GPipe": schedules.gpipe, "1F1B": schedules.one_f_one_b}
    shares: list[float] = []
    for case, given in zip(BUBBLES, ask(attempt, BUBBLES, timeout=10)):
        try:
            shares.append(float("nan") if isinstance(given, (str, bool)) else float(given))
        except (TypeError, ValueError):
            shares.append(float("nan"))
        if math.isnan(shares[-1]):
            return wrong("no number", f"bubble({', '.join(map(repr, case))}) returned {given!r}.")
    target = [simulate(make[name](p, m)).bubble for name, p, m in BUBBLES]
    alike = lambda a, b: abs(a - b) < 5e-4
    off = next((i for i, (a, b) in enumerate(zip(shares, target)) if not alike(a, b)), None)
    if off is None:
        return right(
            "Both have the same bubble, by formula, by simulation and on real ranks.",
            ("p = 4, m = 8", f"{shares[0]:.4f}", "0.2727"),
            ("p = 8, m = 32", f"{shares[1]:.4f}", "0.1795"),
            _evidence(),
        )
    name, p, m = BUBBLES[off]
    figures = [(f"{name}, p = {p}, m = {m}", f"{shares[off]:.4f}", f"{target[off]:.4f}")]
    if mistake := proven(shares, BUBBLES, MISTAKES, alike):
        return wrong(mistake.name, mistake.text, *figures)
    half = len(BUBBLES) // 2
    if off >= half and all(a <= b + 5e-4 for a, b in zip(shares[half:], target[half:])):
        return wrong(
            "1F1B shrinks the bubble",
            "GPipe was right, so the formula is known; to 1F1B you give less. 1F1B begins and ends as GPipe"
            " does; it only holds less in between.",
            *figures,
            _evidence(),
        )
    return wrong(
        "another share",
        f"For {name} with p = {p}, m = {m} you say {shares[off]:.4f}. On paper every rank is idle for"
        f" {3 * (p - 1)} of {3 * (m + p - 1)} units, where a forward takes 1 and a backward 2:"
        f" {target[off]:.4f}." + (" Every case before it was right." if off else ""),
        *figures,
    )


def _evidence() -> tuple[str, str, str]:
    """The bubbles of both schedules, measured on four ranks."""
    with World(P, timeout=10) as world:
        bubbles = [on_ranks(world, make(P, M), 1).bubble for make in (schedules.gpipe, schedules.one_f_one_b)]
    return (
        "measured just now on four ranks: GPipe and 1F1B",
        " and ".join(f"{x:.2f}" for x in bubbles),
        "both a little over 0.27",
    )


share = Exercise(
    "the share of the bubble",
    bubble,
    _judge_bubble,
    minutes=6,
    hints=[
        (
            "Count one rank's time: m forwards and m backwards. And the whole: the last stage starts p-1"
            " forwards late. After its last backward p-1 more follow, one on each stage before it."
        ),
        (
            "Count a forward and its backward together as one. Then a stage's work is m, and the whole time"
            " is m + p - 1."
        ),
    ],
    without=("schedules", "simulation", "simulate"),
)
