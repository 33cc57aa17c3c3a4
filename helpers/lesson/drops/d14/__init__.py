"""Drop 14: a layout for 70B on 64 GPUs defended, the real model traced, and the real 4-layer model trained on
whatever is there.
"""

from .practice import CASES, defend, meeting
from .sized import (
    BATCH,
    CLUSTER,
    GPUS,
    MODEL,
    SEQ,
    against_formula,
    memory_against_theory,
    states_table,
    the_plan,
    traced,
    usual_plan,
)
from .trained import (
    ByAccelerate,
    as_launched,
    layout_here,
    losses_live,
    sent_by_first,
    speeds,
    states_of_first,
    three_ways,
    train_on,
    twin,
    with_accelerate,
    world_here,
)
