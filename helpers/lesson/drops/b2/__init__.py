"""Beyond, b2: one sequence over four ranks, three ways; who waits for whom."""

from .balance import places, tokens_of
from .one_step import cut_step, step
from .shown import (
    CHUNKS,
    ONE_NODE,
    TWO_NODES,
    WAYS,
    kept_per_rank,
    ring_or_exchange,
    ring_timeline,
    traffic_of,
    work,
)
from .softmax import merge_parts, parts
