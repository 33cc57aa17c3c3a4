"""`--cpu`: runs a script written for CUDA on the CPU. Each rank has one emulated GPU.

Such a script uses devices in three ways. It names a device ("cuda:0", a number): the argument is replaced by
the CPU. It asks PyTorch about a device: the function that answers is replaced. It uses what only GPUs have:
gloo replaces NCCL, streams and pinned memory do nothing, and the rest raises an error.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from .. import pytorch_private

_CUDA = re.compile(r"cuda(:\d+)?")
NAME = "a processor, as three-axes --cpu plays it"  # the emulated GPU's name


class Devices(TorchFunctionMode):
    """In every call of PyTorch, replaces a CUDA device among the arguments by the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*map(_to_cpu, args), **{k: _to_cpu(v, k == "device") for k, v in (kwargs or {}).items()})


def emulate_cuda() -> None:
    """Emulate CUDA on the CPU from now on, in this whole process. `CHANGES` lists the differences."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for place, answers in _answers():
        for name, answer in answers.items():
            setattr(place, name, answer if isinstance(answer, type) else _as_new_function(answer))
    for owner, name in (
        (nn.Module, "to"),
        (DeviceMesh, "__init__"),
        (torch.autocast, "__init__"),
        (torch.amp.GradScaler, "__init__"),
        (torch, "set_default_device"),
    ):
        setattr(owner, name, _translated(getattr(owner, name)))
    torch.random.fork_rng = _edited(torch.random.fork_rng, lambda given: given.update(devices=[]))
    DistributedDataParallel.__init__ = _edited(DistributedDataParallel.__init__, _no_gpu)
    on_processor = lambda given: given.update(device_id=torch.device("cpu"))
    FullyShardedDataParallel.__init__ = _edited(FullyShardedDataParallel.__init__, on_processor)
    for name, edit in (
        *dict.fromkeys(("init_process_group", "new_group", "barrier"), _no_gpu).items(),
        *dict.fromkeys(("all_reduce", "reduce_scatter_tensor"), _average).items(),
    ):
        edited = _edited(getattr(dist, name), edit)
        setattr(dist, name, edited)
        setattr(dist.distributed_c10d, name, edited)
    setattr(torch.cuda, "default_generators", (torch.default_generator,) * _ranks_here())
    dist.Work.get_future = _giving_future(dist.Work.get_future)
    pytorch_private.replace_start_of_cuda(_refused)
    Devices().__enter__()


CHANGES = (
    "--cpu: cuda is the CPU, nccl is gloo, and each rank has one GPU. torch.compile, streams and pinned"
    " memory do nothing. A GPU's memory in use is that of this process."
)


def _answers() -> tuple[tuple[object, dict], ...]:
    """For each module or class of PyTorch: the names in it that are replaced, and their replacements."""
    return (
        (torch.cuda, _CUDA_ANSWERS),
        (torch.cuda.memory, _MEMORY),
        (torch.cuda.random, {name: _CUDA_ANSWERS[name] for name in _RANDOM}),
        (torch.accelerator, _ACCELERATOR),
        (torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), _nothing)),
        (torch.cuda.nccl, {"version": lambda: (0, 0, 0)}),
        (torch.Tensor, {"to": _moving(torch.Tensor.to), "cuda": _to_gpu, "pin_memory": _itself}),
        (torch, {"Generator": Generator, "compile": _uncompiled, "load": _edited(torch.load, _load_to_cpu)}),
        (nn.Module, {"compile": lambda module, *_, **__: None}),
    )


def _to_cpu(value, number: bool = False):
    """The CPU for a CUDA device (with `number`, also for a device's number); any other value unchanged."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    is_one = isinstance(value, str) and _CUDA.fullmatch(value)
    return "cpu" if is_one or number and type(value) is int else value


def _itself(tensor: torch.Tensor, *_, **__) -> torch.Tensor:
    return tensor


def _to_gpu(tensor: torch.Tensor, *_, **__) -> torch.Tensor:
    """A copy, as on a GPU: writing to one leaves the other unchanged."""
    return tensor.clone()


def _translate(args, kwargs) -> tuple[list, dict]:
    """The arguments with the CPU in place of CUDA devices. A number is a device if it is the first argument,
    or a method's first.
    """
    named = {name: _to_cpu(value, name == "device") for name, value in kwargs.items()}
    return [_to_cpu(value, i < 2) for i, value in enumerate(args)], named


def _translated(call):
    @wraps(call)
    def on_cpu(*args, **kwargs):
        at, named = _translate(args, kwargs)
        return call(*at, **named)

    return on_cpu


def _moving(to):
    @wraps(to)
    def on_cpu(tensor, *args, **kwargs):
        at, named = _translate((tensor, *args), kwargs)
        moved = to(*at, **named)
        return moved.clone() if moved is tensor and (at[1:] != [*args] or named != kwargs) else moved

    return on_cpu


def _edited(call, edit):
    """The function, with arguments that `edit` changes first. edit: gets them as a dict, by name."""
    signature = inspect.signature(call)

    @wraps(call)
    def on_cpu(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        edit(given.arguments)
        return call(*given.args, **given.kwargs)

    return on_cpu


def _no_gpu(given: dict) -> None:
    for name in ("device_ids", "output_device", "device_id", "pg_options"):
        given.pop(name, None)
    if "nccl" in str(given.get("backend")).lower():
        given["backend"] = "gloo"


def _average(given: dict) -> None:
    """Edit: divide this rank's tensor and request a sum instead of an average, because gloo has none."""
    if given.get("op") == dist.ReduceOp.AVG:
        given["op"], size = dist.ReduceOp.SUM, dist.get_world_size(given.get("group"))
        if "tensor" in given:
            with torch.no_grad():
                given["tensor"].div_(size)
        else:
            given["input"] = given["input"] / size


def _giving_future(get_future):
    """`Work.get_future` that also works for gloo's reduce-scatter, which has no future: wait for its end, and
    return a future that is done.
    """

    @wraps(get_future)
    def on_cpu(work):
        try:
            return get_future(work)
        except RuntimeError as e:
            if "getFuture" not in str(e):
                raise
        work.wait()
        future: torch.futures.Future = torch.futures.Future()
        try:
            future.set_result(work.result())
        except RuntimeError:  # the Work does not return its result either
            future.set_result([])
        return future

    return on_cpu


def _load_to_cpu(given: dict) -> None:
    if not callable(given.get("map_location")):
        given["map_location"] = "cpu"


def _as_new_function(answer):
    """A new function for each name, because Dynamo refuses one function of PyTorch with two names."""
    return lambda *args, **kwargs: answer(*args, **kwargs)


def _uncompiled(model=None, **_):
    return model if model is not None else lambda function: function


def _nothing(*_, **__) -> None:
    return None


class Generator(torch.Generator):
    """torch.Generator on the CPU, even if a CUDA device is named."""

    def __new__(cls, device="cpu"):
        """device: a name, a torch.device, or the number of a GPU."""
        return super().__new__(cls, device=_to_cpu(device, True))  # type: ignore[call-arg]


class Stream:
    """torch.cuda.Stream that does nothing: operations on the CPU run in order anyway."""

    cuda_stream, device = 0, torch.device("cpu")

    def __init__(self, *_, **__): ...
    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...
    def query(self) -> bool:
        """Always True: nothing is still to be done."""
        return True

    def is_capturing(self) -> bool:
        """Always False: there is no graph."""
        return False

    def record_event(self, event=None):
        """The event, or a new one, recorded now."""
        event = event or Event()
        event.record()
        return event

    synchronize = wait_stream = wait_event = _nothing


class Event:
    """torch.cuda.Event with this process's clock, because nothing runs asynchronously."""

    def __init__(self, *_, **__):
        self.at = 0.0

    def record(self, stream=None) -> None:
        """Take the time now, whatever the stream."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`, like CUDA's."""
        return 1e3 * (end.at - self.at)

    query = Stream.query
    synchronize = wait = _nothing


def _refused(*_, **__) -> NoReturn:
    raise RuntimeError(
        "--cpu has no answer for what this line asks of CUDA: guard it with a condition on your side, or run"
        " on a GPU"
    )


class Graph:
    """torch.cuda.CUDAGraph: scripts may name it, but cannot make one."""

    def __init__(self, *_, **__):
        _refused()


def _ranks_here() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _local_rank(*_) -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def _resident_memory(*_, **__) -> int:
    return psutil.Process().memory_info().rss


def _part_of_memory(*_) -> int:
    return psutil.virtual_memory().total // _ranks_here()


def _seed(seed: int) -> None:
    """Seed the CPU's generator without `torch.manual_seed`, which calls this function."""
    torch.default_generator.manual_seed(seed)


_SAME = {
    "is_available": lambda: True,
    "device_count": _ranks_here,
    "synchronize": _nothing,
    "current_stream": Stream,
    "set_stream": _nothing,
}
_MEMORY: dict[str, Callable] = dict.fromkeys(
    ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), _resident_memory
)
_MEMORY |= dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), _nothing)
_MEMORY["mem_get_info"] = lambda *_: (_part_of_memory() - _resident_memory(), _part_of_memory())
_MEMORY["memory_stats"] = lambda *_, **__: {}
_ACCELERATOR = {name: answer for name, answer in (_SAME | _MEMORY).items() if name != "mem_get_info"} | {
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "current_device_index": _local_rank,
    "set_device_index": _nothing,
}
_CUDA_ANSWERS = {
    **_SAME,
    **_MEMORY,
    "init": _nothing,
    "current_device": _local_rank,
    "set_device": _nothing,
    "device": Stream,
    "stream": Stream,
    "Stream": Stream,
    "default_stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "is_current_stream_capturing": lambda: False,
    "is_bf16_supported": lambda *_, **__: True,
    "get_device_name": lambda *_: NAME,
    "get_device_capability": lambda *_: (8, 0),
    "get_device_properties": lambda *_: SimpleNamespace(
        name=NAME, major=8, minor=0, total_memory=_part_of_memory(), multi_processor_count=1
    ),
    "manual_seed": _seed,
    "manual_seed_all": _seed,
    "memory_summary": lambda *_, **__: NAME,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda new_state, *_, **__: torch.set_rng_state(new_state),
    "ipc_collect": _nothing,
}
_RANDOM = "manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state"
