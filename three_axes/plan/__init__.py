"""Formulas for the time and memory of a training step. They need neither torch nor a GPU.

job = Job(model, cluster, global_batch=…, seq_len=…, framework=…)   what is to be trained, and on what
estimate(job, layout)                                               time and memory of one layout
plan(job, gpus=…)                                                   all layouts that fit, fastest first
"""

from ..doors import door
from ..paper.hardware import CLUSTERS, Cluster, Device

# The package's public names, by module. A module is loaded when one of its names is first used.
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
