"""Tensor parallelism by PyTorch: the split of `helpers.toy.tensor` as a plan for `parallelize_module`.

It fits every block whose matrices are called attention.q, .k, .v, .out and mlp.up, .down, and perhaps .gate.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


def usual_plan(block: nn.Module, sp: bool = False) -> dict[str, ParallelStyle]:
    """The plan for each matrix by itself: columns, then rows. `merged_plan` contains it, and explains sp."""
    columns = ["attention.q", "attention.k", "attention.v", "mlp.up"]
    if getattr(block.mlp, "gate", None) is not None:
        columns.append("mlp.gate")
    rows = RowwiseParallel(output_layouts=Shard(1) if sp else Replicate())
    return {name: ColwiseParallel() for name in columns} | {"attention.out": rows, "mlp.down": rows}


def merged_plan(block: nn.Module, sp: bool) -> dict[str, ParallelStyle]:
    """The plan for Megatron's pairs of matrices: the gradient of a pair's input is summed once (see drop 06).

    sp: sequence parallelism. Between the pairs, norms included, each rank holds only its tokens, (b, s/t, h).
    """
    enter = PrepareModuleInput(
        input_layouts=Shard(1) if sp else Replicate(),
        desired_input_layouts=Replicate(),
        use_local_output=False,
    )
    norms = {"norm1": SequenceParallel(), "norm2": SequenceParallel()} if sp else {}
    return norms | {"attention": enter, "mlp": enter} | usual_plan(block, sp)
