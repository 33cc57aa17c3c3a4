"""Drop 13: the planner in the reader's hands, a rule of thumb held against it, and four quick cases."""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations
from typing import NamedTuple

from helpers.practice import Answer, Asked, Form, Run, number, right
from three_axes.plan import CLUSTERS, Estimate, Job, Layout, estimate, find_model, states
from three_axes.table import human

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
    from drops.d13 import ANSWERS, REASONS

    gpu, node = 80, 8 * 80
    states = 16 * int(case.partition("B")[0])  # GB, at 16 bytes a parameter
    if "will not change" in case:
        return ANSWERS[3], REASONS[1]  # TP and PP cut the model's own code
    if states < gpu / 2:
        return ANSWERS[0], REASONS[2]
    if states < node:
        return ANSWERS[1], REASONS[3]
    return ANSWERS[2], REASONS[0]


def _indices(reply) -> tuple[int, int]:
    answer, reason = reply[:]  # a set has no order, and no slices
    if answer in REASONS and reason in ANSWERS:
        raise Form("The answer comes first, and then its reason; you return them the other way round")
    return ANSWERS.index(answer.strip()), REASONS.index(reason.strip())


def _first_unfit(run: Run, _) -> tuple[str, str] | None:
    for (case, (fits, _, (params, *_))), (answer, reason) in zip(QUICK.items(), run.values):
        if answer not in fits:
            name = "more than needed" if 0 in fits else "another axis than needed"
            return name, f"{case}: not {ANSWERS[answer]!r}. Its states are {16 * params / 1e9:,.0f} GB."
        if reason not in fits[answer]:
            said = f"{case}: {ANSWERS[answer]!r} is right, but not because {REASONS[reason]}."
            return "right for another reason", said
    return None


def _as_sizes(run: Run) -> Answer:
    """Praise, with d·t·p of each case and the bytes of states on a GPU."""
    lines = []
    for case, (_, why, (params, d, t, p, zero)) in QUICK.items():
        size = sum(states(params / (t * p), d, zero).values())
        lines.append((case, f"{d}·{t}·{p}, {human(size)} of states a GPU. {why}", ""))
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
)
