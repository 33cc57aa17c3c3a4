"""Read traces that `torch.profiler` wrote: where a step's time went, and what to do about it.

python -m three_axes explain rank*.json.gz
"""

from .report import Explained, explain
