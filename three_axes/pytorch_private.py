"""What the project uses of PyTorch that PyTorch does not promise, in one place.

Each entry says what breaks without it. All were seen in PyTorch 2.13; where another version is named, the
entry differs there. (docs/evidence.md says which tests ran on 2.11 and on 2.15.) `tests/test_structure.py`
looks for such names elsewhere.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map, tree_unflatten

__all__ = ["TorchDispatchMode", "all_to_all_single_autograd", "functional"]
__all__ += ["tree_flatten", "tree_iter", "tree_map", "tree_unflatten"]

# What DTensor and the functional collectives resolve a group with: torch 2.11 gives its name, 2.13 the group.
# Without it an axis has no name where a DTensor communicates.
RESOLVE = next((name for name in ("_resolve_group", "_resolve_group_name") if hasattr(functional, name)), "")

# The interposer: the dispatcher's keys below it, and a collective that goes on there.
BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def wait_tensor(keys, tensor: torch.Tensor) -> torch.Tensor:
    """Wait as functional collectives do, without a listener of ours."""
    return torch.ops._c10d_functional.wait_tensor.default.redispatch(keys & BELOW, tensor)


# Where a batch of sends begins together. Without it a batch is not counted as waited for.
END_OF_BATCH = "_end_coalescing"


def replace_start_of_cuda(new: Callable) -> None:
    """Put `new` where CUDA is first used; what waits for that is done at once. Without it `--cpu` refuses in
    PyTorch's words, and what a script keeps for CUDA's start (Megatron-LM's random states) is never done.
    """
    torch.cuda._lazy_init = new
    torch.cuda._lazy_call = lambda call, **_: call()


def backward_under_way() -> int:
    """The number of the backward that this thread runs, −1 if none. Without it DDP's waits are not seen."""
    return getattr(torch._C, "_current_graph_task_id", lambda: -1)()


def after_backward(call: Callable[[], None]) -> None:
    """Call at the end of the backward under way."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def work_of(future: torch.futures.Future) -> dist.Work:
    """A Work that ends with a future. Without it no network can be emulated."""
    return _c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def default_store() -> dist.Store:
    """The store where the ranks met. Without it `count` shows rank 0 alone."""
    return dist.distributed_c10d._get_default_store()


def groups() -> list[dist.ProcessGroup]:
    """The groups that this rank is a member of."""
    return list(dist.distributed_c10d._world.pg_map)


# What a hang's proof asks, all of it optional: without one of these nothing is proven, and counting goes on.
GET_BACKEND = "_get_backend"  # what a group sends with; called by itself, it passes no operator
Future = getattr(torch._C, "Future", None)  # of a Work: whether a function is called when it ends
_get_backend = getattr(dist.ProcessGroup, GET_BACKEND, None)


def missing() -> list[str]:
    """The names among these that this PyTorch does not have."""
    there = {"torch._C.Future": Future, f"ProcessGroup.{GET_BACKEND}": _get_backend}
    return [name for name, found in there.items() if found is None]


def backend(group: dist.ProcessGroup, device: torch.device | None = None) -> tuple[str, float]:
    """(what a group sends with from this device, after how many seconds a collective fails by itself).
    The name is "" where it is not known, the time infinite where nobody has set one. Without it a group's own
    short timeout would be taken for a hang.
    """
    if _get_backend is None:
        return "", math.inf
    devices = group._device_types
    kind = torch.device(device.type) if device else devices[0]
    made = _get_backend(group, kind if kind in devices else devices[0])
    made = getattr(made, "wrapped_pg", made)
    options = getattr(made, "options", None)  # a backend of other makers may have none
    limit = getattr(options, "_timeout", timedelta.max).total_seconds()
    return made.name(), limit


# Where the handler is from that a `DataLoader` sets for the end of its processes. Without it nothing is
# proven beside a loader.
HANDLES_LOADERS = "torch.utils.data._utils.signal_handling"


def number_groups_from(count: int) -> None:
    """Add to the number that names the next group. Groups are found by name: without it a mesh made before
    a failure would find another group under its old name.
    """
    dist.distributed_c10d._world.group_count += count


def abort_groups() -> None:
    """End NCCL's communicators, and with them the groups. Without it a rank that hangs on a GPU is killed."""
    dist.distributed_c10d._abort_process_group()


def flight_record() -> dict:
    """The last collectives of this rank, which gloo records and nobody else writes: b4 reads them."""
    return pickle.loads(_c10d._dump_fr_trace())  # type: ignore[attr-defined]


def piece_of(storage: torch.UntypedStorage) -> int:
    """A number for a piece of memory. Without it views and tied weights would count twice."""
    return storage._cdata


def replace_shape_propagation(new: Callable) -> Callable:
    """Put `new` where DTensor tries an operator on whole tensors to learn the shape of its result. Returns
    what stood there. Without it the ledger counts memory that no rank holds.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    before = ShardingPropagator._propagate_tensor_meta_non_cached
    ShardingPropagator._propagate_tensor_meta_non_cached = new
    return before


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """One product for all experts: rows up to offs[i] meet matrix i. Without it Mixtral is not traced."""
    return torch._grouped_mm(rows, matrices, offs=offs)


def scale(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all in place, at once: as `clip_grad_norm_` does. One by one it would be slower."""
    torch._foreach_mul_(tensors, factor)


def norms(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The norm of each, at once."""
    return torch._foreach_norm(tensors)


def join_fake_ranks(size: int) -> None:
    """Be rank 0 of a group of fake ranks, whose collectives do nothing. Without it there is no trace."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


@contextmanager
def before_clipping(call: Callable) -> Iterator[None]:
    """In this block, call(norm) before gradients are scaled by `torch.nn.utils`. Without it `verify` sees
    them clipped, and one wrong parameter makes all wrong.
    """
    module, before = torch.nn.utils.clip_grad, torch.nn.utils.clip_grad._clip_grads_with_norm_

    def clips(parameters, max_norm, total_norm, *args, **kwargs):
        call(total_norm)
        return before(parameters, max_norm, total_norm, *args, **kwargs)

    public, torch.nn.utils.clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_, clips
    module._clip_grads_with_norm_ = clips
    try:
        yield
    finally:
        module._clip_grads_with_norm_, torch.nn.utils.clip_grads_with_norm_ = before, public
