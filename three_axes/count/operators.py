"""PyTorch's operators for collectives, and what their arguments and results say."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..paper.collectives import algorithmic_bytes

# c10d operator -> (name, argument with the process group, argument with the whole tensor, argument with the
# root or peer)
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
    "gather_": ("gather", 2, 1, 3),  # the whole list exists at the root only: counted as n inputs
    "scatter_": ("scatter", 2, 0, 3),
    "barrier": ("barrier", 1, None, None),
    "send": ("send", 1, 0, 2),
    "recv_": ("recv", 1, 0, 2),
    "recv_any_source_": ("recv", 1, 0, None),
}

TAGS = {"send": 3, "recv_": 3, "recv_any_source_": 2}  # c10d operator -> the argument with the tag
# c10d operator -> the argument that says how numbers are reduced
REDUCES = {
    "allreduce_": 2,
    "allreduce_coalesced_": 2,
    "reduce_": 2,
    "reduce_scatter_": 3,
    "_reduce_scatter_base_": 3,
    "reduce_scatter_tensor_coalesced_": 3,
}


def reduction(operator: str, args) -> str:
    """The reduction of a call: 'sum', 'max' and so on; '' where nothing is reduced."""
    if operator not in REDUCES:
        return ""
    return dist.ReduceOp.RedOpType(args[REDUCES[operator]].op()).name.lower()


def must_send(operator: str, args, payload: float, n: int, me: int, root: int) -> float:
    """Bytes that rank `me` of n must send by the book; for an uneven all-to-all, by its own split sizes. Of a
    sparse tensor each rank gathers what all have, and adds it by itself; it is taken for as long on each.
    """
    if operator == "alltoall_base_" and (splits := args[4]):
        return payload * (1 - splits[me] / max(1, sum(splits)))
    if operator == "allreduce_" and args[0][0].is_sparse:
        return algorithmic_bytes("all_gather", payload * n, n, me, root)
    return algorithmic_bytes(OPERATORS[operator][0], payload, n, me, root)


class OnStream:
    """Stands for the Work that NCCL does not return for a synchronous collective (since PyTorch 2.8).

    It has ended when the GPU has come to this place of its stream.
    """

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        """True where the GPU has come to that place. Does not wait."""
        return self._event.query()

    def wait(self) -> None:
        """Block this thread until the GPU has come there."""
        self._event.synchronize()


class InBatch:
    """Stands for the Work of a send or receive until its batch has been issued whole: NCCL begins with none
    before.
    """

    def is_completed(self) -> bool:
        """Always False: an issued batch puts its own Work in this one's place."""
        return False

    def wait(self) -> None:
        """Nothing has begun that could be waited for."""


def type_of(tensor: torch.Tensor) -> str:
    """The name of a tensor's type: 'float32'."""
    return str(tensor.dtype).removeprefix("torch.")


def first_tensor(tensors) -> torch.Tensor | None:
    """The first tensor of nested lists, None where there is none."""
    while isinstance(tensors, (list, tuple)):
        tensors = tensors[0] if tensors else None
    return tensors


def nbytes(tensors) -> int:
    """Bytes of all tensors in nested lists; of sparse ones, of their values and of where these are."""
    if isinstance(tensors, torch.Tensor):
        parts = [tensors._values(), tensors._indices()] if tensors.is_sparse else [tensors]
        return sum(part.nbytes for part in parts)
    return sum(map(nbytes, tensors))


def nobody(op: str, me: int, peer: int, size: int) -> str:
    """Why an operation whose other side, or root, does not exist is refused."""
    does = {"send": "would send to rank", "recv": "would receive from rank"}
    refusal = f"which does not exist: ranks go from 0 to {size - 1}."
    if op not in does:
        return f"rank {me} calls {op} with root {peer}, {refusal}"
    return (
        f"rank {me} {does[op]} {peer}, {refusal} Around a ring take (rank ± 1) % world_size; on a line the"
        " first rank has nobody before it, and the last nobody behind it."
    )
