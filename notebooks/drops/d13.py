"""Drop 13: the planner in the reader's hands, a rule of thumb held against it, and four quick cases."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import NamedTuple

from helpers.practice.engine import Asked, Form
from helpers.practice.exercise import Answer, right
from helpers.practice.runs import Run, number
from three_axes.plan import CLUSTERS, Estimate, Job, Layout, Plan, estimate, plan
from three_axes.plan.frameworks import FRAMEWORKS
from three_axes.plan.meeting import TOKENS_PER_PARAMETER, gpu_hours
from three_axes.plan.memory import states
from three_axes.plan.models import ModelShape, find_model
from three_axes.table import Table, human

MODEL, CLUSTER, GPUS, BATCH, SEQ = "opt-30b", "dgx-a100", 32, 256, 2048


@cache
def the_plan() -> Plan:
    """OPT-30B on 32 A100s in four nodes, 256 sequences of 2048 tokens in a step."""
    return plan(Job(find_model(MODEL), CLUSTERS[CLUSTER], BATCH, SEQ), gpus=GPUS)


def refused() -> Table:
    """One (dp, tp, pp) of each kind that is out, and why."""
    p = the_plan()
    bare = replace(p.job.framework, zeros=(0,), zeros_in_pipeline=(0,), recomputes=("none",))
    alone = plan(replace(p.job, framework=bare), gpus=GPUS).why(dp=32)
    rows = [[str(axes), why.split(";")[0]] for axes, why in list(p.impossible.items())[:2]]
    too_much = alone.split(")")[-1].strip().removeprefix("it does not fit: ")
    return Table(["layout", "why not"], [*rows, ["DP 32 without ZeRO or recompute", too_much]])


def flips() -> Table:
    """The smallest changes that make another (dp, tp, pp) win, and how far the first three of now are behind
    it then.
    """
    first = [row.axes for row in the_plan().by_axes[:3]]
    rows = []
    for what, factor, winner in the_plan().flips():
        then = {row.axes: row.seconds for row in the_plan().changed(what, factor).by_axes}
        behind = [f"{then[axes] / winner.seconds - 1:.1%}" for axes in first]
        rows.append([what, f"× {factor:g}", str(winner.axes), *behind])
    title = "the first three of today, and how much slower than the new winner they would be"
    return Table(["change", "by", "then wins", *map(str, first)], rows, title=title)


def by_framework() -> Table:
    """The winner of the same job under frameworks that count bytes in their own ways."""
    rows = []
    for name in ("deepspeed", "megatron-lm", "torchtitan"):
        framework = FRAMEWORKS[name]
        best = plan(replace(the_plan().job, framework=framework), gpus=GPUS).best
        sizes = (framework.weight_bytes, framework.gradient_bytes, framework.optimizer_bytes)
        shown = name if framework.fused else f"{name}, uncompiled"
        rows.append([shown, " + ".join(map(str, sizes)), str(best.layout), f"{best.seconds:.1f} s"])
    return Table(["framework", "bytes a parameter", "its fastest layout", "a step"], rows)


def finishes() -> str:
    """How long the training takes on these GPUs: by hand, at half of their peak, and by the plan."""
    p, device = the_plan(), CLUSTERS[CLUSTER].device
    params = p.job.model.params
    tokens = TOKENS_PER_PARAMETER * params
    operations = 6 * params * tokens
    by_hand = operations / (GPUS * device.flops / 2) / 86400
    by_plan = gpu_hours(p.estimate(p.best), tokens) / GPUS / 24
    return (
        f"{TOKENS_PER_PARAMETER} tokens for each parameter: {tokens / 1e9:.0f}·10⁹ tokens."
        f" 6 · {params / 1e9:.1f}·10⁹ · {tokens / 1e9:.0f}·10⁹ = {operations / 1e21:.0f}·10²¹ operations.\n"
        f"{GPUS} GPUs at half of {device.flops / 1e12:.0f}·10¹² a second: {by_hand:.0f} days."
        f" By the plan they reach {by_hand / 2 / by_plan:.0%} of it: {by_plan:.0f} days."
    )


# -- a rule of thumb -----------------------------------------------------------------------------


def tree(model: ModelShape, gpus: int) -> tuple[str, tuple[int, int, int]]:
    """The decision tree of this drop: what it says, and as (d, t, p).

    It keeps 40 % of the memory for activations.
    """
    cluster = CLUSTERS[CLUSTER]
    node, room = cluster.gpus_per_node, 0.6 * cluster.device.memory
    need = sum(states(model.params).values())
    if need <= room:
        return "fits one GPU: DP", (gpus, 1, 1)
    if need <= room * node:
        return "fits one node: FSDP", (gpus, 1, 1)
    if gpus <= node:
        return "only one node: FSDP", (gpus, 1, 1)
    t = math.gcd(node, model.heads)
    rest = gpus // t
    divides = [p for p in range(1, rest + 1) if rest % p == 0 and model.layers % p == 0]
    p = next((p for p in divides if need / (t * p) <= room), rest)
    return "else: TP in the node, PP across, DP on top", (rest // p, t, p)


TREE_CASES = (
    ("llama-3.2-1b", 8, 64, 4096),
    ("llama-2-13b", 16, 128, 4096),
    ("opt-30b", 8, 64, 2048),
    ("opt-30b", 32, 256, 2048),
    ("llama-2-70b", 64, 256, 4096),
    ("gpt3-175b", 64, 512, 2048),
    ("gpt3-175b", 256, 1024, 2048),
)


@cache
def tree_against_planner() -> Table:
    """Where the tree says what the planner would, and what it costs where not."""
    rows = []
    for name, gpus, batch, seq in TREE_CASES:
        model = find_model(name)
        planned = plan(Job(model, CLUSTERS[CLUSTER], batch, seq), gpus=gpus)
        advice, axes = tree(model, gpus)
        hiding = plan(replace(planned.job, framework=FRAMEWORKS["megatron-bridge"]), gpus=gpus)
        behind = [_behind(one, axes) for one in (planned, hiding)]
        show = lambda a: f"{a[0]}·{a[1]}·{a[2]}"
        rows.append([f"{name} on {gpus}", advice, show(axes), show(planned.best.axes), *behind])
    return Table(["model", "the tree says", "d·t·p", "planner", "behind", "where TP hides"], rows)


def _row(planned: Plan, axes: tuple[int, int, int]):
    """The planner's row of sizes (d, t, p); None where they cannot be."""
    return next((row for row in planned.by_axes if row.axes[:3] == axes), None)


def _behind(planned: Plan, axes: tuple[int, int, int]) -> str:
    row = _row(planned, axes)
    return "does not fit" if row is None else f"{row.seconds / planned.best.seconds - 1:.0%}"


# -- practice: a cost model of one's own ----------------------------------------------------------


class Given(NamedTuple):
    """A job as a cost model sees it: N parameters, L layers of width h, `batch` sequences of s tokens. C in
    FLOP/s, W of a link in a node and R of a port in bytes/s are those that are reached. node: its GPUs.
    """

    N: float
    L: int
    h: int
    s: int
    batch: int
    C: float
    W: float
    R: float
    node: int


class Cut(NamedTuple):
    """A layout: b sequences in a microbatch, v chunks on a rank, the ZeRO stage, again: 1 where every layer's
    forward runs twice.
    """

    d: int
    t: int
    p: int
    b: int
    v: int
    zero: int
    again: float


def step_seconds(job, cut):
    """Seconds of a step of `job`, a Given, under `cut`, a Cut."""

    def bandwidth(ranks, stride):
        inside = ranks * stride <= job.node
        return job.W if inside else min(job.W, job.R * max(1, job.node // stride))

    tokens, m = cut.b * job.s, job.batch / (cut.d * cut.b)
    share = job.N / (cut.t * cut.p)  # of the parameters, on a rank
    matrices = 6 * share * tokens / job.C
    attention = 6 * job.L * tokens * job.s * job.h / (cut.t * cut.p) / (0.8 * job.C)
    compute = (matrices + attention) * (1 + cut.again / 3)
    tp = 20 * tokens * job.h * job.L / cut.p * (cut.t - 1) / cut.t / bandwidth(cut.t, 1)
    bubble = (cut.p - 1) / (m * cut.v + cut.p - 1)
    dp = 4 * share * (cut.d - 1) / cut.d / bandwidth(cut.d, cut.t)
    hides = compute + tp
    if cut.zero == 3:
        dp, hides = 1.5 * m * dp, m * hides
    return m * (compute + tp) / (1 - bubble) + max(0.2 * dp, dp - hides)


# What is reached of what is printed, in FLOP/s, of a link, of a port.
_REACHED = {"dgx-a100": (0.70, 0.76, 0.68), "dgx-h100": (0.56, 0.76, 0.68)}
# Two jobs, the second not shown. Of each twelve layouts that fit, (d, t, p, b, v, zero, again): each axis
# where it is best and where it is worst, TP over nodes, as many microbatches as stages, ZeRO-3 with many.
_JOBS = {
    ("opt-30b", "dgx-a100", 256, 2048): (
        *((32, 1, 1, 2, 1, 3, 0), (16, 2, 1, 2, 1, 2, 0), (8, 4, 1, 4, 1, 1, 0), (4, 8, 1, 8, 1, 1, 0)),
        *((8, 1, 4, 1, 3, 1, 0), (2, 1, 16, 1, 1, 1, 0), (16, 2, 1, 1, 1, 3, 0), (16, 1, 2, 1, 1, 1, 1)),
        *((2, 8, 2, 4, 1, 1, 0), (32, 1, 1, 8, 1, 3, 1), (4, 1, 8, 8, 1, 1, 1), (1, 2, 16, 16, 1, 0, 1)),
    ),
    ("llama-3-70b", "dgx-h100", 128, 8192): (
        *((64, 1, 1, 2, 1, 3, 1), (16, 4, 1, 1, 1, 3, 0), (2, 4, 8, 1, 1, 1, 0), (8, 8, 1, 1, 1, 1, 0)),
        *((4, 8, 2, 1, 4, 1, 0), (4, 16, 1, 2, 1, 1, 0), (1, 64, 1, 16, 1, 0, 0), (1, 8, 8, 2, 1, 0, 0)),
        *((4, 4, 4, 1, 5, 1, 1), (2, 2, 16, 1, 1, 1, 1), (4, 8, 2, 16, 1, 1, 1), (8, 4, 2, 2, 1, 1, 1)),
    ),
}
TOLD_APART, ORDERED, NEAR = 1.1, 0.90, 0.12  # by a factor; share of such pairs in order; mean error


def _given(name: str, cluster: str, batch: int, seq_len: int) -> Given:
    model, link, of = find_model(name), CLUSTERS[cluster], _REACHED[cluster]
    reached = (
        of[0] * link.device.flops,
        of[1] * link.intra_node_bandwidth,
        of[2] * link.inter_node_bandwidth,
    )
    sizes = model.params, model.layers, model.hidden, seq_len, batch
    return Given(*sizes, *reached, link.gpus_per_node)


def layout_of(cut: Cut) -> Layout:
    """The planner's layout of a Cut: with sequence parallelism wherever there is TP."""
    return Layout(
        dp=cut.d,
        tp=cut.t,
        pp=cut.p,
        microbatch=cut.b,
        interleave=cut.v,
        schedule="interleaved" if cut.v > 1 else "1F1B",
        zero=cut.zero,
        sequence_parallel=cut.t > 1,
        recompute="full" if cut.again else "none",
    )


def as_written(job: Job, layout: Layout) -> tuple[Given, Cut]:
    """A planner's job and layout in the words of the practice; `again` is a share where some layers are."""
    cluster = next(name for name, one in CLUSTERS.items() if one == job.cluster)
    again = 0.0
    if layout.recompute == "full":
        again = layout.recomputed * layout.pp / job.model.layers if layout.recomputed else 1.0
    cut = layout.dp, layout.tp, layout.pp, layout.microbatch, layout.interleave, layout.zero, again
    return _given(job.model.name, cluster, job.global_batch, job.seq_len), Cut(*cut)


@cache
def _planned() -> dict[tuple, list[Estimate]]:
    """What the planner says of each job's layouts."""
    said = {}
    for (name, cluster, batch, seq_len), cuts in _JOBS.items():
        job = Job(find_model(name), CLUSTERS[cluster], batch, seq_len)
        said[name] = [estimate(job, layout_of(Cut(*cut))) for cut in cuts]
    return said


def _agreement(seconds: list[float], planned: list[Estimate]) -> tuple[float, float]:
    """(the share of pairs more than 10 % apart that are in the planner's order, the mean relative error)."""
    theirs = [one.step_seconds for one in planned]
    pairs = [(i, k) for i, k in combinations(range(len(theirs)), 2) if _apart(theirs[i], theirs[k])]
    right = sum((seconds[i] < seconds[k]) == (theirs[i] < theirs[k]) for i, k in pairs)
    errors = [abs(mine / other - 1) for mine, other in zip(seconds, theirs)]
    return right / len(pairs), sum(errors) / len(errors)


def _apart(a: float, b: float) -> bool:
    return max(a, b) > TOLD_APART * min(a, b)


def _by_job(run: Run) -> dict[str, list[float]]:
    """A job's name -> the seconds that were answered for its layouts."""
    values = iter(run.values)
    return {name: [next(values) for _ in planned] for name, planned in _planned().items()}


def _off(run: Run, _) -> tuple[str, str] | None:
    """Where an attempt is not as near to the planner as a careful one is."""
    for which, (name, seconds) in enumerate(_by_job(run).items()):
        planned = _planned()[name]
        in_order, error = _agreement(seconds, planned)
        if in_order >= ORDERED and error <= NEAR:
            continue
        off = lambda pair: abs(math.log(max(pair[0], 1e-9) / pair[1].step_seconds))
        mine, theirs = max(zip(seconds, planned), key=off)
        job = "OPT-30B on 32 A100" if which == 0 else "the second job, which you have not seen"
        return "layouts in another order" if in_order < ORDERED else "too far from the planner", (
            f"For {job}, {in_order:.0%} of the pairs are in order, and the mean error is {error:.0%}."
            f" {theirs.layout} takes {mine:.1f} s by yours, and {theirs.step_seconds:.1f} s by the planner."
        )
    return None


def _near(run: Run, _) -> list[tuple[str, str, str]]:
    rows = []
    for name, seconds in _by_job(run).items():
        in_order, error = _agreement(seconds, _planned()[name])
        rows.append((f"{name}: pairs in the planner's order", f"{in_order:.0%}", f"at least {ORDERED:.0%}"))
        rows.append((f"{name}: mean error", f"{error:.0%}", f"at most {NEAR:.0%}"))
    return rows


written = Asked(
    "a cost model of your own",
    step_seconds,
    minutes=15,
    hints=[
        "Begin with one microbatch on one rank: tokens = b·s, and the rank has N/(t·p) of the parameters.",
        "Then m = batch/(d·b) microbatches, longer by the bubble. DP comes once a step, under ZeRO-3"
        " 1.5 times for each microbatch.",
        "bandwidth(t, 1) for TP, bandwidth(d, t) for DP. What shows of DP is"
        " max(0.2·dp, dp − what hides it).",
    ],
    cases=lambda: [(_given(*job), Cut(*cut)) for job, cuts in _JOBS.items() for cut in cuts],
    reads=number,
    compares=False,  # more than one model is near enough
    tolerance=1e-6,
    praise="Your lines order layouts as the planner does, on a job that you had not seen as well.",
    figures=_near,
    finds=_off,
    mistakes="""
        no number of seconds
            Return one number, the seconds of a step.
            ~ form
        a field that is not there
            job has N, L, h, s, batch, C, W, R and node; cut has d, t, p, b, v, zero and again.
            ! has no attribute
        the bubble forgotten
            A rank waits in p − 1 of m·v + p − 1 slots. Divide what it computes by 1 − that share.
            - / (1 - bubble) => / 1
        the bubble's other definition
            (p−1)/(m·v) is a share of the time without a bubble. Of the step it is (p−1)/(m·v+p−1).
            - / (m * cut.v + cut.p - 1) => / (m * cut.v)
        TP without (t−1)/t
            A rank keeps its own part: it sends (t−1)/t of the bytes. On one rank that is none.
            - * (cut.t - 1) / cut.t / => /
        bytes of one direction
            TP sends in forward and in backward. 20·T·h·L/p has both.
            - tp = 20 => tp = 10
        gradients not divided by t·p
            A rank has N/(t·p) of the parameters, and sends no other gradients.
            - dp = 4 * share => dp = 4 * job.N
        the node's link where the network's is due
            A group whose ranks lie over several nodes is as fast as the ports.
            - job.W if inside else min(job.W, job.R * max(1, job.node // stride)) => job.W
        all of DP shows
            Most of DP's traffic hides under backward. Only what is longer shows, and a fifth always.
            - max(0.2 * dp, dp - hides) => dp
        one microbatch for the step
            A step has m microbatches on each rank.
            - return m * => return
        layouts in another order
            Which of its terms do you not have, or have twice?
        too far from the planner
            Which of its terms do you not have, or have twice?
    """,
)


# -- practice: four quick cases -------------------------------------------------------------------

ANSWERS = ("DP alone", "TP in the node", "TP in the node, PP across, DP on top", "FSDP")
REASONS = (
    "too large for a node",
    "the model's code stays as it is, and all ranks share its states",
    "the states fit one GPU with room to spare",
    "too large for a GPU, and links inside the node are fast",
)
# Case -> each right answer with its right reasons; why; parameters, d, t, p and the ZeRO stage with which its
# states fit a GPU of 80 GB and leave room.
QUICK = {
    "1B on 8 GPUs with NVLink": (
        {0: (2,)},
        "16 bytes a parameter are 16 GB: nothing needs cutting, and DP sends least.",
        (1e9, 8, 1, 1, 0),
    ),
    "30B on 8 GPUs with NVLink": (
        {1: (3,), 3: (1,)},
        "480 GB of states do not fit a GPU; in one node TP's all-reduces run over NVLink. (FSDP is a fair"
        " alternative.)",
        (30e9, 1, 8, 1, 0),
    ),
    "200B on 64 GPUs in 8 nodes": (
        {2: (0,)},
        "3,200 GB of states do not fit a node. All 64 GPUs would hold them, 50 GB each, but then every weight"
        " crosses nodes and every layer is recomputed: for 175B on 64 the planner finds that an eighth"
        " slower. TP fills the node, PP goes across, DP takes what is left.",
        (200e9, 2, 8, 4, 1),
    ),
    "13B on 16 GPUs in 2 nodes, for a team that will not change its model": (
        {3: (1,)},
        "208 GB over 16 GPUs are 13 GB each with FSDP, and it wraps the model as it is.",
        (13e9, 16, 1, 1, 3),
    ),
}


def quick(case):
    """(answer, reason) for a case: one of d13.ANSWERS and one of d13.REASONS."""
    from drops.d13 import ANSWERS, QUICK, REASONS

    # 16 bytes a parameter, against a GPU of 80 GB, then a node of eight; and what the team would not change.
    answer, reason = [(0, 2), (1, 3), (2, 0), (3, 1)][list(QUICK).index(case)]
    return ANSWERS[answer], REASONS[reason]


def _indices(reply) -> tuple[int, int]:
    answer, reason = reply[:]  # a set has no order, and no slices
    if answer in REASONS and reason in ANSWERS:
        raise Form("The answer comes first, and then its reason; you return them the other way round")
    return ANSWERS.index(answer.strip()), REASONS.index(reason.strip())


def _first_unfit(run: Run, _) -> tuple[str, str] | None:
    for (case, (fits, why, _)), (answer, reason) in zip(QUICK.items(), run.values):
        if answer not in fits:
            name = "more than needed" if 0 in fits else "another axis than needed"
            return name, f"{case}: not {ANSWERS[answer]!r}. {why}"
        if reason not in fits[answer]:
            said = f"{case}: {ANSWERS[answer]!r} is right, but not because {REASONS[reason]}."
            return "right for another reason", said
    return None


def _as_sizes(run: Run) -> Answer:
    """Praise, with d·t·p of each case and the bytes of states on a GPU."""
    lines = []
    for case, (*_, (params, d, t, p, zero)) in QUICK.items():
        size = sum(states(params / (t * p), d, zero).values())
        lines.append((case, f"{d}·{t}·{p}, {human(size)} of states a GPU", ""))
    return right(
        "Four cases, and four reasons that would stand in a meeting. As sizes d·t·p, whose product is the"
        " number of GPUs:",
        *lines,
    )


cases = Asked(
    "four quick cases",
    quick,
    minutes=3,
    hints=[
        "Begin with 16 bytes a parameter, and compare with a GPU of 80 GB, then with a node of eight.",
        "1B: 16 GB. 30B: 480 GB. 200B: 3,200 GB. 13B: 208 GB.",
        "Then what the team wants. FSDP wraps a model as it is; TP and PP change its code.",
    ],
    cases=[(case,) for case in QUICK],
    reads=_indices,
    compares=False,
    praise=_as_sizes,
    finds=_first_unfit,
    mistakes="""
        no answer with a reason
            Return one of d13.ANSWERS and one of d13.REASONS, as they are written.
            ~ form
        more than needed
        another axis than needed
        right for another reason
    """,
)
