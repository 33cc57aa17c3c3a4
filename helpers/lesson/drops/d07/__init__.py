"""Drop 07: schedules on paper and on real ranks, and an order of the reader's own."""

from .practice import M, P, bubble, judge, one_f_one_b, order, share
from .shown import UNIT, bytes_of, on_paper, on_ranks, with_real_compute
