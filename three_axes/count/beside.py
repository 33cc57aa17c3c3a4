"""Notices actions of a program after which no hang can be proven, because they pass no operator of PyTorch:
the program registers a function to be called when a collective ends, calls a backend directly, or destroys a
group. Also notices whether it captures a CUDA graph.
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

# Folders of PyTorch and of this project: their own calls of a backend are not the program's.
OWN = os.path.dirname(torch.__file__) + os.sep, *(str(folder) + os.sep for folder in lines.COURSE)


class Beside:
    """Replaces functions of PyTorch from `__init__` to `leave`, and notices when the program calls them.

    bypassed: is called with a description of what the program did. failed: is called when a
    `monitored_barrier` has raised.
    """

    def __init__(self, bypassed: Callable[[str], None], failed: Callable[[], None]):
        self._bypassed, self._failed = bypassed, failed
        self._callbacks = 0  # registered functions that were not called yet
        self.is_capturing = False  # whether the program captures a CUDA graph
        self._replaced: list[tuple[Any, str, Any]] = []  # (module or class, name, PyTorch's own function)
        names = " and ".join(pytorch_private.missing())
        self._unknown = f"has a PyTorch without {names}, which a proof needs" if names else ""
        if names:
            warnings.warn(f"PyTorch has no {names}: no hang is proven", stacklevel=2)
        for name in ("then", "add_done_callback"):
            self._replace(pytorch_private.Future, name, self._registering)
        self._replace(dist.ProcessGroup, pytorch_private.GET_BACKEND, self._getting_backend)
        self._replace(dist.ProcessGroup, "monitored_barrier", self._monitored)
        for module in (dist, dist.distributed_c10d):
            self._replace(module, "destroy_process_group", self._destroying)
        for name, begins in (("capture_begin", True), ("capture_end", False)):
            self._replace(torch.cuda.CUDAGraph, name, partial(self._capturing, begins))

    def leave(self) -> None:
        """Restore PyTorch's own functions."""
        for where, name, function in self._replaced:
            setattr(where, name, function)

    def forbids(self) -> str:
        """What forbids a proof, as words that follow 'rank 0'; '' if nothing does."""
        if self._callbacks:
            return "has left a function to be called when a collective ends"
        return self._unknown

    def _replace(self, where, name: str, by: Callable) -> None:
        if (function := getattr(where, name, None)) is not None:
            self._replaced.append((where, name, function))
            setattr(where, name, by(function))

    def _registering(self, register):
        @wraps(register)
        def replacement(future, callback):
            @wraps(callback)
            def counted(*args):
                try:
                    return callback(*args)
                finally:
                    self._callbacks -= 1

            self._callbacks += 1
            return register(future, counted)

        return replacement

    def _getting_backend(self, get):
        @wraps(get)
        def replacement(*args, **kwargs):
            if not sys._getframe(1).f_code.co_filename.startswith(OWN):
                self._bypassed("has called a backend by itself")
            return get(*args, **kwargs)

        return replacement

    def _monitored(self, barrier):
        @wraps(barrier)
        def replacement(*args, **kwargs):
            try:
                return barrier(*args, **kwargs)
            except BaseException:
                self._failed()
                raise

        return replacement

    def _destroying(self, destroy):
        @wraps(destroy)
        def replacement(*args, **kwargs):
            self._bypassed("has destroyed a group")
            return destroy(*args, **kwargs)

        return replacement

    def _capturing(self, begins: bool, call):
        @wraps(call)
        def replacement(*args, **kwargs):
            captures_after, self.is_capturing = begins, True
            try:
                return call(*args, **kwargs)
            except BaseException:
                captures_after = False
                raise
            finally:
                self.is_capturing = captures_after

        return replacement
