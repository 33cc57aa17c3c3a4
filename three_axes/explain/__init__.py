"""Read traces that `torch.profiler` wrote: where a step's time went, and how to make it shorter.

python -m three_axes explain rank*.json.gz
"""

from .report import Explained, explain
