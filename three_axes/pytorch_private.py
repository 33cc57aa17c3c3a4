"""Has all private names of PyTorch that this project uses, in one place.

PyTorch may change these at any time. Each entry says what fails without it. All names are in PyTorch 2.13; if
an entry mentions another version, the name differs there. (docs/evidence.md says which tests ran on 2.11 and
on 2.15.) `tests/test_structure.py` finds such names in other files.
"""

from __future__ import annotations

import math
import pickle
import re
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

from .replaced import Replaced

__all__ = ["TorchDispatchMode", "all_to_all_single_autograd", "functional"]
__all__ += ["tree_flatten", "tree_iter", "tree_map", "tree_unflatten"]

# Name of the function with which DTensor and functional collectives look up a group; it differs between torch
# 2.11 and 2.13. Without it the axis of a DTensor's collectives has no name.
RESOLVE = next((name for name in ("_resolve_group", "_resolve_group_name") if hasattr(functional, name)), "")

# The dispatcher's keys with which a collective continues after the interposer (count/interpose.py) caught it.
BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def wait_tensor(keys, tensor: torch.Tensor) -> torch.Tensor:
    """Wait as functional collectives do, but without passing the interposer."""
    return torch.ops._c10d_functional.wait_tensor.default.redispatch(keys & BELOW, tensor)


# The method that starts a batch of sends together. Without it no batch counts as waited for.
END_OF_BATCH = "_end_coalescing"


def replace_start_of_cuda(new: Callable) -> None:
    """Call `new` in place of CUDA's initialisation; calls that wait for that initialisation are made at once.
    Without it `--cpu` fails with PyTorch's message, and calls that a script registers for CUDA's start
    (Megatron-LM's random states) are never made.
    """
    torch.cuda._lazy_init = new
    torch.cuda._lazy_call = lambda call, **_: call()


def backward_under_way() -> int:
    """PyTorch's number of the backward that this thread runs; −1 if it runs none. Without it DDP's waits are
    not counted.
    """
    return getattr(torch._C, "_current_graph_task_id", lambda: -1)()


def after_backward(call: Callable[[], None]) -> None:
    """Call `call` at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def work_of(future: torch.futures.Future) -> dist.Work:
    """A Work that is done when `future` is. Without it no network can be emulated."""
    return _c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def default_store() -> dist.Store:
    """The store with which the ranks formed their group. Without it `count` reports rank 0 only."""
    return dist.distributed_c10d._get_default_store()


def groups() -> list[dist.ProcessGroup]:
    """The groups of which this rank is a member."""
    return list(dist.distributed_c10d._world.pg_map)


_get_backend = getattr(dist.ProcessGroup, "_get_backend", None)


def backend(group: dist.ProcessGroup, device: torch.device | None = None) -> tuple[str, float]:
    """(name of the backend that a group uses on this device, seconds after which its collectives fail); ("",
    infinity) if they are not known. device: by default the group's first. Without it a collective that is
    about to fail by the group's own short timeout would be taken for a hang.
    """
    if _get_backend is None:
        return "", math.inf
    devices = group._device_types
    kind = torch.device(device.type) if device else devices[0]
    found = _get_backend(group, kind if kind in devices else devices[0])
    found = getattr(found, "wrapped_pg", found)
    options = getattr(found, "options", None)  # another vendor's backend may have none
    limit = getattr(options, "_timeout", timedelta.max).total_seconds()
    return found.name(), limit


# In the messages of gloo and NCCL on a connection that another process has closed.
_LOST = re.compile(
    r"Connection (closed|reset)|Broken pipe|Socket closed|Application timeout|remote process exited|"
    r"ncclRemoteError|communicator was aborted"
)


def is_lost(message: str) -> bool:
    """Whether an error's message reports a lost connection, so that another rank is at fault. Without these
    texts each rank that lost its connection is reported as if it had failed by itself.
    """
    return bool(_LOST.search(message))


def number_groups_from(count: int) -> None:
    """Add to the counter that names new groups. Groups are found by name: without it a mesh made before a
    failure would find a new group under its old name.
    """
    dist.distributed_c10d._world.group_count += count


def abort_groups() -> None:
    """Abort NCCL's communicators, and with them the groups. Without it a rank that hangs on a GPU
    is killed.
    """
    dist.distributed_c10d._abort_process_group()


def flight_record() -> dict:
    """The last collectives of this rank, which gloo records but writes to no file. Notebook b4 reads them."""
    return pickle.loads(_c10d._dump_fr_trace())  # type: ignore[attr-defined]


def piece_of(storage: torch.UntypedStorage) -> int:
    """A number for a piece of memory. Without it views and tied weights would count twice."""
    return storage._cdata


def shape_propagation() -> tuple[type, str]:
    """The class and the name of the method in which DTensor runs an operator on whole tensors to learn the
    shape of its result. Without it the ledger counts memory that no rank holds.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """One product for all experts: rows up to offs[i] times matrix i. Without it Mixtral cannot be traced."""
    return torch._grouped_mm(rows, matrices, offs=offs)


def scale(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all tensors in place with one call, as `clip_grad_norm_` does. A loop would be slower."""
    torch._foreach_mul_(tensors, factor)


def norms(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The norm of each tensor, with one call."""
    return torch._foreach_norm(tensors)


def join_fake_ranks(size: int) -> None:
    """Become rank 0 of a group of fake ranks, whose collectives do nothing. Without it nothing is traced."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


@contextmanager
def before_clipping(call: Callable) -> Iterator[None]:
    """In this block, `call(norm)` is called before `torch.nn.utils` scales gradients. Without it `verify`
    compares clipped gradients, and one wrong parameter makes all of them wrong.
    """
    before, replaced = torch.nn.utils.clip_grad._clip_grads_with_norm_, Replaced()

    def clips(parameters, max_norm, total_norm, *args, **kwargs):
        call(total_norm)
        return before(parameters, max_norm, total_norm, *args, **kwargs)

    replaced.put(torch.nn.utils, "clip_grads_with_norm_", clips)
    replaced.put(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", clips)
    try:
        yield
    finally:
        replaced.restore()
