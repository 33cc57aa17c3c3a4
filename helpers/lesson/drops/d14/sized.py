"""Drop 14: the 70B sized, and the real model traced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ....runtime.trace import Trace, trace
from ....table import Table, human
from ....theory import CLUSTERS, Job, Layout, Plan, plan
from ....theory.memory import stage_memory, states
from ....theory.models import find_model
from ....theory.traced import beyond, microbatches, traced_job
from ....theory.traffic import calls

MODEL, CLUSTER, GPUS, BATCH, SEQ = find_model("llama-3-70b"), CLUSTERS["dgx-h100"], 64, 128, 8192


@cache
def the_plan() -> Plan:
    """Llama-3-70B on 64 H100s in eight nodes, 128 sequences of 8192 tokens in a step; on the three axes of
    the course.
    """
    return plan(Job(MODEL, CLUSTER, BATCH, SEQ), gpus=GPUS, cp=1)


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
