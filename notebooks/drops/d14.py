"""Drop 14: a layout for 70B on 64 GPUs defended, the real model traced, and the real 4-layer model trained on
whatever is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from drops import d13
from drops.d14_training import *  # noqa: F403  what the cells show
from helpers.practice.engine import Asked
from helpers.practice.runs import Run, number
from three_axes.plan import CLUSTERS, FRAMEWORKS, Job, Layout, Plan, estimate, plan
from three_axes.plan.measured import of_your_source
from three_axes.plan.memory import stage_memory, states
from three_axes.plan.models import find_model
from three_axes.plan.traced import beyond, microbatches, traced_job
from three_axes.plan.traffic import calls
from three_axes.table import Table, human
from three_axes.trace.trace import Trace, trace

# -- practice: three of the reviewer's questions --------------------------------------------------


def meeting(n, d, t, p, m, node):
    """(bytes of states on a GPU with ZeRO-1, bubble as a share of wall time, the axes that cross nodes)."""
    # TP and PP cut all states, ZeRO-1 the optimizer's 12 bytes over d too.
    held = n / (t * p)
    states_bytes = 4 * held + 12 * held / d
    bubble = (p - 1) / (m + p - 1)
    strides = {"tp": (t, 1), "dp": (d, t), "pp": (p, t * d)}
    crossing = {axis for axis, (size, stride) in strides.items() if size > 1 and size * stride > node}
    return states_bytes, bubble, crossing


CASES = (
    (70_553_706_496, 4, 8, 2, 32, 8),
    (70_553_706_496, 4, 4, 4, 32, 8),
    (30e9, 2, 2, 2, 16, 8),
    (70_553_706_496, 1, 8, 8, 128, 8),
    (70_553_706_496, 8, 8, 1, 16, 8),
    (1e9, 8, 1, 1, 4, 8),
    (175e9, 2, 16, 2, 16, 8),
    (30e9, 4, 2, 2, 16, 8),
    (8e9, 16, 4, 1, 16, 8),
)
QUESTIONS = {
    "states on a GPU": human,
    "bubble": lambda percent: f"{percent / 100:.3f}",
    "axes that cross nodes": lambda axes: ", ".join(sorted(axes)) or "none",
}


def _three_answers(answer) -> tuple[float, float, set]:
    """Bytes, percent, axes."""
    states_bytes, bubble, axes = answer
    if isinstance(axes, (str, dict)) and axes != {} or not set(axes) <= {"tp", "dp", "pp"}:
        raise ValueError(axes)
    return number(states_bytes), 100 * number(bubble), set(axes)


def _wrong(run: Run, truth: Run) -> tuple[int, int] | None:
    """(question, case) of the first wrong answer to the first question that has one."""
    places = ((i, k) for i in range(3) for k in range(len(CASES)))
    parts = lambda i, k: not defend.alike(run.values[k][i], truth.values[k][i])
    return next((place for place in places if parts(*place)), None)


class _OneByOne(Asked):
    """The first question with a wrong answer is judged, as if the others were answered right."""

    def _form(self, mine: Run, truth: Run):
        said = super()._form(mine, truth)
        if not said and (place := _wrong(mine, truth)):
            i = place[0]
            both = zip(mine.values, truth.values)
            mine.ranks[0]["values"] = [(*right[:i], got[i], *right[i + 1 :]) for got, right in both]
        return said


def _unnamed(run: Run, truth: Run) -> str:
    """The row of what no edit does."""
    question, case = _wrong(run, truth) or (None, None)
    if question != 2:
        return {0: "other bytes", 1: "another bubble"}.get(question, "")
    _, d, t, p, *_ = CASES[case]
    more = run.values[case][2] - truth.values[case][2]
    alone = more and all({"tp": t, "dp": d, "pp": p}[axis] == 1 for axis in more)
    return "an axis of size one" if alone else "groups misplaced"


def _where(run: Run, truth: Run) -> list[tuple[str, str, str]]:
    if not (place := _wrong(run, truth)):
        return [("layouts", str(len(run.values)), str(len(CASES)))]
    (i, k), (n, d, t, p, m, node) = place, CASES[place[1]]
    what, show = list(QUESTIONS.items())[i]
    at = f"N = {n / 1e9:.3g}·10⁹, DP {d}, TP {t}, PP {p}, m = {m}, nodes of {node}"
    return [(f"{what}, {at}", show(run.values[k][i]), show(truth.values[k][i]))]


defend = _OneByOne(
    "three of the reviewer's questions, for any layout",
    meeting,
    minutes=8,
    hints=[
        "N/(t·p) parameters are on a GPU before ZeRO. Weights and gradients take 2 bytes each and stay"
        " whole; ZeRO-1 cuts the other 12 over d.",
        "A pipeline of p stages and m microbatches has m + p − 1 slots, and each stage idles in p − 1 of"
        " them.",
        "TP is innermost: stride 1. DP: stride t. PP: stride t·d. A group of k ranks with stride s stays"
        " inside a node when k·s is at most the node's size. An axis of size 1 crosses nothing.",
    ],
    cases=CASES,
    reads=_three_answers,
    tolerance=0.005,
    praise="Three answers for nine layouts. You can say them in a meeting, and the reviewer can redo them.",
    figures=_where,
    finds=_unnamed,
    mistakes="""
        not three answers
            Return bytes, a share, and a set of 'tp', 'dp' and 'pp', such as {'dp'}.
            ~ form
        Megatron-LM's bytes, not 16
            6 + 12/d are Megatron-LM's, which sums gradients in float32. Here they take 2 bytes: 4 + 12/d.
            - 4 * held => 6 * held
        gigabytes, not bytes
            Your numbers are 10⁹ times too small: the check asks for bytes.
            - held = n => held = n / 1e9
        not divided by t·p
            TP and PP cut the model: a GPU has weights, gradients and optimizer of its own N/(t·p)
            parameters alone.
            - n / (t * p) => n
            - 4 * held => 2 * n + 2 * held
            - 12 * held => 12 * n
            - 4 * held + 12 * held / d => 16 * n
        d divides the wrong bytes
            ZeRO-1 divides the 12 bytes of master copy, m and v by d, and only those. Weights and gradients
            stay whole.
            - 4 * held + 12 => 16
            - 12 * held / d => 12 * held
            - 4 * held + 12 => 2 * held + 14
            - 4 * held + 12 * held / d => 4 * held / d + 12 * held
        bytes that are forgotten
            A parameter takes 16 bytes: 2 of weight, 2 of gradient, and the optimizer's 12, which are the
            master copy, m and v.
            - 12 * held => 8 * held
            - 4 * held => 2 * held
        other bytes
            On a GPU lie N/(t·p) parameters with 2 bytes of weight and 2 of gradient each; only the 12 of
            master copy, m and v are divided by d.
        idle over ideal time
            That is idle time over busy time. The share is of the whole: of m + p − 1 slots p − 1 are idle.
            - / (m + p - 1) => / m
        p where p − 1 was meant
            Of m + p − 1 slots p − 1 are idle.
            - (p - 1) / (m + p - 1) => p / (m + p)
            - (p - 1) / (m => p / (m
            - (m + p - 1) => (m + p)
        microbatches shared out over d
            m is what each pipeline runs.
            - (m + p - 1) => (m / d + p - 1)
        no share that is idle
            Of m + p − 1 slots p − 1 are idle, and m are busy. It is a share, not percent; and `//` leaves
            only its whole part, which is 0.
            - (p - 1) / (m => m / (m
            - (p - 1) / (m => 100 * (p - 1) / (m
            - (p - 1) / (m => (p - 1) // (m
        another bubble
            Of m + p − 1 slots p − 1 are idle.
        the whole job, not each group
            All ranks of the job do not fit a node, but a group of one axis may. Ask it for each axis: how
            many ranks, how far apart? An axis of size 1 crosses nothing.
            - size * stride > node => d * t * p > node
            - size > 1 and size * stride > node => d * t * p > node
        axes in another order
            TP is innermost: ranks 0 to t − 1 are a group, neighbours on one node while it holds them. DP's
            replicas are t apart. PP is outermost, its stages t·d apart.
            - "tp": (t, 1), "dp": (d, t), "pp": (p, t * d) => "pp": (p, 1), "dp": (d, p), "tp": (t, p * d)
            - "dp": (d, t), "pp": (p, t * d) => "dp": (d, t * p), "pp": (p, t)
            - "pp": (p, t * d) => "pp": (p, t)
        size or stride where reach was meant
            A group's reach is its size times its stride. The size alone does not say how far apart its ranks
            stand; the stride alone, only whether neighbours are on two nodes.
            - size * stride > node => size > node
            - size * stride > node => stride >= node
        a full node is not left
            A group that reaches over as many ranks as a node has fills it, and stays inside.
            - size * stride > node => size * stride >= node
        the axes that stay, not those that cross
            You name the axes whose groups stay inside a node. Asked are those that leave it.
            - size * stride > node => size * stride <= node
            - size > 1 and size * stride > node => size * stride <= node
            - if size > 1 and size * stride > node => if not (size > 1 and size * stride > node)
        an axis of size one
            A group of one rank sends nothing.
        groups misplaced
            Neighbours along tp are 1 apart, along dp t, along pp t·d. A group of size k with stride s
            reaches over k·s ranks.
    """,
)


# -- what the cells show: the 70B sized -----------------------------------------------------------

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


# -- the real model, traced ----------------------------------------------------------------------

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
    """Its first `FEW` layers by the tutorials' plan, without sequence parallelism."""
    return trace(replace(MODEL, layers=FEW), USUAL, seq_len=SEQ, plan="usual")


def against_formula(run: Trace) -> Table:
    """Collectives of the traced step: counted from PyTorch, and by hand."""
    by_hand = calls(traced_job(run.model, run.seq_len, run.layout), run.layout)
    many = microbatches(run.layout.pp)
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
    paper = {k: float(v) for k, v in stage_memory(job, run.layout, 0, 0).items()}
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
