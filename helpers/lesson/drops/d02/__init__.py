"""Drop 02: average gradients over unequal shares, and write the ring all-reduce."""

from .average_by_hand import SHARES, average, judge_average, weighted_average
from .ring_by_hand import CASES, judge_ring, ring, ring_all_reduce
from .shown import losses, memory_on
