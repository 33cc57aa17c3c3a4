"""Reads traces that `torch.profiler` wrote, and reports where a step's time went and what would shorten it.

python -m three_axes explain rank*.json.gz
"""

from .report import Explained, explain
