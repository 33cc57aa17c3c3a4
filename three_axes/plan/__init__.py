"""Closed formulas for time and memory, small enough to be redone by hand. They need neither torch nor a GPU.

job = Job(model, cluster, global_batch=…, seq_len=…, framework=…)   what is to be trained, and on what
estimate(job, layout)                                               time and memory of one layout
plan(job, gpus=…)                                                   all layouts, ranked, and why
"""

from ..doors import door
from ..paper.hardware import CLUSTERS, Cluster, Device

__getattr__, __dir__ = door(
    __name__,
    frameworks=["FRAMEWORKS", "TOY"],
    interruptions=["what_it_stops"],
    job=["Job", "Lora"],
    layout=["Axes", "Layout"],
    meeting=["TOKENS_PER_PARAMETER", "Proposal"],
    memory=["BYTES_PER_PARAMETER", "room"],
    models=["MODELS", "find_model"],
    page=["document"],
    planner=["Plan", "plan"],
    shape=["ModelShape"],
    step=["Estimate", "estimate"],
    traced=["beyond", "traced_job"],
    traffic=["calls", "sent"],
    validation=["bubble_rates", "table"],
)
