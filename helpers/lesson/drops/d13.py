"""Drop 13: the planner in the reader's hands, a rule of thumb held against it, and four quick cases."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import cache

from ...table import Table, human
from ...theory import CLUSTERS, Job, Plan, plan
from ...theory.frameworks import FRAMEWORKS
from ...theory.meeting import TOKENS_PER_PARAMETER, gpu_hours
from ...theory.memory import states
from ...theory.models import ModelShape, find_model
from ..practice import Answer, Exercise, ask, right, wrong

MODEL, CLUSTER, GPUS, BATCH, SEQ = "opt-30b", "dgx-a100", 32, 256, 2048


@cache
def the_plan() -> Plan:
    """OPT-30B on 32 A100s in four nodes, 256 sequences of 2048 tokens in a step."""
    return plan(Job(find_model(MODEL), CLUSTERS[CLUSTER], BATCH, SEQ), gpus=GPUS)


def refused() -> Table:
    """One (dp, tp, pp) of each kind that is out, and why."""
    p = the_plan()
    bare = replace(p.job.framework, zeros=(0,), zeros_in_pipeline=(0,), recomputes=("none",))
    alone = plan(replace(p.job, framework=bare), gpus=GPUS)
    rows = [[str(axes), why.split(";")[0]] for axes, why in list(p.impossible.items())[:2]]
    rows.append(
        [
            "DP 32 without ZeRO or recompute",
            alone.why(dp=32).split(")")[-1].strip().removeprefix("it does not fit: "),
        ]
    )
    return Table(["layout", "why not"], rows)


def flips() -> Table:
    """The smallest changes that make another (dp, tp, pp) win, and how far the first three of now are behind
    it then.
    """
    first = [row.axes for row in the_plan().by_axes[:3]]
    rows = []
    for what, factor, winner in the_plan().flips():
        then = {row.axes: row.seconds for row in the_plan().changed(what, factor).by_axes}
        rows.append(
            [
                what,
                f"× {factor:g}",
                str(winner.axes),
                *(f"{then[axes] / winner.seconds - 1:.1%}" for axes in first),
            ]
        )
    return Table(
        ["change", "by", "then wins", *map(str, first)],
        rows,
        title="the first three of today, and how much slower than the new winner they would be",
    )


def by_framework() -> Table:
    """The winner of the same job under frameworks that count bytes in their own ways."""
    rows = []
    for name in ("deepspeed", "megatron-lm", "torchtitan"):
        framework = FRAMEWORKS[name]
        best = plan(replace(the_plan().job, framework=framework), gpus=GPUS).best
        sizes = (framework.weight_bytes, framework.gradient_bytes, framework.optimizer_bytes)
        rows.append([name, " + ".join(map(str, sizes)), str(best.layout), f"{best.seconds:.1f} s"])
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


def tree(model: ModelShape, gpus: int, cluster=CLUSTERS[CLUSTER]) -> tuple[str, tuple[int, int, int]]:
    """The decision tree of this drop: what it says, and as (d, t, p).

    It keeps 40 % of the memory for activations.
    """
    room = 0.6 * cluster.device.memory
    need = sum(states(model.params).values())
    t = max(
        k
        for k in range(1, cluster.gpus_per_node + 1)
        if cluster.gpus_per_node % k == 0 and model.heads % k == 0
    )
    if need <= room:
        return "fits one GPU: DP", (gpus, 1, 1)
    if need <= room * cluster.gpus_per_node or gpus <= cluster.gpus_per_node:
        return "fits one node: FSDP" if need <= room * cluster.gpus_per_node else "only one node: FSDP", (
            gpus,
            1,
            1,
        )
    for p in (k for k in range(1, gpus // t + 1) if (gpus // t) % k == 0 and model.layers % k == 0):
        if need / (t * p) <= room:
            return "else: TP in the node, PP across, DP on top", (gpus // (t * p), t, p)
    return "else: TP in the node, PP across, DP on top", (1, t, gpus // t)


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
        row = next((r for r in planned.by_axes if r.axes[:3] == axes), None)
        behind = "does not fit" if row is None else f"{row.seconds / planned.best.seconds - 1:.0%}"
        show = lambda a: f"{a[0]}·{a[1]}·{a[2]}"
        rows.append([f"{name} on {gpus}", advice, show(axes), show(planned.best.axes), behind])
    return Table(["model", "the tree says", "d·t·p", "planner", "behind"], rows)


# -- practice ------------------------------------------------------------------------------------


def pick():
    """(d, t, p) for OPT-30B on 32 A100s in four nodes of eight."""
    return 16, 2, 1


def _judge_pick(attempted) -> Answer:
    (answer,) = ask(attempted)
    try:
        d, t, p = (operator.index(x) for x in answer)
    except (TypeError, ValueError):
        return wrong("no layout", f"You return {answer!r}; return three whole numbers d, t, p.")
    planned = the_plan()
    if min(d, t, p) < 1 or d * t * p != GPUS:
        return wrong("d·t·p is not 32", f"{d}·{t}·{p} = {d * t * p}.")
    row = next((r for r in planned.by_axes if r.axes[:3] == (d, t, p)), None)
    why = planned.why(dp=d, tp=t, pp=p)
    if row is None:
        return wrong("it cannot be", f"DP {d} · TP {t} · PP {p}: {why}.")
    score = planned.best.seconds / row.seconds
    figures = [
        ("speed, the best being 1", f"{score:.3f}", "at least 0.95"),
        ("the fastest layout of these sizes", str(row.layout), ""),
        ("memory of the fullest GPU", human(row.memory), human(CLUSTERS[CLUSTER].device.memory)),
    ]
    if score >= 0.95:
        return right(f"It is {why}.", *figures)
    if t > CLUSTERS[CLUSTER].gpus_per_node:
        return wrong("TP beyond the node", f"A node has eight GPUs. It is {why}.", *figures)
    if t * p >= 16:
        return wrong(
            "more model parallelism than needed",
            f"It fits with far less of it, and every axis has its price. It is {why}.",
            *figures,
        )
    return wrong("more than five percent behind", f"It is {why}.", *figures)


tuple_ = Exercise(
    "DP, TP, PP for 30B on 32",
    pick,
    _judge_pick,
    minutes=5,
    hints=[
        "States alone: 16 bytes × 30·10⁹ = 480 GB. ZeRO cuts them over d, so even t = p = 1 need not fail.",
        (
            "TP costs in every layer, so no more of it than memory asks for. Look at the first rows of the"
            " table."
        ),
        "t = 2, p = 1 leaves d = 16: two nodes' worth of copies, and a small tp group inside a node.",
    ],
)

ANSWERS = ("DP alone", "TP in the node", "TP in the node, PP across, DP on top", "FSDP")
REASONS = (
    "too large for a node",
    "the model's code stays as it is, and all ranks share its states",
    "the states fit one GPU with room to spare",
    "too large for a GPU, and links inside the node are fast",
)
_KEY = {
    "1B on 8 GPUs with NVLink": (0, 2),
    "30B on 8 GPUs with NVLink": (1, 3),
    "200B on 64 GPUs in 8 nodes": (2, 0),
    "13B on 16 GPUs in 2 nodes, for a team that will not change its model": (3, 1),
}
QUICK = tuple(_KEY)


# (d, t, p) and the ZeRO stage for each case, with which its states fit a GPU of 80 GB and leave room.
_SIZES = ((1e9, 8, 1, 1, 0), (30e9, 1, 8, 1, 0), (200e9, 2, 8, 4, 1), (13e9, 16, 1, 1, 3))


def as_sizes() -> list[tuple[str, tuple[int, int, int], float]]:
    """(case, (d, t, p), bytes of states on a GPU)"""
    return [
        (case, (d, t, p), sum(states(params / (t * p), d, zero).values()))
        for case, (params, d, t, p, zero) in zip(QUICK, _SIZES)
    ]


def quick(case):
    """(answer, reason) for a case: one of d13.ANSWERS and one of d13.REASONS."""
    from helpers.lesson.drops.d13 import ANSWERS, QUICK, REASONS

    answer, reason = [(0, 2), (1, 3), (2, 0), (3, 1)][QUICK.index(case)]
    return ANSWERS[answer], REASONS[reason]


def _judge_quick(attempted) -> Answer:
    replies = ask(attempted, [(case,) for case in QUICK])
    for (case, (answer, reason)), mine in zip(_KEY.items(), replies):
        if (
            not isinstance(mine, (tuple, list))
            or len(mine) != 2
            or mine[0] not in ANSWERS
            or mine[1] not in REASONS
        ):
            return wrong(
                "no answer with a reason",
                f"{case}: you return {mine!r}; return one of d13.ANSWERS and one of d13.REASONS, as they"
                " are written.",
            )
        # FSDP: for its own reason, or for TP's, which is one for any cut inside the node.
        fair = case.startswith("30B") and mine[0] == ANSWERS[3]
        reasons = (1, 3) if fair else (reason,)
        if mine[0] != ANSWERS[answer] and not fair:
            why = {
                0: "16 bytes a parameter are 16 GB: nothing needs cutting, and DP sends least.",
                1: (
                    "480 GB of states do not fit a GPU; in one node TP's all-reduces run over NVLink. (FSDP"
                    " is a fair alternative.)"
                ),
                2: (
                    "3,200 GB of states do not fit a node. All 64 GPUs would hold them, 50 GB each, but then"
                    " every weight crosses nodes and every layer is recomputed: for 175B on 64 the planner"
                    " finds that an eighth slower. TP fills the node, PP goes across, DP takes what is left."
                ),
                3: "208 GB over 16 GPUs are 13 GB each with FSDP, and it wraps the model as it is.",
            }[answer]
            return wrong(
                "more than needed" if answer == 0 else "another axis than needed",
                f"{case}: not {mine[0]!r}. {why}",
            )
        if mine[1] not in [REASONS[k] for k in reasons]:
            return wrong(
                "right for another reason", f"{case}: {mine[0]!r} is right, but not because {mine[1]}."
            )
    return right(
        "Four cases, and four reasons that would stand in a meeting. As sizes d·t·p, whose product is the"
        " number of GPUs:",
        *((case, f"{d}·{t}·{p}, {human(held)} of states a GPU", "") for case, (d, t, p), held in as_sizes()),
    )


cases = Exercise(
    "four quick cases",
    quick,
    _judge_quick,
    minutes=3,
    hints=[
        "Begin with 16 bytes a parameter, and compare with a GPU of 80 GB, then with a node of eight.",
        "1B: 16 GB. 30B: 480 GB. 200B: 3,200 GB. 13B: 208 GB.",
        "Then what the team wants. FSDP wraps a model as it is; TP and PP change its code.",
    ],
)
