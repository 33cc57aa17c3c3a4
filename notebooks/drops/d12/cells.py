"""Functions for the cells of drop 12's notebook, and constants that its exercises use too."""

from __future__ import annotations

from contextlib import nullcontext

from drops.d07 import on_ranks
from drops.lines import bubble
from helpers.practice import line
from helpers.ranks import World
from three_axes.count import Timeline
from three_axes.paper import SCHEDULES, Times, paper, simulate, simulation
from three_axes.plan import bubble_rates
from three_axes.table import Table

P, M = 8, 13  # stages, microbatches
ASKED, LIMIT = 16, 10  # in the practice: microbatches, and how many of them a rank can hold

F1B1, INTERLEAVED = SCHEDULES["1F1B"].make, SCHEDULES["interleaved"].make
# Name -> (schedule, units of a stage's forward, messages for each boundary and microbatch, the price)
REMEDIES = {
    "1F1B, 8 stages": (F1B1(P, M), 1.0, 1, ""),
    "half the microbatch, m = 26": (F1B1(P, 2 * M), 0.5, 2, "smaller matrices; needs b > 1"),
    "4 stages, TP 2": (F1B1(P // 2, M), 1.0, 1, "TP's all-reduces in every layer"),
    "interleaved, v = 2": (INTERLEAVED(P, M, 2), 1.0, 2, f"memory × {M / P:.1f}; messages × 2"),
    "interleaved, v = 4": (INTERLEAVED(P, M, 4), 1.0, 4, f"memory × {M / P:.1f}; messages × 4"),
    "ZB-H1": (SCHEDULES["ZB-H1"].make(P, M), 1.0, 1, "every rank holds 8, not only the first"),
    "ZB-V": (SCHEDULES["ZB-V"].make(P, M), 1.0, 2, "messages × 2, a more complex order"),
}


def remedies() -> Table:
    """The step with each remedy, on paper. Times are in units of a forward of one stage of eight."""
    rows = []
    for name, (schedule, work, messages, price) in REMEDIES.items():
        line = paper(schedule, work)
        whole = f"{line.held * (0.5 if '26' in name else 1):.1f}"  # with m = 26 each is half as large
        rows.append([name, f"{line.makespan:.1f}", f"{line.bubble:.1%}", whole, str(messages), price])
    columns = ["remedy", "units", "bubble", "microbatches held", "messages", "the price"]
    return Table(columns, rows, title=f"p = {P}, m = {M}: (p−1)/(m+p−1) = 7/20")


# Schedule -> (who ships it, what it asks for or forbids). Read in PyTorch 2.13's pipelining/schedules.py,
# whose classes torchtitan takes, Megatron-LM's pipeline_parallel/schedules.py and DualPipe's dualpipe.py.
# Combined 1F1B: Megatron-LM's pipeline_parallel/combined_1f1b.py (Core 0.14, September 2025; read at
# 00caa53af), --overlap-moe-expert-parallel-comm; its conditions are in transformer/transformer_config.py.
SHIPPED = {
    "1F1B": ("all", "m at least p (PyTorch)"),
    "interleaved": (
        "Megatron-LM, PyTorch",
        "m a multiple of p (Megatron-LM's default) or of ⌊m/p⌋ (PyTorch)",
    ),
    "1F1B, combined": ("Megatron-LM", "experts over ranks; interleaved if p > 1; no full recompute"),
    "ZB-H1, interleaved": ("PyTorch", "no torch.compile; m a multiple of ⌊m/p⌋"),
    "ZB-V": ("PyTorch", "no torch.compile; exactly 2 chunks a rank"),
    "DualPipe-V": ("PyTorch, DeepSeek", "as ZB-V; m at least 2·p"),
    "DualPipe": ("DeepSeek", "two stages' weights a rank; p and m even, m at least 2·p"),
}


def shipped() -> Table:
    """For each schedule the frameworks that have it, and the conditions under which they run it."""
    return Table(
        ["schedule", "shipped by", "asks for, forbids"], [[name, *how] for name, how in SHIPPED.items()]
    )


def with_output_layer(layers: list[int], output: float) -> simulation.Timeline:
    """1F1B where stage k has layers[k] layers, and the last one also the output layer, which costs as much as
    `output` layers. A layer's forward is 1.
    """
    work = _work(layers, output)
    return simulate(F1B1(len(layers), M), Times(work, work, work))


def _work(layers: list[int], output: float) -> list[float]:
    """The work of each stage, in forwards of a layer."""
    return [*map(float, layers[:-1]), layers[-1] + float(output)]


def run_all(world: World, unit: float = 0.024) -> dict[str, tuple[simulation.Timeline, Timeline]]:
    """Every remedy, and two ways to balance, on real ranks with pauses in place of compute: name -> (on
    paper, measured).

    The remedy with four stages runs in a world of four ranks. unit: seconds of a forward of one stage of
    eight, which has four layers.
    """
    timelines = {}
    for name, (schedule, work, *_) in REMEDIES.items():
        four = "4 stages" in name  # each has the work of two stages and two GPUs, so a forward is one unit
        with World(P // 2) if four else nullcontext(world) as ranks:
            timelines[name] = paper(schedule, work), on_ranks(ranks, schedule, unit=unit * work, again=False)
    plain = F1B1(P, M)
    for name, layers in (("equal stages", [4] * P), ("balanced", [4, 4, 4, 4, 5, 5, 5, 1])):
        real = on_ranks(world, plain, unit=unit / 4, work=_work(layers, 3), again=False)
        timelines[f"output layer of 3, {name}"] = with_output_layer(layers, 3), real
    return timelines


def side_by_side(timelines: dict) -> Table:
    """Bubbles by the line of drop 07, on paper and on the ranks, and the measured step as a multiple of
    1F1B's.
    """
    plain = timelines["1F1B, 8 stages"][1].makespan
    rows = []
    for name, (simulated, real) in timelines.items():
        of = REMEDIES[name][0] if name in REMEDIES else None  # the others have unequal stages
        predicted = "" if of is None or of.name.startswith("ZB") else f"{bubble(of.m, of.p, of.v):.1%}"
        bubbles = predicted, f"{simulated.bubble:.1%}", f"{real.bubble:.1%}"
        rows.append([name, *bubbles, f"{real.makespan / plain:.2f}"])
    columns = ["order", "bubble, predicted", "simulated", "measured", "step, 1F1B being 1"]
    return bubble.below(Table(columns, rows))


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


def answer() -> tuple[str, str, str]:
    """The arguments of `guess.reveal`: the remedy that stays below 15 % with no more memory than 1F1B."""
    lines = {
        "zero bubble, 2 chunks a rank": paper(REMEDIES["ZB-V"][0]),
        "interleaving, 4 chunks a rank": paper(REMEDIES["interleaved, v = 4"][0]),
    }
    fit = [name for name, line in lines.items() if line.bubble < 0.15 and line.held <= P]
    other = lines["interleaving, 4 chunks a rank"]
    why = f"Interleaving reaches {other.bubble:.1%}, but holds {other.held:.0f} microbatches."
    return fit[0] if fit else "none", why, "Computed"


# Checks the number in the notebook's first code cell: the bubble with twice the microbatches.
first_line = line(
    7 / 33, "7/33 is 21 %. But here m is fixed.", "(p − 1)/(m + p − 1), as a share between 0 and 1."
)
