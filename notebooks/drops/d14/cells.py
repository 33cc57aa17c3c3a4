"""Functions for the cells of drop 14's notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from drops import d13
from three_axes.plan import (
    CLUSTERS,
    FRAMEWORKS,
    Estimate,
    Job,
    Layout,
    Plan,
    beyond,
    calls,
    estimate,
    find_model,
    plan,
    traced_job,
)
from three_axes.table import Table, human
from three_axes.terminal import fold
from three_axes.trace import Trace, trace

from .exercises import KEPT, case

if TYPE_CHECKING:  # ranks import the drops, and need no matplotlib
    from helpers.draw import Picture

MODEL, CLUSTER, GPUS, BATCH, SEQ = find_model("llama-3-70b"), CLUSTERS["dgx-h100"], 64, 128, 8192


@cache
def the_plan() -> Plan:
    """Llama-3-70B on 64 H100s in eight nodes, 128 sequences of 8192 tokens in a step, on the three axes of
    the course, under Megatron-LM, which sums gradients in float32 with bfloat16 (arguments.py at d98e8a6).
    """
    return plan(Job(MODEL, CLUSTER, BATCH, SEQ, FRAMEWORKS["megatron-lm"]), gpus=GPUS, cp=1)


JOB = d13.as_written(the_plan().job, Layout())[0]  # the job as a cost model of drop 13 takes it
# The bytes of a GPU, and how many of them a layout may take.
CARD, ROOM = CLUSTER.device.memory, (1 - KEPT) * CLUSTER.device.memory
THUMB = d13.Cut(4, 8, 2)  # by the rule of thumb: TP fills the node, as few stages as fit, DP on top
FSDP = d13.Cut(64, 1, 1, b=2, zero=3, again=1)
CUTS = (  # the layouts that are compared
    THUMB,
    THUMB._replace(v=8),
    d13.Cut(8, 8, 1),
    d13.Cut(2, 16, 2),
    d13.Cut(4, 4, 4, v=5),
    d13.Cut(2, 4, 8),
    d13.Cut(2, 4, 8, v=5),
    FSDP,
)


def whose(cost: Callable) -> str:
    """'your lines' or 'our lines': the source of a cost model. A plain function is the reader's."""
    return getattr(cost, "whose", "your lines")


def shown(cut: d13.Cut) -> str:
    """A layout's name in tables and pictures."""
    name = f"FSDP {cut.d}" + ", recompute" * cut.again if cut.zero == 3 and cut.t * cut.p == 1 else str(cut)
    return name + ", rule of thumb" * (cut == THUMB)


def fastest(cost: Callable, job: d13.Given, cuts: Iterable[d13.Cut] = CUTS, room: float = ROOM) -> d13.Cut:
    """The layout with the fewest seconds of those that divide the batch and leave a tenth of the GPU free."""
    whole = [cut for cut in cuts if job.batch % (cut.d * cut.b) == 0]
    fits = [cut for cut in whole if cost(job, cut).memory <= room]
    return min(fits, key=lambda cut: cost(job, cut).seconds)


def table(cost: Callable, mine: d13.Cut) -> Table:
    """Seconds and bytes of CUTS and of `mine` by a cost model, those that fit first, fastest first."""
    costs = {cut: cost(JOB, cut) for cut in dict.fromkeys([mine, *CUTS])}
    rows = []
    for cut, c in sorted(costs.items(), key=lambda row: (row[1].memory > CARD, row[1].seconds)):
        free, ranks = (CARD - c.memory) / 1e9, cut.d * cut.t * cut.p
        fits = "does not fit" if free < 0 else f"tight, {free:.1f} GB free" if c.memory > ROOM else "fits"
        fits = fits if _whole(JOB, cut) else f"{cut.d * cut.b} does not divide {JOB.batch} sequences"
        fits = fits if ranks == GPUS else f"{ranks} GPUs, not {GPUS}"
        rows.append([shown(cut), f"{c.seconds:.1f} s", f"{c.memory / 1e9:.1f} GB", fits])
    source = cost if "because" in getattr(cost, "where", "") else whose(cost)
    return Table(["DP · TP · PP", "a step", "the fullest GPU", ""], rows, title=f"By {source}")


def answer(cost: Callable, options: Sequence[str]) -> tuple[str, str, str]:
    """The arguments of `guess.reveal`: the fastest of CUTS that leaves a tenth of the GPU free."""
    best, chunks = shown(fastest(cost, JOB)), cost(JOB, d13.Cut(2, 4, 8, v=5))
    eight, four = cost(JOB, THUMB), cost(JOB, d13.Cut(2, 4, 8))
    why = (
        "A row above it in the table leaves less than a tenth free.\n\n"
        f"All but FSDP compute for {eight.work:.1f} s; FSDP computes a third more, because it must"
        f" recompute. The rest is what you choose. TP 8 pays {eight.tp:.1f} s for its sums, TP 4 pays"
        f" {four.tp:.1f}. TP 4 needs eight stages to fit, and their bubble costs {four.idle:.1f} s. Five"
        f" chunks leave {chunks.idle:.1f} s of it, but then {(CARD - chunks.memory) / 1e9:.1f} GB are left."
        " The layout without stages has no bubble, and does not fit.\n\n"
        "**It is a tie**: the winner, the rule of thumb, with chunks or without, and FSDP are within a tenth"
        f" of each other, by {whose(cost)} and by the planner. So seconds do not decide."
    )
    return best if best in options else f"none of these: {best}", why, "Computed"


def planned(cut: d13.Cut, of: Plan | None = None) -> tuple[float, float]:
    """(seconds, bytes on the fullest GPU) of a layout by the planner."""
    e = estimate((of or the_plan()).job, d13.layout_of(cut))
    return e.step_seconds, e.memory_bytes


def picture(cost: Callable, mine: d13.Cut) -> Picture:
    """The rows of `table` as bars, with the planner's seconds and bytes as lines."""
    from helpers import draw

    cuts = list(dict.fromkeys([mine, *CUTS]))
    rows = {shown(cut): (_terms(cost(JOB, cut)), cost(JOB, cut).memory) for cut in cuts}
    marks = {shown(cut): planned(cut) for cut in cuts}
    return draw.layouts(rows, marks, CARD, ROOM, (whose(cost), "the planner"))


def _terms(c: d13.Cost) -> dict[str, float]:
    return {"compute": c.work, "TP": c.tp, "bubble": c.idle, "DP": c.dp, "sends": c.sends}


def _domain(name: str) -> dict:
    """The changed fields of the job in FP8 on a cluster of this name."""
    C, W, R = d13.reaches(name)
    return {"C": 2 * C, "W": W, "R": R, "node": CLUSTERS[name].gpus_per_node}


TIED = (THUMB._replace(v=8), FSDP)  # within a tenth of the fastest, by the lines and by the planner
FP8 = "FP8: twice C, the same W"
GB200, GB300 = "FP8 on 64 GB200, one NVLink domain", "FP8 on 64 GB300, one NVLink domain"
IN_DOMAIN = (*CUTS, d13.Cut(8, 2, 4), d13.Cut(8, 2, 4, v=5), FSDP._replace(b=1, again=0))
CLUSTER_OF = {GB200: "gb200-nvl72", GB300: "gb300-nvl72"}
CHANGES = {
    "as asked": {},
    "half the network between nodes": {"R": JOB.R / 2},
    "a quarter of the batch": {"batch": JOB.batch // 4},
    FP8: {"C": 2 * JOB.C},
    **{what: _domain(name) for what, name in CLUSTER_OF.items()},
}
# What NVIDIA prints of this model on 64 GPUs, 256 sequences of 8,192 tokens, container 26.02: tokens/s of a
# GPU (Megatron-Bridge, docs/performance-summary.md at df0289c).
PRINTED = {
    "H100": "1,621 (TP 4 · PP 8, v 5)",
    "GB200": "4,040 (FSDP 64) and 3,887 (TP 2 · PP 4, v 5)",
    "GB300": "5,003 (FSDP 64)",
}


def changes(cost: Callable) -> Table:
    """For each of CHANGES: the fastest layout that fits, with the tokens/s of a GPU, and the seconds of those
    that tie as asked. Below them what NVIDIA prints.
    """
    now, rows = fastest(cost, JOB), []
    for what, changed in CHANGES.items():
        job, cuts, room = JOB._replace(**changed), CUTS, ROOM
        if what in CLUSTER_OF:
            cuts, room = IN_DOMAIN, (1 - KEPT) * CLUSTERS[CLUSTER_OF[what]].device.memory
        best = fastest(cost, job, cuts, room)
        speed = job.batch * job.s / GPUS / cost(job, best).seconds
        tied = (f"{cost(job, cut).seconds:.2f}" if _whole(job, cut) else "cannot be" for cut in (now, *TIED))
        rows.append([what, shown(best), f"{speed:,.0f}", *tied])
    names = (f"{shown(cut)}, s" for cut in (now, *TIED))
    table = Table(["the job", "the fastest that fits", "tokens/s a GPU", *names], rows)
    printed = "; ".join(f"{gpu} {speeds}" for gpu, speeds in PRINTED.items())
    table.note = f"NVIDIA prints tokens/s in FP8, for 256 sequences: {printed}"
    return table


def defended(cost: Callable) -> str:
    """The defence of the fastest layout, in sentences whose figures are computed here."""
    best = fastest(cost, JOB)
    layout, slots = d13.layout_of(best), JOB.batch // (best.d * best.b) * best.v + best.p - 1
    three, crosses = (best, *TIED), {}
    for cut in three:
        strides = {"TP": (cut.t, 1), "DP": (cut.d, cut.t), "PP": (cut.p, cut.t * cut.d)}
        far = [axis for axis, (ranks, stride) in strides.items() if ranks > 1 and ranks * stride > JOB.node]
        crosses[cut] = " and ".join(far) or "nothing"
    all_of = lambda tell: ", ".join(tell(cut) for cut in three)
    held = the_plan().sure.held
    most = lambda cut: f"{held * planned(cut)[1] / 1e9:.1f}" + " (too much)" * (held * planned(cut)[1] > CARD)
    why = ", because PP alone crosses nodes, and sends least" if crosses[best] == "PP" else ""
    said = [
        f"A tie: {'; '.join(map(shown, three))}.",
        f"Seconds: by {whose(cost)} {all_of(lambda cut: f'{cost(JOB, cut).seconds:.1f}')};"
        f" by the planner, under Megatron-LM, {all_of(lambda cut: f'{planned(cut)[0]:.1f}')}.",
        "What breaks the tie, in this order of layouts:",
        f"  memory: {all_of(lambda cut: f'{cost(JOB, cut).memory / 1e9:.0f}')} of {CARD / 1e9:.1f} GB by"
        f" {whose(cost)}, {all_of(lambda cut: f'{planned(cut)[1] / 1e9:.0f}')} by the planner",
        f"    (8 of 10 published runs held up to {held:.2f} times what the planner says: that would be"
        f" {all_of(most)});",
        f"  what crosses nodes: {' | '.join(crosses.values())};",
        "  what your framework ships: Megatron-LM has the first two, FSDP is PyTorch's own.",
        f"I take {layout.axes}{why}. It leaves least memory free: I measure that first."
        f" If it does not fit, I take {shown(TIED[0])}.",
        f"Bubble: ({best.p} − 1)/{slots} of the step, {cost(JOB, best).idle:.1f} s.",
        "What would change my mind: "
        + "; ".join(f"{what} (then {_then(cost, what, best)})" for what in list(CHANGES)[2:4])
        + "; and a framework that hides TP's sums.",
    ]
    return fold("\n".join(said), 100)


def _then(cost: Callable, what: str, mine: d13.Cut) -> str:
    """The fastest layout after one of CHANGES, and whether `mine` then ties with it."""
    job = JOB._replace(**CHANGES[what])
    best = fastest(cost, job)
    return shown(best) + ", a tie" * (cost(job, mine).seconds < 1.1 * cost(job, best).seconds)


def _whole(job: d13.Given, cut: d13.Cut) -> bool:
    """Whether a cut divides the batch."""
    return job.batch % (cut.d * cut.b) == 0


# -- a job of one's own ---------------------------------------------------------------------------

# Names of clusters for `your_job`.
YOURS = {name: CLUSTERS[name] for name in ("dgx-a100", "dgx-h100", "dgx-b200", *CLUSTER_OF.values())}
_SMALL = replace(CLUSTERS["dgx-a100"].device, name="a100-40gb", memory=40 * 2**30, bandwidth=1.555e12)
YOURS["dgx-a100-40gb"] = replace(CLUSTERS["dgx-a100"], name="dgx-a100-40gb", device=_SMALL)


def your_job(cost: Callable, model: str, cluster: str, gpus: int, batch: int, seq_len: int) -> Table:
    """The five fastest layouts of a job that leave a tenth of a GPU free, by a cost model, beside the
    planner's seconds and bytes under Megatron-LM. model: a name or the path of a config.json. cluster: one of
    YOURS. Raises ValueError for another name, for a model with experts, and where nothing fits.
    """
    if cluster not in YOURS:
        raise ValueError(f"cluster {cluster!r} is none of {', '.join(YOURS)}")
    job = Job(find_model(model), YOURS[cluster], batch, seq_len, FRAMEWORKS["megatron-lm"])
    if job.model.experts:
        raise ValueError(f"{job.model.name} has experts, and the lines know none; drop b3 adds them")
    given, cuts, room = case(job.model, gpus, batch, seq_len, job.cluster, ends=True)
    cuts = [cut for cut in cuts if _can_be(job, cut)]
    if not cuts:
        raise ValueError(
            f"no layout of {gpus} GPUs divides {job.model.layers} layers, {job.model.heads} heads and {batch}"
            " sequences; take another number of GPUs or of sequences"
        )
    costs = {cut: cost(given, cut) for cut in cuts}
    fits = [cut for cut in cuts if costs[cut].memory <= room]
    if not fits:
        least = min(c.memory for c in costs.values())
        needs = f"the smallest needs {least / 1e9:.0f} of {room / 1e9:.0f} GB"
        raise ValueError(f"no layout fits {gpus} × {cluster} with a tenth of a GPU free: {needs}")
    first = sorted(fits, key=lambda cut: costs[cut].seconds)[:5]
    estimates = [estimate(job, d13.layout_of(cut)) for cut in first]
    rows, has = [], job.cluster.device.memory
    for cut, theirs in zip(first, estimates):
        mine = costs[cut]
        room = ", too much" if theirs.memory_bytes > has else ", tight" * theirs.tight
        held = f"{theirs.memory_bytes / 1e9:.0f} GB{room}"
        seconds = f"{mine.seconds:.3g} s", f"{theirs.step_seconds:.3g} s"
        rows.append([str(cut), *seconds, f"{mine.memory / 1e9:.0f} GB", held])
    columns = ["DP · TP · PP", whose(cost), "the planner", "memory", "the planner"]
    made = Table(columns, rows, title=f"{job.model.name} on {gpus} × {cluster}, {batch} × {seq_len:,} tokens")
    fit = [one for one in estimates if one.memory_bytes <= has and not one.tight]
    made.note = _beside_the_best(job, gpus, fit)
    return made


def _beside_the_best(job: Job, gpus: int, mine: Sequence[Estimate]) -> str:
    """Sentences on the planner's best, with FSDP among its layouts, and on the first of `mine` there."""
    from helpers.practice import Defence  # ranks import the drops, and need no matplotlib

    made = plan(job, gpus=gpus, cp=1)
    bests = [made.estimate(), Defence(made, made.best.layout).pure] if made.ranked else []
    bests = [one for one in bests if one and not one.tight]
    if not bests:
        return "By the planner no layout leaves a tenth of the GPU free."
    best = min(bests, key=lambda one: one.step_seconds)
    text = f"The planner's best: {best.layout}, {best.step_seconds:.3g} s; "
    if not mine:
        return f"{text}by the planner none of these five fits"
    behind = mine[0].step_seconds / best.step_seconds - 1
    text += f"your first row that fits there: {mine[0].step_seconds:.3g} s, {behind:+.1%}"
    if behind > 0.1:
        lost = {term: seconds - best.time.get(term, 0.0) for term, seconds in mine[0].time.items()}
        most = max(lost, key=lambda term: lost[term])
        text += f", most of it {'the output layer' if most == 'head' else most}"
    launching = mine[0].time["waiting for the host"] / mine[0].step_seconds
    if launching > 0.1:
        text += f". {launching:.0%} of that is launching kernels, which the lines leave out"
    return text


def _can_be(job: Job, cut: d13.Cut) -> bool:
    """Whether the planner refuses the layout for no reason but memory."""
    try:
        job.check(d13.layout_of(cut))
    except ValueError:
        return False
    return True


@cache
def if_tp_hides() -> Plan:
    """The plan of the same job if TP's all-reduces run while products compute, cut into pieces, as in
    Megatron Bridge's recipes. Gradients are still summed in float32.
    """
    framework = FRAMEWORKS["megatron-bridge"].but(gradient_bytes=4)
    return plan(replace(the_plan().job, framework=framework), gpus=GPUS, cp=1)


# Term of a Cost -> the planner's terms that it stands for.
_TERMS_OF = {
    "compute": ("matrices", "attention", "elementwise", "waiting for the host", "head", "optimizer"),
    "TP": ("tensor parallel",),
    "bubble": ("bubble",),
    "DP": ("data parallel",),
    "sends": ("pipeline sends",),
}


def where_they_part(cost: Callable) -> Table:
    """The seconds of CUTS by a cost model and by the planner, and the term that differs most."""
    rows = []
    for cut in sorted(CUTS, key=lambda cut: cost(JOB, cut).seconds):
        mine, theirs = _terms(cost(JOB, cut)), estimate(the_plan().job, d13.layout_of(cut))
        sums = {name: sum(theirs.time.get(t, 0.0) for t in terms) for name, terms in _TERMS_OF.items()}
        apart = {name: sums[name] - seconds for name, seconds in mine.items()}
        most = max(apart, key=lambda name: abs(apart[name]))
        hidden = estimate(if_tp_hides().job, d13.layout_of(cut)).step_seconds
        rows.append(
            [
                shown(cut),
                f"{sum(mine.values()):.1f} s",
                f"{theirs.step_seconds:.1f} s",
                f"{most} {apart[most]:+.1f} s",
                f"{hidden:.1f} s",
            ]
        )
    return Table(["DP · TP · PP", whose(cost), "the planner", "most of it", "where TP hides"], rows)


# This machine and model in FP8, as the archive of Megatron Bridge's performance page prints it.
# Release -> (batch, tokens/s of a GPU).
NVIDIA = Layout(dp=2, tp=4, pp=8, interleave=5, schedule="interleaved", zero=1)
MEASURED = {"25.09": (128, 1619), "25.11": (128, 1602), "26.02": (256, 1621), "26.04.01": (256, 1664)}


def published() -> Table:
    """Tokens/s of NVIDIA's FP8 layout: by the planner in bfloat16 and FP8, and as NVIDIA prints them."""
    wide = replace(the_plan().job, framework=FRAMEWORKS["megatron-bridge"])
    rows = []
    for batch in sorted({batch for batch, _ in MEASURED.values()}):
        job = replace(wide, global_batch=batch)
        speeds = [
            f"{estimate(replace(job, precision=precision), NVIDIA).tokens_per_second_per_gpu:,.0f}"
            for precision in ("bf16", "fp8")
        ]
        printed = [f"{speed:,} ({release})" for release, (of, speed) in MEASURED.items() if of == batch]
        rows.append([f"{batch}", *speeds, ", ".join(printed)])
    sure = plan(wide, gpus=GPUS, cp=1).sure
    title = (
        f"{NVIDIA}, tokens/s of a GPU; 8 of 10 runs of {sure.of} take {sure.low:.2f} to {sure.high:.2f} times"
        " as long as is predicted"
    )
    return Table(["batch", "bf16, predicted", "FP8, predicted", "FP8, printed (release)"], rows, title=title)


def with_cp() -> Table:
    """The fastest layouts that fit, without and with context parallelism."""
    rows = []
    for name in ("megatron-lm", "megatron-bridge"):
        job = replace(the_plan().job, framework=FRAMEWORKS[name].but(gradient_bytes=4))
        for what, only in (("three axes", {"cp": 1}), ("and CP", {})):
            best = plan(job, gpus=GPUS, **only).best
            rows.append([name, what, str(best.layout.axes), f"{best.seconds:.1f} s"])
    return Table(["framework", "", "the fastest that fits", "a step"], rows)


USUAL = Layout(dp=8, tp=8, zero=3, sequence_parallel=False)
FEW = 8  # layers: enough where all layers are alike and the count of a single layer is needed


@cache
def traced(layout: Layout) -> Trace:
    """The trace of the 70B's first stage on one rank of a layout, by Megatron's plan, with FSDP over dp:
    FSDP2 has no ZeRO-1 and 2. A schedule's chunks are left out.

    Raises ValueError for a layout that PyTorch's parts cannot run.
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
    """The peak on a rank, on paper and traced; and the bytes of it that fused kernels would not hold."""
    job = traced_job(run.model, run.seq_len, run.layout)
    paper = dict(estimate(job, run.layout).stages[0], overhead=0.0)  # a trace has no overhead
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
