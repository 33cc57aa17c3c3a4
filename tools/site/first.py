"""What a visitor does on the first page: predict which cut sends most, and order the work of a pipeline.

data/site/first.js moves it; the figures and the orders come from here.
"""

from __future__ import annotations

from three_axes.paper.hardware import CLUSTERS
from three_axes.paper.pipelines import SCHEDULES
from three_axes.paper.simulation import Timeline, paper
from three_axes.plan import Job, Layout
from three_axes.plan.models import find_model
from three_axes.plan.traffic import sent

from ..printables import rendered

JOB = Job(find_model("llama-3-8b"), CLUSTERS["dgx-h100"], global_batch=16, seq_len=4096)
GPUS = 4  # as many as first.js draws
STAGES, MICROBATCHES = 3, 4
_SHARE, _LAYERS = JOB.global_batch // GPUS, JOB.model.layers
CUTS = {
    "dp": f"Each GPU has {_SHARE} sequences and all weights. Gradients are summed once a step.",
    "tp": "Each GPU has a quarter of each matrix. Activations are summed in every layer.",
    "pp": f"Each GPU has {_LAYERS // GPUS} of {_LAYERS} layers. Activations go on, gradients come back.",
}
OF = {"dp": "the batch", "tp": "the matrices", "pp": "the layers"}
BY_TURNS = "-".join(["".join(f"F{m}B{m}" for m in range(MICROBATCHES))] * STAGES)


def gigabytes(axis: str) -> float:
    """That a GPU sends in a step of Llama 3 8B, of a middle stage where there are stages."""
    return sent(JOB, Layout(**{axis: GPUS}))[axis] / 1e9


def timeline(name: str) -> Timeline:
    return paper(SCHEDULES[name].make(STAGES, MICROBATCHES, 1))


def order(name: str) -> str:
    """Of the operations on each rank: 'F0F1F2F3B0…-F0…', as the page's address has it."""
    rows = timeline(name).rows
    return "-".join("".join(kind + label for kind, label, *_ in row) for row in rows)


def first() -> str:
    """The part of the first page that moves."""
    orders = {"one by one": BY_TURNS} | {name: order(name) for name in ("GPipe", "1F1B")}
    cuts = [(axis, OF[axis], does, f"{gigabytes(axis):.3g}") for axis, does in CUTS.items()]
    best = {"length": f"{timeline('1F1B').makespan:g}", "stages": STAGES, "microbatches": MICROBATCHES}
    return rendered("first", job=JOB, cuts=cuts, orders=orders, **best)
