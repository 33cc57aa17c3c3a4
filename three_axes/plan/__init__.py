"""What paper says: closed formulas, small enough to be redone by hand. Neither torch nor a GPU needed.

job = Job(model, cluster, global_batch=…, seq_len=…, framework=…)   what is to be trained, and on what
estimate(job, layout)                                               time and memory of one layout
plan(job, gpus=…)                                                   all layouts, ranked, and why
"""

from ..paper.hardware import CLUSTERS, DEVICES, Cluster, Device, Network
from .estimate import Estimate, estimate
from .frameworks import FRAMEWORKS, Framework
from .job import Job
from .layout import Axes, Layout
from .models import MODELS, ModelShape
from .planner import Plan, plan
