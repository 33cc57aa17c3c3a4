"""Drop 09: every byte a GPU holds, on paper and on real ranks; what ZeRO divides, and what it sends."""

from .fullest_gpu import DEEP, WIDTH, bytes_per_gpu, states
from .ring_by_hand import ring, ring_reduce_scatter
from .shown import (
    KINDS,
    MegatronBlock,
    activations,
    activations_table,
    by_framework,
    bytes_per_parameter,
    measured_states,
    states_table,
    step_bytes,
    zero_stages,
)
