"""Drop 08: three axes on eight ranks; coordinates, groups, and where they should stand."""

from .practice import CASES, GRIDS, across, crossing, groups, members
from .shown import NODES, by_axis, compare_with_twin, expected_bytes, step_seconds
