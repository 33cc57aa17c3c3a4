"""Counts the collectives of a script or a block, and sends each rank's report to the other ranks."""

from __future__ import annotations

import itertools
import os
import pickle
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import pytorch_private
from ..foreign import DataUnpickler
from . import wire
from .interpose import Call
from .meter import Recorder
from .report import Report
from .steps import BySteps, Steps

SPANS = 50_000  # waits, collectives and memory sizes that a rank keeps for its trace: so many of each
# Classes of which the reports of ranks are made; `is_of_reports` says why they are listed.
OF_REPORTS = "RankReport Report BySteps CollectiveCount Channel Begun Span State Snapshot GpuProgress".split()
OF_REPORTS += ["Waiting", "Operation", "Line"]
_numbers = itertools.count()  # gives each counter of this process its own keys in the store


@dataclass
class RankReport:
    """The report of one rank on a run."""

    report: Report = field(default_factory=Report)
    steps: BySteps = field(default_factory=BySteps)
    rank: int = 0
    backend: str = ""  # of the default group: 'gloo' or 'nccl'
    clock: float = 0.0  # seconds to add to its monotonic clock to get the time of day
    gpu: str = ""  # the identity of the GPU that it computed on, the same in every process; '' for none


class Counter(Recorder):
    """A recorder for a script or a block. It may start before the script has formed a group: it then finds
    out its rank at the first collective. trace: whether to keep times. box: see `Recorder`. groups: those of
    all collectives. They stay while this object does, also when DDP drops its own: see `script._kept`.
    """

    def __init__(self, trace: bool = False, box: int | None = None):
        self.rank, self.size, self.backend, self._trace = 0, 1, "", trace
        self.store: dist.Store | None = None
        self.groups: set[dist.ProcessGroup] = set()
        self._key = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_numbers)}"
        super().__init__(box, spans=SPANS if trace else 0)
        self.find_store()
        self.sockets.refresh()  # finds earlier groups' connections: bytes sent before are not counted
        self.start()
        self.steps = Steps(self)

    def begins(self, call: Call) -> None:
        """Find the store if it exists by now; with `trace`, record the memory held. Then count the call."""
        self.find_store()
        self.groups.add(call.group)
        if self._trace and len(self.levels) < self.most_spans:
            self.levels.append((time.monotonic(), _held()))
        super().begins(call)

    def find_store(self) -> None:
        """Find the store (PyTorch's key-value server) with which the ranks formed their group, if there is
        one yet. Reports are sent through it, so they are not counted. While this object refers to it, it
        stays open, even when the script destroys its group.
        """
        if self.store is not None or not dist.is_initialized():
            return
        self.rank, self.size, self.backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        store = pytorch_private.default_store()
        self.store = dist.PrefixStore(f"three-axes/{self._key}", store)
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        wire.services.update({getattr(store, "port", 0), int(os.environ.get("MASTER_PORT", 0))})

    def report(self) -> RankReport:
        """Stop counting, and send this rank's report."""
        self.find_store()
        steps = self.steps.stop()
        clock = time.time() - time.monotonic()
        mine = RankReport(self.stop(), steps, self.rank, self.backend, clock, _gpu())
        self.close()
        if self.store is not None and self.size > 1:
            self.store.set(str(self.rank), pickle.dumps(mine))  # type: ignore[arg-type]
        return mine

    def all_have_reported(self) -> bool:
        """Whether the reports of all ranks have arrived; also True if there is no store (any more)."""
        try:
            return self.store is None or self.store.check([str(r) for r in range(self.size)])
        except RuntimeError:  # the store ended with the process that held it
            return True

    def report_of(self, rank: int, until: float) -> RankReport | None:
        """Another rank's report; None if it has not arrived by `until`, a time of the monotonic clock."""
        if (store := self.store) is None:
            return None
        try:
            store.wait([str(rank)], timedelta(seconds=max(0.01, until - time.monotonic())))
            return DataUnpickler(store.get(str(rank)), is_of_reports).load()
        except (RuntimeError, OSError):  # it did not arrive, or the store ended with the process that held it
            return None
        except (pickle.UnpicklingError, EOFError):  # it is no report
            return None


def is_of_reports(module: str, name: str) -> bool:
    """Whether reports contain this class. No other class is unpickled, because anybody in the network can
    write into torchrun's store, and unpickling can run code.
    """
    ours = module.startswith("three_axes.count.") or module == "three_axes.lines"
    return (module, name) == ("collections", "deque") or (ours and name in OF_REPORTS)


def _gpu() -> str:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ""
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(getattr(about, "uuid", ""))  # under --cpu, the processor has none


def _held() -> int:
    """Bytes of tensors on this process's GPU; without a GPU, the process's resident memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
