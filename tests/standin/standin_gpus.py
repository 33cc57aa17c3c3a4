"""Stand-ins for GPUs: torch says that it sees GPUs, and tensors sent to one stay on the CPU.

Processes, groups, the order of collectives and all decisions that depend on GPUs are real, and errors come
in NCCL's way (`nccl_like.cpp`). A GPU's memory, streams and speed are not real, nor is NCCL: its library only
returns a version (`nccl_version.c`), which is the variable STANDIN_NCCL, or 2.30.7. The folder in which
`build` puts the backend must be on Python's path.
"""

import ctypes
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.overrides import TorchFunctionMode

from three_axes import lines

HERE = Path(__file__).resolve().parent
VERSIONS = "2.28.9", "2.30.7", "2.31.2"  # of NCCL; `build` makes a library for each
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"  # its path in NVIDIA's package


def build(folder: Path) -> None:
    """Compile the backend into `folder`.

    Raises subprocess.CalledProcessError, or FileNotFoundError without a compiler.
    """
    from torch.utils.cpp_extension import include_paths, library_paths

    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-isystem{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]]
    made = folder / f"building-{os.getpid()}.so"  # two workers of the tests may build at once
    command = "c++ -shared -fPIC -std=c++20 -O0 -DTORCH_EXTENSION_NAME=nccl_like".split()
    command += [*includes, str(HERE / "nccl_like.cpp"), *(f"-L{path}" for path in library_paths())]
    command += [*"-ltorch_python -ltorch_cpu -lc10 -o".split(), str(made)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    for version in VERSIONS:
        major, minor, patch = map(int, version.split("."))
        library = folder / version / LIBRARY
        library.parent.mkdir(parents=True, exist_ok=True)
        command = "cc -shared -fPIC -Wl,-soname,libnccl.so.2".split()
        command += [f"-DNUMBER={major * 10000 + minor * 100 + patch}", f'-DTEXT="{version}"']
        command += [str(HERE / "nccl_version.c"), "-o", str(library)]
        subprocess.run(command, check=True, timeout=60)
    made.rename(folder / "nccl_like.so")


def load_nccl() -> tuple[int, ...]:
    """The version of NCCL's library in this process. It is loaded as PyTorch loads it: if another library was
    loaded first, that library stays.
    """
    import nccl_like

    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    except OSError:
        folder = Path(nccl_like.__file__).parent / os.environ.get("STANDIN_NCCL", "2.30.7")
        library = ctypes.CDLL(str(folder / LIBRARY))
    library.ncclGetVersion(ctypes.byref(version))
    return version.value // 10000, version.value // 100 % 100


def visible() -> list[int]:
    """The GPUs that this process is allowed, by number on the machine."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = range(int(os.environ["STANDIN_GPUS"]))
    if allowed is None:
        return list(there)
    return [int(i) for i in allowed.split(",") if i.isdigit() and int(i) in there]


class Stream:
    """A stream on which everything except a collective is done at once."""

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, _): ...
    def wait_event(self, _): ...
    def synchronize(self): ...
    def query(self):
        return True

    def record_event(self, event=None):
        return event or Event()


class Event:
    """It completes when the collectives that began before `record` are done; at once, unless STANDIN_AHEAD
    lets the host run ahead (`nccl_like.cpp`).
    """

    def __init__(self, *_, **__):
        self.at, self.begun = 0.0, 0

    def record(self, stream=None):
        self.at = time.perf_counter()
        if backend := sys.modules.get("nccl_like"):
            self.begun = backend.begun()

    def wait(self, stream=None): ...
    def query(self):
        return not self.begun or sys.modules["nccl_like"].done() >= self.begun

    def synchronize(self):
        while not self.query():
            time.sleep(0.01)

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class OnCpu(TorchFunctionMode):
    """Whatever is asked for on a GPU is made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {key: _cpu(value) for key, value in (kwargs or {}).items()}
        if getattr(function, "__name__", "") == "to":
            args = (args[0], *map(_cpu, args[1:]))
        return function(*args, **kwargs)


def _cpu(x):
    """The CPU in place of a GPU; anything else unchanged."""
    if isinstance(x, torch.device) and x.type == "cuda" or isinstance(x, str) and x.startswith("cuda"):
        return torch.device("cpu")
    return x


class _IsNcclLike(type):
    """Makes isinstance(x, ProcessGroupNCCL) true of the stand-in's backends."""

    def __instancecheck__(cls, x):
        import nccl_like

        return isinstance(x, nccl_like.NcclLike)


REFUSAL = """NCCL error in: /pytorch/NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), \
NCCL version 2.30.7
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this."""


class ProcessGroupNCCL(metaclass=_IsNcclLike):
    """Replaces PyTorch's class: makes a backend over gloo that answers as NCCL does."""

    class Options:
        pass

    def __new__(cls, store, rank, size, options, device=None):
        import nccl_like

        store.set(f"gpu/{rank}", f"{socket.gethostname()} {torch.cuda.get_device_properties().uuid}")
        made = nccl_like.NcclLike(dist.ProcessGroupGloo(store, rank, size, options._timeout))
        shared = len({store.get(f"gpu/{r}") for r in range(size)}) < size
        if shared and (load_nccl() < (2, 30) or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1"):
            made.refuse(REFUSAL)  # init.cc of NCCL 2.30.7
        return made

    @staticmethod
    def _group_start(): ...
    @staticmethod
    def _group_end(): ...


def synchronize(device=None) -> None:
    """Wait until the device has done all that it was asked for."""
    event = Event()
    event.record()
    event.synchronize()


def install(n: int) -> None:
    """Have this process, and those forked from it, believe in n GPUs, as many as STANDIN_GPUS says."""
    cuda, here = torch.cuda, threading.local()
    lines.LIBRARIES += (str(HERE) + os.sep,)

    @contextmanager
    def nothing(*_, **__):
        yield

    def properties(i=None):
        i = instead["current_device"]() if i is None else i
        name, uuid = f"stand-in {visible()[i]}", f"GPU-{visible()[i]}"
        return SimpleNamespace(uuid=uuid, name=name, total_memory=16 * 10**9, major=9, minor=0)

    def set_device(device):
        index = torch.device(device).index if not isinstance(device, int) else device
        if index >= len(visible()):
            raise RuntimeError("CUDA error: invalid device ordinal")
        here.device = index

    instead = {
        "is_available": lambda: bool(visible()),
        "device_count": lambda: len(visible()),
        "is_initialized": lambda: hasattr(here, "device"),
        "init": lambda: None,
        "set_device": set_device,
        "current_device": lambda: getattr(here, "device", 0),
        "synchronize": synchronize,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_device_properties": properties,
        "get_device_name": lambda i=None: properties(i).name,
        "get_device_capability": lambda i=0: (9, 0),
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": nothing,
        "device": nothing,
        "mem_get_info": lambda device=None: (16 * 10**9, 16 * 10**9),
        "is_bf16_supported": lambda *_: True,
        "default_generators": (torch.default_generator,) * n,
    }
    for name, value in instead.items():
        setattr(cuda, name, value)
    load_nccl()
    dist.is_nccl_available = distributed_c10d.is_nccl_available = lambda: True
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    # The default class from torch 2.15 on. If no device is given, a group is made anew, not split.
    distributed_c10d.ProcessGroupNCCL2, distributed_c10d._nccl2_device = ProcessGroupNCCL, lambda opts: None
    register = dist.ProcessGroup._register_backend

    def registered(group, device, kind, backend=None):
        register(group, device, kind, backend)
        if isinstance(backend, ProcessGroupNCCL):  # tensors stay on the CPU, so it takes those as well
            register(group, torch.device("cpu"), kind, backend)

    dist.ProcessGroup._register_backend = registered
    make = device_mesh.DeviceMesh.__init__
    device_mesh.DeviceMesh.__init__ = lambda mesh, device_type, *a, **k: make(mesh, "cpu", *a, **k)
    OnCpu().__enter__()  # for good
