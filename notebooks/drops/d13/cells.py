"""Functions for the cells of drop 13's notebook."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from drops.measured import product_speed, reduce_speed
from helpers.practice import Answer, right, wrong
from three_axes.paper import by_hand
from three_axes.plan import (
    CLUSTERS,
    FRAMEWORKS,
    TOKENS_PER_PARAMETER,
    Job,
    Layout,
    ModelShape,
    Plan,
    estimate,
    find_model,
    plan,
)
from three_axes.table import Table

from .exercises import Cut, as_written, cost, layout_of

if TYPE_CHECKING:
    from helpers import World

MODEL, CLUSTER, GPUS, BATCH, SEQ = "opt-30b", "dgx-a100", 32, 256, 2048


def the_job() -> Job:
    """OPT-30B on A100s in nodes of eight, 256 sequences of 2048 tokens in a step."""
    return Job(find_model(MODEL), CLUSTERS[CLUSTER], BATCH, SEQ)


@cache
def the_plan() -> Plan:
    """The plan for 32 of these GPUs."""
    return plan(the_job(), gpus=GPUS)


def first_line(*, d: object, t: object, p: object) -> Answer:
    """Check the sizes in the notebook's first code cell: whether (DP, TP, PP) is possible on 32 GPUs."""
    sizes = d, t, p
    if ... in sizes:
        return Answer("not started", "Write three numbers in place of the dots, and run this cell again.")
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return wrong("no sizes", "Each size is a whole number, 1 or more.")
    if math.prod(sizes) != GPUS:
        return wrong(
            "another number of GPUs", f"{d} · {t} · {p} is {math.prod(sizes)}, and there are {GPUS}."
        )
    try:
        estimate(the_job(), Layout(dp=d, tp=t, pp=p))
    except ValueError as e:
        return wrong("it cannot be", f"{e}.")
    return right(
        f"It can be, if it fits. Ask `plan.why(dp={d}, tp={t}, pp={p})` when the plan below is made."
    )


def answer(plan: Plan) -> tuple[str, str, str]:
    """The arguments of `guess.reveal`: the TP of up to 8 whose fastest layout is no tie with the fastest."""
    best: dict[int, float] = {}
    for row in plan.by_axes:  # fastest first
        best.setdefault(row.axes.tp, row.seconds)
    tie = (1 + plan.sure.apart) * plan.best.seconds
    slow = [str(tp) for tp, seconds in best.items() if tp <= 8 and seconds > tie]
    why = (
        f"The fastest is {plan.best.layout}. More TP than that costs more time. ZeRO cuts memory as well, and"
        f" its traffic mostly hides.\n\nDP 4 · TP 8 is {plan.why(dp=4, tp=8)}"
    )
    return " and ".join(slow), why, "Computed"


def refused() -> Table:
    """Examples of layouts that cannot be or do not fit, each for another reason."""
    p = the_plan()
    bare = p.job.framework.but(zeros=(0,), zeros_in_pipeline=(0,), recomputes=("none",))
    alone = plan(replace(p.job, framework=bare), gpus=GPUS).why(dp=32)
    rows = [[str(axes), why.split(";")[0]] for axes, why in list(p.impossible.items())[1:2]]
    layers, stages = find_model("llama-2-13b").layers, 3
    counted = f"{layers} + 2 do, with the embedding and the output layer counted"
    too_much = alone.split(")")[-1].strip().removeprefix("needs ")
    try:
        estimate(p.job, Layout(dp=32, microbatch=3))
    except ValueError as e:
        rows.append(["DP 32 · b 3", str(e)])
    rows += [
        ["DP 32 without ZeRO or recompute", too_much],
        [
            f"another model, llama-2-13b: PP {stages}",
            f"{layers} layers do not divide over {stages} stages; {counted}",
        ],
    ]
    return Table(["layout", "why not"], rows)


def flips() -> Table:
    """The smallest changes of the job that make another (dp, tp, pp) the fastest, and by how much today's
    first three are then slower.
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
    """The fastest layout of the same job under frameworks that keep different bytes for a parameter."""
    rows = []
    for name in ("deepspeed", "megatron-lm", "torchtitan"):
        framework = FRAMEWORKS[name]
        best = plan(replace(the_plan().job, framework=framework), gpus=GPUS).best
        holds = framework.holds
        sizes = (holds.weight_bytes, holds.gradient_bytes, holds.optimizer_bytes)
        label = name if framework.runs.fused else f"{name}, uncompiled"
        rows.append([label, " + ".join(map(str, sizes)), str(best.layout), f"{best.seconds:.1f} s"])
    return Table(["framework", "bytes a parameter", "its fastest layout", "a step"], rows)


def finishes() -> str:
    """How long the training takes on these GPUs: by hand, at half of their peak, and by the plan."""
    p, device = the_plan(), CLUSTERS[CLUSTER].device
    params = p.job.model.params
    tokens = TOKENS_PER_PARAMETER * params
    operations = 6 * params * tokens
    by_hand = operations / (GPUS * device.flops / 2) / 86400
    by_plan = p.estimate(p.best).gpu_hours(tokens) / GPUS / 24
    peak = f"{device.flops / 1e12:.0f}·10¹²"
    return (
        f"{TOKENS_PER_PARAMETER} tokens for each parameter: {tokens / 1e9:.0f}·10⁹ tokens."
        f" 6 · {params / 1e9:.1f}·10⁹ · {tokens / 1e9:.0f}·10⁹ = {operations / 1e21:.0f}·10²¹ operations.\n"
        f"{GPUS} GPUs at half of {peak} a second: {by_hand:.0f} days.\n"
        f"By the plan they reach {by_hand / 2 / by_plan:.0%} of {peak}: {by_plan:.0f} days."
        f" Eight of ten such runs take {p.sure.low * by_plan:.0f} to {p.sure.high * by_plan:.0f}."
    )


LEFT_OUT = (  # what the lines leave out; model, cluster, batch, tokens; two layouts that it parts
    ("the output layer", ("llama-3-8b", "dgx-h100", 64, 8192), Cut(2, 1, 4, v=8), Cut(4, 2, 1)),
    ("TP under products", ("llama-3-70b", "dgx-h100", 128, 8192), Cut(4, 8, 2, v=8), Cut(2, 4, 8)),
    ("recompute's sums of TP", ("llama-3-70b", "dgx-h100", 128, 8192), Cut(8, 8, 1, again=1), Cut(8, 8, 1)),
    ("small products", ("opt-30b", "dgx-b200", 512, 2048), Cut(32, 2, 1), Cut(32, 2, 1, b=4)),
)


def left_out() -> Table:
    """For each term that the lines leave out, two layouts that it parts: how much longer the first takes, by
    the lines and by the planner under Megatron-LM.
    """
    rows = []
    for what, (model, cluster, batch, tokens), *cuts in LEFT_OUT:
        job = Job(find_model(model), CLUSTERS[cluster], batch, tokens, FRAMEWORKS["megatron-lm"])
        mine = [cost(as_written(job, Layout())[0], cut).seconds for cut in cuts]
        theirs = [estimate(job, layout_of(cut)).step_seconds for cut in cuts]
        longer = (f"{a / b - 1:+.1%}" for a, b in (mine, theirs))
        on = f"{model}, {cluster.removeprefix('dgx-').upper()}, {tokens:,}"
        rows.append([what, on, *map(str, cuts), *longer])
    return Table(["left out", "model, GPU, tokens", "first", "second", "by the lines", "the planner"], rows)


def reached(world: World) -> Table:
    """The FLOP/s and bytes/s that this machine reaches, for C and W of a cost model: on GPUs in bfloat16, in
    which large models compute.
    """
    dtype, what = torch.float32, "a float32 product on one core"
    if world.gpus:
        dtype, what = torch.bfloat16, "a bfloat16 product on a GPU; a step reaches 0.77 of it (A100: 0.80)"
    rows = [
        ["C", f"{world.run(product_speed, dtype)[0] / 1e9:,.0f} GFLOP/s", what],
        [
            "W",
            f"{min(world.run(reduce_speed)) / 1e9:.2f} GB/s",
            f"busbw of an all-reduce over {world.n} ranks",
        ],
        ["R", "n/a", "there is one node here"],
    ]
    return Table(["", "reached", "by"], rows)


def tree(model: ModelShape, gpus: int) -> tuple[str, tuple[int, int, int]]:
    """The decision tree of this drop: (its advice, the advice as (d, t, p)).

    The tree leaves 40 % of the memory for activations.
    """
    cluster = CLUSTERS[CLUSTER]
    node, room = cluster.gpus_per_node, 0.6 * cluster.device.memory
    need = sum(by_hand.states_bytes(model.params))
    if need <= room:
        return "fits one GPU: DP", (gpus, 1, 1)
    if need <= room * node:
        return "fits one node: FSDP", (gpus, 1, 1)
    t = math.gcd(node, model.heads)
    if gpus <= node:
        return "only one node: TP in it", (gpus // math.gcd(t, gpus), math.gcd(t, gpus), 1)
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
    """The tree's advice beside the planner's for TREE_CASES, and by how much the advice is slower."""
    rows = []
    for name, gpus, batch, seq in TREE_CASES:
        model = find_model(name)
        planned = plan(Job(model, CLUSTERS[CLUSTER], batch, seq), gpus=gpus)
        advice, axes = tree(model, gpus)
        hiding = plan(replace(planned.job, framework=FRAMEWORKS["megatron-bridge"]), gpus=gpus)
        behind = [_behind(by, axes) for by in (planned, hiding)]
        show = lambda a: f"{a[0]}·{a[1]}·{a[2]}"
        rows.append([f"{name} on {gpus}", advice, show(axes), show(planned.best.axes), *behind])
    return Table(["model", "the tree says", "d·t·p", "planner", "behind", "where TP hides"], rows)


def _row(planned: Plan, axes: tuple[int, int, int]):
    """The planner's row of sizes (d, t, p); None if these are impossible or do not fit."""
    return next((row for row in planned.by_axes if row.axes[:3] == axes), None)


def _behind(planned: Plan, axes: tuple[int, int, int]) -> str:
    row = _row(planned, axes)
    return "does not fit" if row is None else f"{row.seconds / planned.best.seconds - 1:.0%}"
