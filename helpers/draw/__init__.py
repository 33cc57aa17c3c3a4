"""The pictures of the drops, but for timelines (gantt.py)."""

from .comparing import decision_tree, loss_curves, ranking, scaling, waterfall
from .cutting import cuts, matrix_cuts
from .holding import memory_by_stage, memory_traces, segments
from .sending import placement, reached, ring, waiting, who_to_whom
from .splitting import splits
