"""Drop 11: throughput lost on a larger cluster: where a step's time goes, axis by axis, measured and by
theory.
"""

from .practice import EXAMPLES, causes, place, placing, split
from .shown import (
    BATCH,
    CASES,
    GLOBAL,
    MODEL,
    NODES,
    SEQ,
    SIZES,
    TOKENS,
    WORK,
    Measured,
    beyond_ideal,
    by_hand,
    estimates,
    lost,
    measure,
    published,
    strong_and_weak,
)
from .still_slow import (
    alone_and_together,
    bandwidths,
    beyond_healthy,
    ill,
    own_waterfall,
    record,
    stood_still,
)
