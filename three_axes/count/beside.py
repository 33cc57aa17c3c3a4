"""Finds actions of a program that pass no operator of PyTorch, so that no hang can be proven: functions
called when a collective ends, backends that are called directly, groups that are destroyed. Also finds
whether it captures a CUDA graph.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from .. import lines, pytorch_private

OWN = os.path.dirname(torch.__file__) + os.sep, *(str(folder) + os.sep for folder in lines.COURSE)


class Beside:
    """Listens from `__init__` to `leave`. bypassed: called with a description of what happened.
    failed: called when a `monitored_barrier` has raised.
    """

    def __init__(self, bypassed: Callable[[str], None], failed: Callable[[], None]):
        self._bypassed, self._failed = bypassed, failed
        self._calls, self.is_capturing = 0, False
        self._own: list[tuple[Any, str, Any]] = []
        names = " and ".join(pytorch_private.missing())
        self._unknown = f"has a PyTorch without {names}, which a proof needs" if names else ""
        if names:
            warnings.warn(f"PyTorch has no {names}: no hang is proven", stacklevel=2)
        for name in ("then", "add_done_callback"):
            self._replace(pytorch_private.Future, name, self._with_a_call)
        self._replace(dist.ProcessGroup, pytorch_private.GET_BACKEND, self._by_itself)
        self._replace(dist.ProcessGroup, "monitored_barrier", self._meeting)
        for module in (dist, dist.distributed_c10d):
            self._replace(module, "destroy_process_group", self._destroying)
        for name, begins in (("capture_begin", True), ("capture_end", False)):
            self._replace(torch.cuda.CUDAGraph, name, partial(self._capturing, begins))

    def leave(self) -> None:
        """Restore PyTorch's own functions."""
        for where, name, function in self._own:
            setattr(where, name, function)

    def forbids(self) -> str:
        """A description of what the rank has done, or lacks, that forbids a proof; '' if nothing does."""
        if self._calls:
            return "has left a function to be called when a collective ends"
        return self._unknown

    def _replace(self, where, name: str, by: Callable) -> None:
        if (function := getattr(where, name, None)) is not None:
            self._own.append((where, name, function))
            setattr(where, name, by(function))

    def _with_a_call(self, registers):
        @wraps(registers)
        def registered(future, call):
            @wraps(call)
            def called(*args):
                try:
                    return call(*args)
                finally:
                    self._calls -= 1

            self._calls += 1
            return registers(future, called)

        return registered

    def _by_itself(self, get):
        @wraps(get)
        def got(*args, **kwargs):
            if not sys._getframe(1).f_code.co_filename.startswith(OWN):
                self._bypassed("has called a backend by itself")
            return get(*args, **kwargs)

        return got

    def _meeting(self, barrier):
        @wraps(barrier)
        def met(*args, **kwargs):
            try:
                return barrier(*args, **kwargs)
            except BaseException:
                self._failed()
                raise

        return met

    def _destroying(self, destroy):
        @wraps(destroy)
        def destroyed(*args, **kwargs):
            self._bypassed("has destroyed a group")
            return destroy(*args, **kwargs)

        return destroyed

    def _capturing(self, begins: bool, call):
        @wraps(call)
        def called(*args, **kwargs):
            was, self.is_capturing = begins, True
            try:
                return call(*args, **kwargs)
            except BaseException:
                was = False
                raise
            finally:
                self.is_capturing = was

        return called
