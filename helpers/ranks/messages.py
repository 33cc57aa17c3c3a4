"""The messages between the kernel and its ranks: a rank's setup, the result of a call, a rank's error."""

from __future__ import annotations

import copyreg
import io
import pickle
import re
from collections import ChainMap
from types import CodeType
from typing import NamedTuple

import cloudpickle
import torch

from three_axes import lines, pytorch_private
from three_axes.paper import Network

MESSAGE = 2000  # characters of an error's message that are printed

# When a function uses `torch` and `x.ops`, cloudpickle also sends torch.ops, which is not a module and cannot
# be pickled by name. This function pickles it, in the kernel and on the ranks.
copyreg.pickle(type(torch.ops), lambda _: (getattr, (torch, "ops")))


def _code(code: CodeType):
    """Pickle a code object with the name of its file or cell, which cloudpickle omits from 3.1.3 on."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if x == "<dynamic-code>" else x for x in arguments)


class _WithFiles(cloudpickle.Pickler):
    dispatch_table = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)


class _OnCpu(_WithFiles):
    """Pickles tensors of a GPU as tensors of the CPU: the kernel may have no GPU, and uses none."""

    def reducer_override(self, x):
        if isinstance(x, torch.Tensor) and x.device.type == "cuda":
            copy = x.detach().cpu().requires_grad_(x.requires_grad)
            return (
                torch.nn.Parameter(copy, x.requires_grad) if isinstance(x, torch.nn.Parameter) else copy
            ).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(x)


def dumps(x, pickler: type[cloudpickle.Pickler] = _WithFiles) -> bytes:
    """The pickle of functions and arguments for the ranks. Functions of the notebook are pickled by value."""
    with io.BytesIO() as file:
        pickler(file).dump(x)
        return file.getvalue()


def dumps_result(result) -> bytes:
    """The pickle of a call's result for the kernel."""
    return dumps(result, _OnCpu)


class Error(NamedTuple):
    """What went wrong on one rank."""

    type: str
    message: str
    lines: list[lines.Line]  # of the traceback, the reader's own (`lines.readers`)
    aborted: bool  # the kernel ended the call; the rank's own code was not at fault
    cause: str = ""  # 'result' if the code returned and only its result could not be sent

    @property
    def spoils(self) -> bool:
        """Whether the process cannot use its GPU after this error. (After an out-of-memory error it can.)"""
        return (
            self.type == "AcceleratorError" or "CUDA error:" in self.message or "HIP error:" in self.message
        )

    @property
    def follows(self) -> bool:
        """Whether this error reports a lost connection, so that another rank is at fault."""
        return pytorch_private.is_lost(self.message)


# PyTorch's message on an error of NCCL, in three or more lines; the last line is NCCL's own message.
_OF_NCCL = re.compile(
    r"NCCL error in: [^\n]*?:\d+, (?P<what>[^\n]*?)(?: \(run with[^\n]*?\))?"
    r", NCCL version (?P<version>[\d.]+)\n(?P<kind>nccl\w+)[^\n]*(?:\nLast error: *\n?(?P<last>[^\n]*))?"
)


def _in_a_line(found: re.Match) -> str:
    return f"NCCL {found['version']}: {found['last'] or found['what']} ({found['kind']})"


def text_of(x) -> str:
    """str(x) for an object of the reader's, at most MESSAGE characters of it; its __str__ may raise."""
    try:
        text = str(x).split(" The following argument types are supported:")[0]  # PyTorch's C++, many lines
        text = _OF_NCCL.sub(_in_a_line, text)
    except BaseException:  # noqa: BLE001
        return "(its message cannot be shown)"
    return text if len(text) <= MESSAGE else f"{text[:MESSAGE]}… ({len(text):,} characters)"


class Setup(NamedTuple):
    """The first message to a new rank: all that it must know."""

    rank: int
    size: int
    device: str  # 'cpu', or 'cuda:1' for the second GPU that the rank sees
    folder: str  # of this world: the group's rendezvous files, and each rank's box (`meter.Recorder`)
    environ: dict[str, str]
    cwd: str | None  # the kernel's; None if it was deleted
    path: list[str]  # where the kernel looks for modules
    counted: bool
    fabric: Network | None  # the network to emulate
    memory: float | None  # bytes of tensors that this rank may hold
