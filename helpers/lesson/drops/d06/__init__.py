"""Drop 06: tensor parallelism traced, PyTorch's plan with its extra all-reduces, sequence parallelism, and
the cliff between nodes.
"""

from .dtensor_plan import GatedMLP, LlamaBlock, all_reduces, merged_plan, plan, usual_plan
from .sequence_parallel import B, H, S, sequence, sequence_mlp
from .shown import (
    ONE_NODE,
    TWO_NODES,
    kept_for_backward,
    model_on_rank,
    one_step,
    one_step_by_pytorch,
    paced_step,
)
