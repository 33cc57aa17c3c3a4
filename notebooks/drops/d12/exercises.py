"""Drop 12: a bubble of 35 % that more microbatches cannot shrink: the other remedies, and their costs."""

from __future__ import annotations

from drops.d07 import on_ranks
from helpers.practice import Answer, Asked, Run, right
from helpers.ranks import World
from three_axes.paper import SCHEDULES, Schedule, paper
from three_axes.table import Table

from .cells import ASKED, LIMIT, P

# -- practice: below 15 % under a memory limit ----------------------------------------------------


def on_paper(name: str, m: int, v: int = 1) -> Table:
    """Bubble, microbatches held and messages of one of SCHEDULES on eight stages, v chunks on each rank.

    Raises ValueError for a schedule that does not exist, and for one that is impossible with these m and v.
    """
    if name not in SCHEDULES:
        raise ValueError(f"{name!r} is no schedule; there are {', '.join(map(repr, SCHEDULES))}")
    line = paper(_made(name, m, v))
    rows = [[f"{name}, {v} chunk{'s' * (v > 1)} a rank", f"{line.bubble:.1%}", f"{line.held:.1f}", str(v)]]
    return Table(["schedule", "bubble", "microbatches held", "messages"], rows, title=f"p = {P}, m = {m}")


def _made(name: str, m: int, v: int) -> Schedule:
    """The schedule on eight stages. Raises ValueError if it has another number of chunks than v."""
    schedule = SCHEDULES[name].make(P, m, v)
    if v != schedule.v or name == "interleaved" and v == 1:
        has = "interleaving begins with 2" if name == "interleaved" else f"it has {schedule.v}"
        raise ValueError(f"{name} with {v} chunk{'s' * (v != 1)} a rank: {has}.")
    return schedule


def choose():
    """(schedule, m, v) for eight stages: a bubble below 15 %, at most 10 microbatches held, no more messages
    than 1F1B. m is 16.
    """
    # ZB-H1 fills the gaps with W. A rank has one chunk, so there are no more messages than under 1F1B.
    return "ZB-H1", 16, 1


def _chosen(answer) -> tuple[str, int, int]:
    name, m, v = answer
    return SCHEDULES[name] and name, int(m), int(v)


def _choice(run: Run, _) -> tuple[str, str] | None:
    name, m, v = run.values[0]
    if m != ASKED:
        return "m is not 16", f"You give m = {m}, v = {v}."
    try:
        line = paper(_made(name, m, v))
    except ValueError as e:
        return "no such schedule", str(e)
    if line.held > LIMIT:
        return "interleaving is free" if name == "interleaved" else "more memory than there is", ""
    if line.bubble >= 0.15:
        return "the bubble is still there", ""
    return ("messages are free", "") if v > 1 else None


def _on_paper(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    if (found := _choice(run, truth)) and found[0] in ("m is not 16", "no such schedule"):
        return []
    ((_, *got),) = on_paper(*run.values[0]).rows
    line = paper(_made(*run.values[0]))
    whats = f"bubble, p = {P}, m = {ASKED}", "microbatches held", "messages for each boundary and microbatch"
    targets = "below 15 %", f"at most {LIMIT}", "1"
    missed = line.bubble >= 0.15, line.held > LIMIT, got[2] != "1"
    return [tuple(row) for *row, off in zip(whats, got, targets, missed) if off or not found]


def _on_eight_ranks(run: Run) -> Answer:
    orders = _made(*run.values[0]), SCHEDULES["1F1B"].make(P, ASKED)
    with World(P, timeout=30) as world:
        real, of_1f1b = (on_ranks(world, order, again=False).makespan for order in orders)
    steps = real / of_1f1b, paper(orders[0]).makespan / paper(orders[1]).makespan
    return right(
        "Of 21 idle units W fills 14, since nobody waits for it. No message is added. The 7 that are left"
        " are the last rank's: it waits until the first microbatch has passed the others.",
        *_on_paper(run, run),
        ("a step on eight real ranks, 1F1B's being 1", f"{steps[0]:.2f}", f"{steps[1]:.2f} on paper"),
    )


choice = Asked(
    "below 15 % under a memory limit",
    choose,
    minutes=8,
    hints=[
        "With m = 13 the table shows who is close. What becomes of (p−1)/(m+p−1), and of its relatives,"
        " with m = 16? m stays 16.",
        "In a cell of its own d12.on_paper(name, 16, v) shows a table of any of list(d12.SCHEDULES): bubble,"
        " microbatches held, messages. More chunks a rank are more messages.",
        "One chunk a rank, backward in two parts, no longer warm-up than 1F1B's: ZB-H1.",
    ],
    reads=_chosen,
    compares=False,
    praise=_on_eight_ranks,
    figures=_on_paper,
    finds=_choice,
)
