"""Drop 08: three axes on eight ranks; coordinates, groups, and where they should stand."""

from .crossing_by_hand import CASES, across, crossing
from .groups_by_hand import GRIDS, groups, members
from .shown import NODES, by_axis, compare_with_twin, expected_bytes, step_seconds
