"""What paper says: closed formulas, small enough to be redone by hand. Neither torch nor a GPU needed.

estimate(model, layout, cluster, global_batch=…, seq_len=…)   time and memory of one layout
plan(model, cluster, gpus=…, global_batch=…, seq_len=…)       all layouts, ranked, and why
"""

from .cost import Estimate, estimate
from .hardware import CLUSTERS, DEVICES, Cluster, Device
from .layout import Layout
from .models import MODELS, ModelShape
from .planner import Plan, plan

__all__ = [
    "CLUSTERS",
    "Cluster",
    "DEVICES",
    "Device",
    "Estimate",
    "Layout",
    "MODELS",
    "ModelShape",
    "Plan",
    "estimate",
    "plan",
]
