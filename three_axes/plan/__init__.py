"""What paper says: closed formulas, small enough to be redone by hand. Neither torch nor a GPU needed.

job = Job(model, cluster, global_batch=…, seq_len=…, framework=…)   what is to be trained, and on what
estimate(job, layout)                                               time and memory of one layout
plan(job, gpus=…)                                                   all layouts, ranked, and why
"""

from ..doors import door
from ..paper.hardware import CLUSTERS, DEVICES, Cluster, Device
from .estimate import Estimate, estimate
from .frameworks import FRAMEWORKS, TOY, Framework
from .job import Job, Lora
from .layout import Axes, Layout
from .memory import BYTES_PER_PARAMETER, states
from .models import MODELS, ModelShape, find_model
from .planner import Plan, plan

__getattr__, __dir__ = door(  # what `plan` itself does without
    __name__,
    interruptions=["what_it_stops"],
    measured=["of_your_source"],
    meeting=["TOKENS_PER_PARAMETER", "Proposal"],
    page=["document"],
    traced=["beyond", "traced_job"],
    traffic=["calls", "sent"],
    validation=["bubble_rates", "table"],
)
