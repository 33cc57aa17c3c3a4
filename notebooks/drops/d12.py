"""Drop 12: a bubble of 35 % with the number of microbatches fixed: what is left to do, what each costs, and
an order that fits.
"""

from __future__ import annotations

from contextlib import nullcontext

from drops.d07 import on_ranks
from helpers.practice.engine import Asked
from helpers.practice.exercise import Answer, right
from helpers.practice.runs import Run
from helpers.ranks.world import World
from three_axes.count.clock import Timeline
from three_axes.paper import schedules, simulation
from three_axes.paper.pipelines import SCHEDULES
from three_axes.paper.simulation import Times, held, paper, simulate
from three_axes.plan.validation import bubble_rates
from three_axes.table import Table

P, M = 8, 13  # stages, microbatches
ASKED, LIMIT = 16, 10  # in the practice: microbatches, and how many of them a rank can hold

# Name -> (schedule, units of a stage's forward, messages for each boundary and microbatch, who pays)
REMEDIES = {
    "1F1B, 8 stages": (schedules.one_f_one_b(P, M), 1.0, 1, ""),
    "half the microbatch, m = 26": (schedules.one_f_one_b(P, 2 * M), 0.5, 2, "smaller matrices; needs b > 1"),
    "4 stages, TP 2": (schedules.one_f_one_b(P // 2, M), 1.0, 1, "TP's all-reduces in every layer"),
    "interleaved, v = 2": (schedules.interleaved(P, M, 2), 1.0, 2, f"memory × {M / P:.1f}; messages × 2"),
    "interleaved, v = 4": (schedules.interleaved(P, M, 4), 1.0, 4, f"memory × {M / P:.1f}; messages × 4"),
    "ZB-H1": (schedules.zb_h1(P, M), 1.0, 1, "every rank holds 8, not only the first"),
    "ZB-V": (schedules.zb_v(P, M), 1.0, 2, "messages × 2, a more complex order"),
}


def remedies() -> Table:
    """What each remedy makes of the step, on paper. Times are in units of a forward of one stage of eight."""
    rows = []
    for name, (schedule, work, messages, price) in REMEDIES.items():
        line = paper(schedule, work)
        whole = f"{held(line) * (0.5 if '26' in name else 1):.1f}"
        rows.append([name, f"{line.makespan:.1f}", f"{line.bubble:.1%}", whole, str(messages), price])
    columns = ["remedy", "units", "bubble", "microbatches held", "messages", "the price"]
    return Table(columns, rows, title=f"p = {P}, m = {M}: (p−1)/(m+p−1) = 7/20")


# Schedule -> (who ships it, what it asks for or forbids). Read in PyTorch 2.13's pipelining/schedules.py,
# whose classes torchtitan takes, Megatron-LM's pipeline_parallel/schedules.py and DualPipe's dualpipe.py.
SHIPPED = {
    "1F1B": ("all", "m at least p (PyTorch)"),
    "interleaved": (
        "Megatron-LM, PyTorch",
        "m a multiple of p (Megatron-LM's default) or of ⌊m/p⌋ (PyTorch)",
    ),
    "ZB-H1, interleaved": ("PyTorch", "no torch.compile; m a multiple of ⌊m/p⌋"),
    "ZB-V": ("PyTorch", "no torch.compile; exactly 2 chunks a rank"),
    "DualPipe-V": ("PyTorch, DeepSeek", "as ZB-V; m at least 2·p"),
    "DualPipe": ("DeepSeek", "two stages' weights a rank; p and m even, m at least 2·p"),
}


def shipped() -> Table:
    """Who has which schedule, and what keeps it from a job."""
    return Table(
        ["schedule", "shipped by", "asks for, forbids"], [[name, *how] for name, how in SHIPPED.items()]
    )


def with_a_head(layers: list[int], head: float) -> simulation.Timeline:
    """1F1B where stage k has layers[k] layers, and the last one also the head, which costs as much as `head`
    layers. A layer's forward is 1.
    """
    work = _work(layers, head)
    return simulate(schedules.one_f_one_b(len(layers), M), Times(work, work, work))


def _work(layers: list[int], head: float) -> list[float]:
    """What each stage does, in forwards of a layer."""
    return [*map(float, layers[:-1]), layers[-1] + float(head)]


def run_all(world: World, unit: float = 0.024) -> dict[str, tuple[simulation.Timeline, Timeline]]:
    """Every remedy and two ways to balance, on real ranks with timed stand-ins: name -> (on paper, measured).

    The four stages run on four ranks of their own. unit: seconds of a forward of one stage of eight, four of
    its layers.
    """
    timelines = {}
    for name, (schedule, work, *_) in REMEDIES.items():
        four = "4 stages" in name  # each with the work of two, on two GPUs: in a unit's time again
        with World(P // 2) if four else nullcontext(world) as ranks:
            timelines[name] = paper(schedule, work), on_ranks(ranks, schedule, tries=1, unit=unit * work)
    plain = schedules.one_f_one_b(P, M)
    for name, layers in (("equal stages", [4] * P), ("balanced", [4, 4, 4, 4, 5, 5, 5, 1])):
        real = on_ranks(world, plain, tries=1, unit=unit / 4, work=_work(layers, 3))
        timelines[f"a head of 3, {name}"] = with_a_head(layers, 3), real
    return timelines


def side_by_side(timelines: dict) -> Table:
    """Bubbles on paper and on the ranks, and how long a step took beside 1F1B's."""
    plain = timelines["1F1B, 8 stages"][1].makespan
    rows = [
        [name, f"{simulated.bubble:.1%}", f"{real.bubble:.1%}", f"{real.makespan / plain:.2f}"]
        for name, (simulated, real) in timelines.items()
    ]
    return Table(["order", "bubble, predicted", "measured", "step, 1F1B being 1"], rows)


def published() -> Table:
    """Bubble rates of Qi et al. 2023, Table 5, beside those simulated from the times of their Table 9, for p
    = 8, m = 24.
    """
    rows = [
        [f"{r['model']}, m = 24", r["schedule"], f"{float(r['computed_bubble_rate']):.4f}", f"{rate:.4f}"]
        for r, rate in bubble_rates()
        if (r["pp_gpus"], r["num_microbatches"]) == ("8", "24")
    ]
    return Table(["model", "schedule", "published", "simulated"], rows, title="share of bubble, p = 8")


# -- practice: below 15 % under a memory limit ----------------------------------------------------


def on_paper(name: str, m: int, v: int = 1) -> Table:
    """Bubble, microbatches held and messages of one of SCHEDULES on eight stages, v chunks on each rank.

    Raises ValueError for a schedule that does not exist, or not with these m and v.
    """
    if name not in SCHEDULES:
        raise ValueError(f"{name!r} is no schedule; there are {', '.join(map(repr, SCHEDULES))}")
    line = paper(_made(name, m, v))
    rows = [[f"{name}, {v} chunk{'s' * (v > 1)} a rank", f"{line.bubble:.1%}", f"{held(line):.1f}", str(v)]]
    return Table(["schedule", "bubble", "microbatches held", "messages"], rows, title=f"p = {P}, m = {m}")


def _made(name: str, m: int, v: int) -> schedules.Schedule:
    """The order on eight stages. Raises ValueError where it has another number of chunks."""
    schedule = SCHEDULES[name].make(P, m, v)
    if v != schedule.v or name == "interleaved" and v == 1:
        has = "interleaving begins with 2" if name == "interleaved" else f"it has {schedule.v}"
        raise ValueError(f"{name} with {v} chunk{'s' * (v != 1)} a rank: {has}.")
    return schedule


def choose():
    """(schedule, m, v) for eight stages: a bubble below 15 %, at most 10 microbatches held, no more messages
    than 1F1B. m is 16.
    """
    # It fills the gaps with W: no second chunk, so no more messages than 1F1B.
    return "ZB-H1", 16, 1


def _chosen(answer) -> tuple[str, int, int]:
    name, m, v = answer
    return SCHEDULES[name] and name, int(m), int(v)


def _choice(run: Run, _) -> str | tuple[str, str] | None:
    name, m, v = run.values[0]
    if m != ASKED:
        return "m is given"
    try:
        line = paper(_made(name, m, v))
    except ValueError as e:
        return "no such schedule", str(e)
    if held(line) > LIMIT:
        return "interleaving is free" if name == "interleaved" else "more memory than there is"
    if line.bubble >= 0.15:
        return "the bubble is still there"
    return "messages are free" if v > 1 else None


def _on_paper(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    if _choice(run, truth) == "m is given" or isinstance(_choice(run, truth), tuple):
        return []
    ((_, *got),) = on_paper(*run.values[0]).rows
    whats = f"bubble, p = {P}, m = {ASKED}", "microbatches held", "messages for each boundary and microbatch"
    return list(zip(whats, got, ("below 15 %", f"at most {LIMIT}", "1")))


def _on_eight_ranks(run: Run) -> Answer:
    orders = _made(*run.values[0]), schedules.one_f_one_b(P, ASKED)
    with World(P, timeout=30) as world:
        real, of_1f1b = (on_ranks(world, order, tries=1).makespan for order in orders)
    steps = real / of_1f1b, paper(orders[0]).makespan / paper(orders[1]).makespan
    return right(
        "Of 21 idle units W fills 14, since nobody waits for it. No message is added. The 7 that are left are"
        " the first microbatch's way down.",
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
        "d12.on_paper(name, 16, v) computes any of list(d12.SCHEDULES). More chunks a rank are more"
        " messages.",
        "One chunk a rank, backward in two parts, no longer warm-up than 1F1B's: ZB-H1.",
    ],
    reads=_chosen,
    compares=False,
    praise=_on_eight_ranks,
    figures=_on_paper,
    finds=_choice,
    mistakes=f"""
        no choice
            Return a schedule's name, m and v. There are {", ".join(map(repr, SCHEDULES))}.
            ~ form
        m is given
            m stays {ASKED}. The optimizer fixes the global batch, and a microbatch is one sequence already.
        no such schedule
        interleaving is free
            It cuts the idle time by v, but its warm-up is longer: a rank holds 1 + (p−1)/(p·v) times the
            {P} that 1F1B holds. Its messages grow by v as well.
        more memory than there is
            A rank can hold {LIMIT} microbatches. All forwards first, or a longer warm-up, hold more. Take a
            schedule that warms up as 1F1B does: list(d12.SCHEDULES) has them, d12.on_paper computes them.
        the bubble is still there
            It fits. What else can a rank do while it waits for the others to warm up?
        messages are free
            Bubble and memory are right. But each microbatch crosses each boundary v times, and these links
            are full.
    """,
)
