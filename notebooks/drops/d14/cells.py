"""What the cells of this drop show, and what they share with its practice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from drops import d13
from three_axes.plan import (
    CLUSTERS,
    FRAMEWORKS,
    Job,
    Layout,
    Plan,
    beyond,
    calls,
    estimate,
    find_model,
    of_your_source,
    plan,
    states,
    traced_job,
)
from three_axes.table import Table, human
from three_axes.trace import Trace, trace

MODEL, CLUSTER, GPUS, BATCH, SEQ = find_model("llama-3-70b"), CLUSTERS["dgx-h100"], 64, 128, 8192


@cache
def the_plan() -> Plan:
    """Llama-3-70B on 64 H100s in eight nodes, 128 sequences of 8192 tokens in a step, on the three axes of
    the course.

    As Megatron Bridge trains (TP's traffic hides), but with gradients summed in float32: Megatron-LM's
    default for bfloat16 (arguments.py at d98e8a6), which NVIDIA's benchmarks switch off.
    """
    framework = replace(FRAMEWORKS["megatron-bridge"], gradient_bytes=4)
    return plan(Job(MODEL, CLUSTER, BATCH, SEQ, framework), gpus=GPUS, cp=1)


# This very job in FP8, as the archive of Megatron Bridge's performance page prints it (releases 25.09 and
# 25.11): tokens/s of a GPU.
NVIDIA = Layout(dp=2, tp=4, pp=8, interleave=5, schedule="interleaved", zero=1)
MEASURED = {"25.09": 1619, "25.11": 1602}


def why_not_less(layout: Layout) -> Table:
    """The layout beside those with half its TP, which need twice the stages, or another cut of the memory."""
    half = replace(layout, tp=layout.tp // 2)
    rows = []
    for name, other in (
        ("yours", layout),
        ("half TP, twice DP", replace(half, dp=2 * layout.dp)),
        ("half TP, twice PP", replace(half, pp=2 * layout.pp)),
        ("half TP, four times PP", replace(half, dp=layout.dp // 2, pp=4 * layout.pp)),
    ):
        e = estimate(the_plan().job, other)
        sizes = f"DP {other.dp} · TP {other.tp} · PP {other.pp}"
        times = (f"{e.time[term]:.2f} s" for term in ("tensor parallel", "bubble"))
        fits = f"{human(e.memory_bytes)}{'' if e.fits else ', too much'}"
        rows.append([name, sizes, f"{e.step_seconds:.2f} s", *times, fits])
    return Table(["", "layout", "a step", "of it TP", "bubble", "the fullest GPU"], rows)


def beside(step_seconds: Callable, mine: Layout, most: int = 5) -> Table:
    """Your own cost model beside the planner, on `mine` and on the planner's first layouts of this job.

    step_seconds: (job, cut) -> seconds, as drop 13 asks for it.
    """
    of = the_plan()
    layouts = [mine, *(row.layout for row in of.by_axes if row.layout.axes != mine.axes)][:most]
    rows = []
    for layout in layouts:
        job, cut = d13.as_written(of.job, layout)
        own, planned = step_seconds(job, cut), estimate(of.job, layout).step_seconds
        sizes = f"DP {layout.dp} · TP {layout.tp} · PP {layout.pp}"
        rows.append([sizes, f"{own:.1f} s", f"{planned:.1f} s", f"{own / planned - 1:+.0%}"])
    return Table(["layout", "your ten lines", "the planner", "apart"], rows)


def last_word(mine: Layout) -> Table:
    """The reader's layout, ours and NVIDIA's, in bfloat16 and FP8; and what NVIDIA measured."""
    wide = the_plan().job
    narrow, titan = replace(wide, precision="fp8"), replace(wide, framework=FRAMEWORKS["torchtitan"])
    best = lambda job, **only: plan(job, gpus=GPUS, **only).best.layout
    rows = [
        ("yours", mine, (wide, narrow)),
        ("ours", the_plan().best.layout, (wide, narrow)),
        ("ours for FP8", best(narrow, cp=1), (wide, narrow)),
        ("ours, with CP", best(wide), (wide, narrow)),
        ("ours, torchtitan's FSDP2, uncompiled", best(titan, cp=1), (titan,)),
        ("NVIDIA's", NVIDIA, (wide, narrow)),
    ]
    made = []
    for name, layout, jobs in rows:
        both = [estimate(job, layout) for job in jobs]
        speeds = [f"{e.tokens_per_second_per_gpu:,.0f}" if e.fits else "does not fit" for e in both]
        measured = " and ".join(f"{x:,}" for x in MEASURED.values()) if layout == NVIDIA else ""
        made.append([name, str(layout.axes), *speeds, *[""] * (2 - len(speeds)), measured])
    known, _ = of_your_source(narrow, [f"{NVIDIA} = {MEASURED['25.11']} tokens/s"])
    ours = estimate(known, best(narrow, cp=1))
    speed = f"{ours.tokens_per_second_per_gpu:,.0f}"
    made.append(["ours for FP8, NVIDIA's step known", str(ours.layout.axes), "", speed, ""])
    sure = the_plan().sure
    title = (
        f"tokens/s of a GPU; 8 of 10 runs of {sure.of} take {sure.low:.2f} to {sure.high:.2f} times as long"
        " as is predicted"
    )
    return Table(["", "layout", "bf16", "FP8", "FP8, measured"], made, title=title)


def states_table() -> Table:
    """Weights, gradients and optimizer of the 70B on one GPU, under five layouts."""
    rows = [
        ("one GPU, if it could", 1, 1, 0),
        ("TP 8 · PP 2, no ZeRO", 16, 4, 0),
        ("DP 8 · TP 8, ZeRO-1", 8, 8, 1),
        ("DP 4 · TP 8 · PP 2, ZeRO-1", 16, 4, 1),
        ("DP 64, ZeRO-3", 1, 64, 3),
    ]
    return Table(
        ["layout", "states on a GPU"],
        [[name, human(sum(states(MODEL.params / cut, d, zero).values()))] for name, cut, d, zero in rows],
        title=f"{MODEL.params:,} parameters, 16 bytes each",
    )


USUAL = Layout(dp=8, tp=8, zero=3, sequence_parallel=False)
FEW = 8  # layers, where all layers are alike and one count for each is asked for


@cache
def traced(layout: Layout) -> Trace:
    """The 70B's first stage on one rank of a layout, by Megatron's plan, with FSDP over dp: ZeRO-1 and 2 are
    none of FSDP2's, and a schedule's chunks are left out.

    Raises ValueError for what PyTorch's pieces cannot run.
    """
    return trace(MODEL, replace(layout, zero=3, schedule="1F1B", interleave=1), seq_len=SEQ)


@cache
def usual_plan() -> Trace:
    """The trace of the model's first `FEW` layers by the tutorials' plan, without sequence parallelism."""
    return trace(replace(MODEL, layers=FEW), USUAL, seq_len=SEQ, plan="usual")


def against_formula(run: Trace) -> Table:
    """Collectives of the traced step: counted from PyTorch, and by hand."""
    job = traced_job(run.model, run.seq_len, run.layout)
    by_hand, many = calls(job, run.layout), job.microbatches(run.layout)
    return Table(
        ["collective", "axis", "counted", "by hand", "bytes counted", "by hand"],
        [
            [c.op, c.axis, str(c.calls), str(e.calls), human(c.payload), human(e.payload)]
            for c, e in zip(run.calls, by_hand, strict=True)
        ],
        title=(
            f"{run.model.name} on {run.layout.ranks} fake ranks, {run.layout}: collectives of rank 0 in"
            f" {many} microbatch{'es' * (many > 1)}, whole tensors"
        ),
    )


def memory_against_theory(run: Trace) -> Table:
    """The peak on a rank, on paper and traced; and what of it fused kernels would not hold."""
    job = traced_job(run.model, run.seq_len, run.layout)
    paper = dict(estimate(job, run.layout).stages[0], overhead=0.0)  # which a trace does not hold
    states = ("weights", "gradients", "optimizer")
    rest = sum(paper.values()) - sum(paper[kind] for kind in states)
    rows = [[kind, human(paper[kind]), human(run.memory[kind])] for kind in states]
    rows.append(["all else", human(rest), human(run.peak - sum(run.memory[kind] for kind in states))])
    parts = beyond(run.model, run.layout, run.seq_len)
    if run.layout.pp > 1:
        parts = {"weights and sums of gradients, gathered": paper["gathered weights"]} | parts
    rows += [[f"of that: {name}", human(size), ""] for name, size in parts.items() if size]
    return Table(
        ["a GPU", "on paper", "traced"], rows, ["the peak", human(sum(paper.values())), human(run.peak)]
    )
