"""Drop 10: runs that ran out of memory, told apart by their traces, and the ladder of remedies under one
budget.
"""

from .practice import RECORDED, SIGNATURES, cheapest, diagnose, remedy, signature
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
    crash,
    ladder,
    load,
    predicted,
    prices,
)
