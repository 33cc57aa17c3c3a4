"""Drop 10: runs that ran out of memory, told apart by their traces, and the ladder of remedies under one
budget.
"""

from .fragmentation import SAME, VARIED, fragment, load_fragmented, two_ways
from .practice import RECORDED, SIGNATURES, cheapest, diagnose, remedy, signature
from .saving import saves, saves_table, stalls
from .shown import (
    BUDGET,
    CAUSES,
    HIDDEN,
    LADDER_BUDGET,
    LONG,
    RANKS,
    REMEDIES,
    USUAL,
    Run,
    attempt,
    by_microbatch,
    crash,
    ladder,
    load,
    microbatches_table,
    predicted,
    prices,
)
from .sized import last_lines, the_13b
