"""PyTorch's operators for collectives, and where their arguments are: a table, and functions that use it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..paper.collectives import algorithmic_bytes

# Operator of the library c10d -> (the collective's name, and the indices of three arguments: the process
# group, the whole tensor, the root or the other rank of a message).
OPERATORS = {
    "allreduce_": ("all_reduce", 1, 0, None),
    "allreduce_coalesced_": ("all_reduce", 1, 0, None),
    "allgather_": ("all_gather", 2, 0, None),
    "allgather_coalesced_": ("all_gather", 2, 0, None),
    "_allgather_base_": ("all_gather", 2, 0, None),
    "allgather_into_tensor_coalesced_": ("all_gather", 2, 0, None),
    "reduce_scatter_": ("reduce_scatter", 2, 1, None),
    "_reduce_scatter_base_": ("reduce_scatter", 2, 1, None),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 2, 1, None),
    "alltoall_": ("all_to_all", 2, 1, None),
    "alltoall_base_": ("all_to_all", 2, 1, None),
    "broadcast_": ("broadcast", 1, 0, 2),
    "reduce_": ("reduce", 1, 0, 3),
    "gather_": ("gather", 2, 1, 3),  # only the root has the whole list, so n inputs are counted
    "scatter_": ("scatter", 2, 0, 3),
    "barrier": ("barrier", 1, None, None),
    "send": ("send", 1, 0, 2),
    "recv_": ("recv", 1, 0, 2),
    "recv_any_source_": ("recv", 1, 0, None),
}

TAGS = {"send": 3, "recv_": 3, "recv_any_source_": 2}  # operator -> index of the argument with the tag
# Operator -> index of the argument with the reduction.
REDUCES = {
    "allreduce_": 2,
    "allreduce_coalesced_": 2,
    "reduce_": 2,
    "reduce_scatter_": 3,
    "_reduce_scatter_base_": 3,
    "reduce_scatter_tensor_coalesced_": 3,
}


def reduction(operator: str, args) -> str:
    """The reduction of a call: 'sum', 'max' and so on; '' for a call without one."""
    if operator not in REDUCES:
        return ""
    return dist.ReduceOp.RedOpType(args[REDUCES[operator]].op()).name.lower()


def must_send(operator: str, args, payload: float, n: int, me: int, root: int) -> float:
    """Bytes that rank `me` of n must send by the formula of the collective. payload: bytes of the whole
    tensor. An uneven all-to-all is computed from its split sizes. A sparse all-reduce is an all-gather of all
    parts, which are assumed to be equally long.
    """
    if operator == "alltoall_base_" and (splits := args[4]):
        return payload * (1 - splits[me] / max(1, sum(splits)))
    if operator == "allreduce_" and args[0][0].is_sparse:
        return algorithmic_bytes("all_gather", payload * n, n, me, root)
    return algorithmic_bytes(OPERATORS[operator][0], payload, n, me, root)


class OnStream:
    """A stand-in for the Work that NCCL does not return for a synchronous collective (since PyTorch 2.8).

    The collective has ended when the GPU reaches the point of its stream at which this object was made.
    """

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        """Whether the GPU has reached that point. Does not wait."""
        return self._event.query()

    def wait(self) -> None:
        """Block this thread until the GPU has reached that point."""
        self._event.synchronize()


class InBatch:
    """A stand-in for the Work of a send or receive in a batch. NCCL begins the batch, and returns its Work,
    when all of it is issued.
    """

    def is_completed(self) -> bool:
        """Always False: when the batch begins, its Work replaces this object."""
        return False

    def wait(self) -> None:
        """Does nothing, because nothing has begun."""


def type_of(tensor: torch.Tensor) -> str:
    """The name of a tensor's type: 'float32'."""
    return str(tensor.dtype).removeprefix("torch.")


def first_tensor(tensors) -> torch.Tensor | None:
    """The first tensor of nested lists, None if there is none."""
    while isinstance(tensors, (list, tuple)):
        tensors = tensors[0] if tensors else None
    return tensors


def nbytes(tensors) -> int:
    """Bytes of all tensors in nested lists; for sparse tensors, of values and indices."""
    if isinstance(tensors, torch.Tensor):
        parts = [tensors._values(), tensors._indices()] if tensors.is_sparse else [tensors]
        return sum(part.nbytes for part in parts)
    return sum(map(nbytes, tensors))


def no_such_rank(op: str, me: int, peer: int, size: int) -> str:
    """The message for an operation whose root or other rank does not exist."""
    does = {"send": "would send to rank", "recv": "would receive from rank"}
    refusal = f"which does not exist: ranks go from 0 to {size - 1}."
    if op not in does:
        return f"rank {me} calls {op} with root {peer}, {refusal}"
    return (
        f"rank {me} {does[op]} {peer}, {refusal} Around a ring take (rank ± 1) % world_size; on a line the"
        " first rank has nobody before it, and the last nobody behind it."
    )
