"""Drop 11: throughput lost on a larger cluster: where a step's time goes, axis by axis, measured and by
theory.
"""

from __future__ import annotations

import os
import time
from functools import cache

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from drops.d11_cluster import *  # noqa: F403  what the cells show
from drops.d11_cluster import AXES, BATCH, NODES, SIZES, TOKENS, Measured, measure, undivided
from helpers import toy
from helpers.practice.engine import Asked
from helpers.practice.runs import Run, alike, number
from three_axes.explain import Explained
from three_axes.files import rows_of
from three_axes.paper import collectives
from three_axes.plan import CLUSTERS, Estimate, Job, Layout, estimate
from three_axes.plan.models import find_model
from three_axes.table import Table

# -- practice: split a loss into its causes -------------------------------------------------------


def causes(before, after):
    """Split the loss of a larger cluster into its causes: {"tp": share, "pp": share, "dp": share, "rest":
    share}, which sum to 1.

    before, after: {"ranks": n, "batch": sequences in a step, "parts": {"compute": seconds, "tp": ..., "pp":
    ..., "dp": ..., "rest": ...}}. Perfect scaling would make each part batch/ranks times what it was; what is
    beyond that is lost. A part that is shorter than that has gained: its share is negative. What compute lost
    is no part of it.
    """
    # What each part would take under perfect scaling; the rest is lost.
    ratio = (after["batch"] / after["ranks"]) / (before["batch"] / before["ranks"])
    beyond = {
        axis: after["parts"][axis] - ratio * before["parts"][axis] for axis in ("tp", "pp", "dp", "rest")
    }
    return {axis: seconds / sum(beyond.values()) for axis, seconds in beyond.items()}


def _case(ranks, batch, *seconds):
    return {"ranks": ranks, "batch": batch, "parts": dict(zip(("compute", *AXES, "rest"), seconds))}


EXAMPLES = [
    (_case(4, 8, 0.96, 0.2, 0.0, 0.0, 0.08), _case(8, 8, 0.48, 0.5, 0.0, 0.0, 0.1)),
    (_case(8, 64, 1.0, 0.1, 0.2, 0.0, 0.0), _case(64, 512, 1.0, 0.1, 0.2, 0.6, 0.0)),
    (_case(8, 64, 1.0, 0.0, 0.3, 0.0, 0.1), _case(16, 64, 0.6, 0.0, 0.4, 0.1, 0.1)),  # compute loses too
    (_case(8, 64, 1.0, 0.3, 0.0, 0.0, 0.1), _case(16, 64, 0.5, 0.1, 0.0, 0.2, 0.1)),  # TP gains
]


def _sums(run: Run, _) -> bool | str:
    """What the shares of each case sum to, where that is not 1."""
    totals = [] if run.error else [sum(shares.values()) for shares in run.values]
    yours = ", ".join(f"{total:.2f}" for total in totals)
    return any(abs(total - 1) > 0.01 for total in totals) and f"In the four cases yours sum to {yours}."


def _first_that_parts(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    pairs = list(zip(EXAMPLES, run.values, truth.values))
    at, *shares = next((pair for pair in pairs if not alike(*pair[1:], split.tolerance)), pairs[0])
    ranks, batch = (f"{at[0][what]} to {at[1][what]}" for what in ("ranks", "batch"))
    shown = [", ".join(f"{x} {share:.2f}" for x, share in case.items()) for case in shares]
    return [(f"{ranks} ranks, batch {batch}", *shown)]


split = Asked(
    "split the loss",
    causes,
    minutes=7,
    hints=[
        "What would perfect scaling make of a part? Work for one rank is batch / ranks. Everything should"
        " change in that ratio.",
        "ratio = (after batch / after ranks) / (before batch / before ranks). Beyond perfect is after -"
        " ratio · before, for each of tp, pp, dp, rest.",
        "Divide each by the sum of the four.",
    ],
    cases=EXAMPLES,
    reads=lambda shares: {axis: round(number(shares[axis]), 3) for axis in (*AXES, "rest")},
    tolerance=0.006,  # two digits are enough
    praise="The shares of all four cases sum to one, and name the axis.",
    figures=_first_that_parts,
    shows={
        "shares that do not sum to one": _sums,
        "all of it blamed on one cause": lambda run, _: (
            not run.error and all(sum(abs(x) > 0.005 for x in mine.values()) == 1 for mine in run.values)
        ),
    },
    mistakes="""
        compute counted as well
            In one case compute lost time too. It is none of the four, so it is neither in their sum nor in
            rest.
            - / sum(beyond.values()) => / (sum(beyond.values()) + after["parts"]["compute"] - ratio *
              before["parts"]["compute"])
            - return { => beyond["rest"] += after["parts"]["compute"] - ratio *
              before["parts"]["compute"]⏎    return {
        no shares
            Return a dictionary in which each of tp, pp, dp and rest has a number.
            ~ form
        percent where shares are asked for
            Yours sum to 100; shares sum to 1.
            - {axis: seconds => {axis: 100 * seconds
        seconds compared as they are
            Each rank now has a smaller share of the work, so a part that stayed as long has lost. Compare
            with what perfect scaling would make of it.
            - ratio * before => before
        the ratio of the batches or of the ranks alone
            A rank's work is batch / ranks, and in one of the cases both grow: compare per sequence.
            - ratio * before => before["ranks"] / after["ranks"] * before
            - ratio * before => after["batch"] / before["batch"] * before
            - ratio * before => before["batch"] / after["batch"] * before
        the ratio upside down
            Twice the ranks halve a rank's work. The ratio is that work after, over that work before.
            - ratio * before => 1 / ratio * before
            - ratio * before => after["ranks"] / before["ranks"] * before
            - (after["batch"] / after["ranks"]) / (before["batch"] / before["ranks"]) => after["ranks"] /
              before["ranks"] * after["batch"] / before["batch"]
            - (after["batch"] / after["ranks"]) / (before["batch"] / before["ranks"]) => (before["batch"] /
              after["ranks"]) / (after["batch"] / before["ranks"])
        always half
            You scale each part by 1/2. That is right where the ranks double and the batch stays; one case
            is another.
            - ratio * before => 0.5 * before
        what is large is not what was lost
            You divide up one of the two runs. What was lost is in the second, beyond what perfect scaling
            makes of the first.
            - ratio * before => 0 * before
            - after["parts"][axis] - ratio * before => before
        a gain that does not count as one
            In one case a part became shorter than perfect scaling would make it, and its share is negative.
            max(0, …) hides that gain, abs() makes a loss of it.
            - return { => beyond = {x: max(0.0, s) for x, s in beyond.items()}⏎    return {
            - return { => beyond = {x: abs(s) for x, s in beyond.items()}⏎    return {
        shares that do not sum to one
            Shares sum to 1.
        all of it blamed on one cause
            In each case you give everything to one of the four. Which axes lost, and how much of the loss
            is each?
    """,
)


# -- practice: place the axes ---------------------------------------------------------------------


def place():
    """(d, t, p, m) for eight ranks in two nodes of four.

    A rank holds a quarter of the model at most, so t·p is at least 4.
    """
    # TP fills the node, as it did before; only DP's all-reduce crosses, once a step and under backward.
    return 2, 4, 1, 1


MARGIN = 1.25  # times the best known's seconds: what a slow machine adds is less


@cache
def _best() -> Measured:
    """The best known, measured once for all tries."""
    return measure(*place())


def _four(answer) -> tuple[int, ...]:
    d, t, p, m = map(int, answer)
    if m < 1:
        raise ValueError(m)
    return d, t, p, m


def _steps(run: Run) -> tuple[Measured, Measured] | None:
    """The answer's layout and the best known, measured once for an answer; None for what cannot be. One that
    seems slower is measured again beside the best: the machine may have been busier now than it was then.
    """
    layout, facts = run.values[0], run.ranks[0]
    d, t, p, _ = layout
    if min(d, t, p) < 1 or d * t * p != 8 or t * p < 4 or undivided(*layout):
        return None
    if "steps" not in facts:
        mine, best = _best() if layout == place() else measure(*layout), _best()
        if mine.seconds > MARGIN * best.seconds:
            best = measure(*place())
            mine = min(mine, measure(*layout), key=lambda one: one.seconds)
        facts["steps"] = mine, best
    return facts["steps"]


def _placed(run: Run, _) -> str | tuple[str, str] | None:
    d, t, p, m = run.values[0]
    if min(d, t, p) < 1 or d * t * p != 8:
        return "d·t·p is not 8", f"{d}·{t}·{p} = {d * t * p}."
    if t * p < 4:
        return "it does not fit", f"Each rank would hold 1/{t * p} of the model."
    if said := undivided(d, t, p, m):
        return "sizes that do not divide", said
    mine, best = _steps(run)
    if t > 4:
        return "TP scaled with the cluster"
    if mine.seconds <= MARGIN * best.seconds:
        return None
    if (d, t, p) == (2, 4, 1):
        return "microbatches without a pipeline"
    if p > 1 and m < 2 * p:
        bubble = (p - 1) / (m + p - 1)
        return "a starved pipeline", f"{p} stages and {m} microbatches: the bubble alone is {bubble:.0%}."
    if m > 2 * p and t > 1:
        return "more microbatches than the pipeline needs"
    return "slower than it could be"


def _seconds(run: Run, _) -> list[tuple[str, str, str]]:
    if not (steps := _steps(run)):
        return []
    mine, best = (f"{one.seconds:.2f}" for one in steps)
    still = ", ".join(f"{steps[0].parts[axis]:.2f}" for axis in AXES)
    return [
        ("seconds of a step, measured just now", mine, f"{best}, the best known"),
        ("standing still for tp, pp, dp", still, ""),
    ]


placing = Asked(
    "win it back",
    place,
    minutes=8,
    hints=[
        "Which axis waits most, and why? tp in every layer: keep it inside a node of four.",
        "t·p must be at least 4, and t at most 4. What is left of 8?",
        "With t = 4 the rest is 2: two stages, or two copies. Which of them has a bubble?",
    ],
    reads=_four,
    compares=False,
    praise="As good as the best known, within what such a measurement can tell.",
    figures=_seconds,
    finds=_placed,
    mistakes="""
        no layout
            Return four whole numbers d, t, p, m, with at least one microbatch.
            ~ form
        d·t·p is not 8
            Each size is at least 1, and the three must multiply to the number of ranks.
        it does not fit
            A quarter of the model is the most that fits a rank: t·p must be at least 4.
        sizes that do not divide
        TP scaled with the cluster
            A node has four ranks. A tp group of eight leaves it, and every layer waits for the slow ports.
            More ranks are no reason for a larger t.
        microbatches without a pipeline
            The axes are right. But with p = 1 there is no bubble to fill, and each microbatch more starts
            every all-reduce once more.
        a starved pipeline
            Take more microbatches, or fewer stages.
        more microbatches than the pipeline needs
            Each microbatch starts every all-reduce of a layer, and each time the ranks wait for the last of
            them. The bubble alone does not ask for so many.
        slower than it could be
            It fits, but its step takes longer than the best known's. Which axis may cross the nodes most
            cheaply?
    """,
)


# -- by theory: 8 to 64 GPUs ---------------------------------------------------------------------

MODEL, SEQ, GLOBAL = find_model("llama-3-8b"), 8192, 64
CASES = {
    "8 GPUs: TP 8": Layout(dp=1, tp=8, zero=1),
    "64: TP 16 · DP 4": Layout(dp=4, tp=16, zero=1),
    "64: TP 8 · PP 8": Layout(dp=1, tp=8, pp=8, zero=1),
    "64: TP 8 · DP 8": Layout(dp=8, tp=8, zero=1),
    "8 GPUs: DP 8, ZeRO-2": Layout(dp=8, zero=2),
    "64: DP 64, ZeRO-3": Layout(dp=64, zero=3),
}
GROWN = {  # a 70B with 256 sequences of 4,096 tokens in a step
    "64 GPUs: TP 8 · PP 4 · DP 2": Layout(dp=2, tp=8, pp=4, zero=1),
    "128: TP 16 · PP 4 · DP 2": Layout(dp=2, tp=16, pp=4, zero=1),
    "128: TP 8 · PP 8 · DP 2": Layout(dp=2, tp=8, pp=8, zero=1),
    "128: TP 8 · PP 4 · DP 4": Layout(dp=4, tp=8, pp=4, zero=1),
}


def grown() -> Table:
    """Llama-3-70B on 64 A100s, and in three ways on 128, on paper. Of the planner's terms two are shown."""
    rows = []
    for name, layout in GROWN.items():
        e = estimate(Job(find_model("llama-3-70b"), CLUSTERS["dgx-a100"], 256, 4096), layout)
        shares = [
            f"{float(e.time.get(term, 0)) / e.step_seconds:.0%}" for term in ("tensor parallel", "bubble")
        ]
        rows.append([name, f"{e.tokens_per_second_per_gpu:,.0f}", f"{e.mfu:.0%}", *shares])
    return Table(["Llama-3-70B on A100s", "tokens/s/GPU", "MFU", "waits for TP", "bubble"], rows)


def _on_paper(layout: Layout, batch: int = GLOBAL) -> Estimate:
    return estimate(Job(MODEL, CLUSTERS["dgx-a100"], batch, SEQ), layout)


def estimates() -> dict[str, Estimate]:
    """Llama-3-8B with a batch of 64 sequences of 8192 tokens on 8 GPUs and on 64."""
    return {name: _on_paper(layout) for name, layout in CASES.items()}


def beyond_ideal(on_paper: dict) -> dict[str, dict[str, float]]:
    """For each layout of 64 GPUs: the step of 8 GPUs divided by 8, and what each term has beyond its share of
    that. They sum to the step.
    """
    first = on_paper["8 GPUs: TP 8"]
    smaller = ("matrices", "attention", "elementwise", "waiting for the host", "optimizer")
    names = dict.fromkeys(smaller, "smaller matrices") | {"head": "waiting for the head's stage"}
    panels = {}
    for name, e in on_paper.items():
        if not name.startswith("8 GPUs"):
            parts = panels[name] = {"ideal": first.step_seconds / 8}
            for term, seconds in e.time.items():
                part = names.get(term, term)
                parts[part] = parts.get(part, 0.0) + seconds - first.time[term] / 8
    return panels


def by_hand() -> Table:
    """The toy's tensor parallel all-reduce of b·s·h float32 numbers on 4 and on 8 ranks, hop by hop: on equal
    links each hop waits for the one before; where one hop is slow it never rests, and the rest waits for it.
    """
    payload, rows = 4 * BATCH * TOKENS * SIZES["hidden"], []
    for t, bandwidth, latency in (
        (4, NODES.intra_node_bandwidth, 6 * NODES.intra_node_latency),
        (8, NODES.gpus_per_node * NODES.inter_node_bandwidth, NODES.inter_node_latency),
    ):
        hops, piece = 2 * (t - 1), payload / t
        whole = collectives.seconds("all_reduce", payload, range(t), NODES)
        assert abs(hops * piece / bandwidth + latency - whole) < 1e-9
        slowest = f"{piece / 1e3:.1f} kB over {bandwidth / 1e6:.0f} MB/s: {1e3 * piece / bandwidth:.1f} ms"
        times = f"{1e3 * latency:.1f} ms", f"{1e3 * whole:.1f} ms", f"{16e3 * whole:.0f} ms"
        rows.append([f"TP {t}", str(hops), slowest, *times])
    return Table(
        ["all-reduce", "hops", "a piece over the slowest", "latencies that show", "together", "16 of them"],
        rows,
    )


def strong_and_weak(gpus=(8, 16, 32, 64)) -> dict[str, list[tuple[int, float]]]:
    """(GPUs, tokens/s of one) by theory for TP 8 and more data parallelism: the batch fixed (strong), and
    growing with the GPUs (weak).
    """
    run = lambda n, batch: _on_paper(Layout(dp=n // 8, tp=8, zero=1), batch).tokens_per_second_per_gpu
    return {
        "weak: batch grows": [(n, run(n, n)) for n in gpus],
        "strong: batch of 8": [(n, run(n, 8)) for n in gpus],
    }


def published() -> dict[str, list[tuple[int, float]]]:
    """TFLOP/s of one GPU, 174.6·10⁹ parameters, the batch fixed at 1536: Narayanan et al. 2021, Table 2."""
    rows = [r for r in rows_of("narayanan_2021_table2.csv") if r["params_b"] == "174.6"]
    return {
        scheme: [(int(r["gpus"]), float(r["hw_tflops_per_gpu"])) for r in rows if r["scheme"] == scheme]
        for scheme in ("PTD-P", "ZeRO-3")
    }


# -- the reader's own ----------------------------------------------------------------------------

STEPS, SLOW_READER = 3, 2


def record(folder: str) -> str:
    """On a rank: write a trace of three steps of DDP to the folder, and return its file. One rank is slow to
    prepare its examples.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler prints a line at each start and stop
    rank = dist.get_rank()
    model = DistributedDataParallel(toy.ToyTransformer(seed=0, hidden=64, heads=8, seq_len=TOKENS))
    optimizer = torch.optim.AdamW(model.parameters())
    file = os.path.join(folder, f"rank{rank}.json.gz")
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(file),
    ) as recorded:
        for step in range(1 + STEPS):
            if rank == SLOW_READER:
                time.sleep(0.2)
            ids, targets = toy.make_batch(BATCH, TOKENS, seed=step)
            toy.loss_of(model(ids), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorded.step()
    return file


def own_waterfall(explained: Explained, *ranks: int) -> dict[str, dict[str, float]]:
    """A step of each of these ranks, part by part, from its trace."""
    return {
        f"rank {split.rank}": {part: seconds / split.steps for part, seconds in split.parts.items()}
        for split in explained.splits
        if split.rank in ranks
    }
