"""Makes the exercise of the site's first page: which of data, tensor and pipeline parallelism sends most?

This module computes the figures; data/site/first.js animates the exercise.
"""

from __future__ import annotations

from three_axes.plan import CLUSTERS, Job, Layout, find_model, sent

from ..printables import rendered

JOB = Job(find_model("llama-3-8b"), CLUSTERS["dgx-h100"], global_batch=16, seq_len=4096)
GPUS = 4  # first.js draws the same number
_SHARE, _LAYERS = JOB.global_batch // GPUS, JOB.model.layers
CUTS = {
    "dp": f"Each GPU has {_SHARE} sequences and all weights. Gradients are summed once a step.",
    "tp": "Each GPU has a quarter of each matrix. Activations are summed in every layer.",
    "pp": f"Each GPU has {_LAYERS // GPUS} of {_LAYERS} layers. Activations go on, gradients come back.",
}
OF = {"dp": "the batch", "tp": "the matrices", "pp": "the layers"}


def gigabytes(axis: str) -> float:
    """GB that a GPU sends in a step of Llama 3 8B; on a middle stage if there are stages."""
    return sent(JOB, Layout(**{axis: GPUS}))[axis] / 1e9


def first() -> str:
    """The part of the first page that is animated."""
    cuts = [(axis, OF[axis], does, f"{gigabytes(axis):.3g}") for axis, does in CUTS.items()]
    return rendered("first", job=JOB, cuts=cuts)
