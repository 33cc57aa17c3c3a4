"""The exercise of drop 07: the order of one stage under 1F1B."""

from __future__ import annotations

from itertools import takewhile

from helpers.practice import Answer, Asked, Run, diagnose, right
from helpers.ranks import World
from three_axes.paper import SCHEDULES, Times, simulate, simulation

from .cells import on_ranks

# -- practice: the order of 1F1B ------------------------------------------------------------------


def order(rank, p, m):
    """What pipeline rank `rank` of p runs for m microbatches under 1F1B: a list such as ["F0", "F1", "B0",
    ...].
    """
    # The first gradient comes back after microbatch 0 has passed all later stages. Until then the rank runs
    # p − 1 − rank forwards. Then one forward and one backward alternate.
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
    """(mistake, a text that shows it, simulated timeline or None if the orders are illegal) for the first of
    SIZES whose orders are illegal, or take longer or hold more than 1F1B; ('', '', None) if there is none.
    """
    each = (_judged(orders, m) for orders, (_, m) in zip(_orders(run), SIZES))
    return next((one for one in each if one[0]), ("", "", None))


def _drained(order: list[str]) -> int:
    """How many microbatches were done when, after several in flight, none was, before the end; else 0."""
    held = most = done = 0
    for op in order[:-1]:
        held += 1 if op.startswith("F") else -1
        most, done = max(most, held), done + op.startswith("B")
        if held == 0:
            return done if most > 1 else 0
    return 0


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
    best, name = simulate(SCHEDULES["1F1B"].make(p, m)), line.schedule.name
    if any(op[0] in "IW" for ops in orders for op in ops):
        return "a backward in two parts", f"This is {name}.", line
    if name.startswith("GPipe"):
        return "GPipe instead of 1F1B", f"This is {name}.", line
    if done := _drained(orders[0]):
        text = f"After B{done - 1} rank 0 has nothing in flight, and {m - done} of {m} microbatches are left."
        return "drained before the end", text, line
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
            return "backwards out of order", f"Rank {rank} of {p} runs backwards as {order}.", line
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
    both = line, simulate(SCHEDULES["1F1B"].make(p, m))
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
    mine, best = diagnose.read(small, M), SCHEDULES["1F1B"].make(P, M)
    with World(P, timeout=5) as world:
        yours, theirs = (on_ranks(world, schedule, 0.008, again=False) for schedule in (mine, best))
    paper, equal = simulate(mine), Times(1, 0.5, 0.5)
    name = "This is 1F1B." if mine.name == "1F1B" else "This is not exactly 1F1B, but as good."
    time, (held, _, fewest) = _on_paper(paper)
    large = diagnose.read(large, 32), SCHEDULES["1F1B"].make(8, 32)
    answer = right(
        f"{name} The bubble is GPipe's, {paper.bubble:.2%} of wall time; what shrank is the number of"
        " microbatches in flight. Below: on paper, with the critical path; and on four real ranks.",
        time,
        (held, str([yours.in_flight(r) for r in range(P)]), fewest),
        (
            "units of time for p = 8, m = 32, if forward and backward take the same",
            *(f"{simulate(x, equal).makespan:.0f}" for x in large),
        ),
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
    without=("SCHEDULES", "schedules"),
    cases=[(rank, p, m) for p, m in SIZES for rank in range(p)],
    compares=False,
    praise=_praised,
    figures=lambda run, _: _on_paper(_first(run)[2]),
    picture=_drawn,
    finds=lambda run, _: _first(run)[:2] if _first(run)[0] else None,
)
