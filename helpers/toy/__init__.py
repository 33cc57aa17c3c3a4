"""The one model of this course, and the ways to split it.

`ToyTransformer` run in one process is the *twin*: a split is right when its loss, gradients
and updated weights are the twin's.

    module     split            each rank holds                what moves, and when
    data       data (DP)        the model, 1/d of the batch     gradients, once a step
    zero       ZeRO 1, 2, 3     as data, but states in shards   gradients and weights, once or twice a step
    fsdp       ZeRO 3 in time   a shard; layers whole for a while  the same, in the order of a list
    tensor     tensor (TP, SP)  1/t of the blocks' matrices     activations and gradients, in every block
    context    context (CP)     the model, 1/c of the tokens    keys and values, in every layer; gradients
    experts    experts (EP)     1/ep of the experts             tokens to their experts, and answers back
    pipeline   pipeline (PP)    1/p of the blocks               activations at the stages' boundaries
    grid       DP, TP and PP    1/(t·p) of the blocks           as in data, tensor and pipeline

`three_axes.trace` has the tensor split as a plan for DTensor. Each file is read from top to bottom. The
letters are those of the course: b sequences of s tokens, hidden size h, a heads; d, t, p the sizes of data,
tensor and pipeline parallelism; m microbatches.
"""

from .context import (
    attend,
    context_block,
    contiguous,
    exchange_attention,
    gather_attention,
    ring_attention,
    sees,
    zigzag,
)
from .data import average_gradients, data_parallel_step, my_share, overlap_gradients, share_weights
from .experts import (
    Experts,
    average_expert_gradients,
    even_out,
    expert_parallel,
    run_experts,
    split_experts,
    swap,
)
from .fsdp import Layer, fsdp_order, run_order, shard_layers
from .grid import grid_groups, grid_step, on_grid
from .model import (
    MLP,
    VOCABULARY,
    Attention,
    Block,
    Embedding,
    Head,
    ToyTransformer,
    loss_of,
    make_batch,
    twin_step,
)
from .names import all_gather, reduce_scatter
from .pace import StandIn, pace
from .pipeline import pipeline_step, run_schedule, split_depth, stage_of
from .tensor import (
    conjugate,
    copy_to_tp,
    gather_sequence,
    gather_tokens,
    my_tokens,
    reduce_from_tp,
    scatter_sequence,
    split_width,
    sum_norm_gradients,
    sum_tokens,
    tensor_parallel_step,
    whole_sequence,
)
from .vocabulary import split_loss, split_vocabulary, vocabulary_parallel_step
from .zero import Zero1, Zero2, Zero3

__all__ = [name for name in dir() if not name.startswith("_")]
