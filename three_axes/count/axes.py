"""Finds the axis of a collective: the name of the mesh dimension whose process group it uses.

Usually that is the group's own name. But a mesh dimension that spans all ranks usually has PyTorch's default
group, which has no such name. Then the caller shows the axis: DTensor looks up the mesh and the dimension
just before the collective, and FSDP keeps them in its parameter groups. For other callers the axis is the
name with which the group was requested (`mesh.get_group("dp")`), if there is only one such name. A user may
also declare which ranks form an axis. A group without any name is 'world', or is called by its ranks.
"""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import lines
from ..paper.placement import Placement
from ..pytorch_private import RESOLVE, functional
from ..replaced import Replaced

FSDP, PIPELINING = "_fully_shard", "distributed/pipelining"  # parts of the paths of PyTorch's modules
FRAMES = 30  # how many callers of a collective are searched for these modules


class Members(NamedTuple):
    """What is known of a group."""

    described: str  # 'dp' for a mesh dimension, 'world' for the default group, or 'ranks 0,2'
    ranks: list[int]  # by their numbers in the world
    me: int  # this rank's index among them


class AxisNames:
    """The axes of this process's groups. `name` finds the axis of a collective."""

    def __init__(self):
        self._members: weakref.WeakKeyDictionary[dist.ProcessGroup, Members] = weakref.WeakKeyDictionary()
        self._asked: dict[str, set[str]] = {}  # name of a group -> the dimensions with which it was requested
        self._declared: dict[tuple[int, ...], set[str]] = {}  # ranks of a group -> the axes declared for it
        self._resolved: tuple[str, str] | None = None  # group and dimension of the next collective
        self._replaced = Replaced()

    def forget(self) -> None:
        """Forget the names with which groups were requested."""
        self._asked.clear()
        self._resolved = None

    @contextmanager
    def declared(self, named: Iterable[tuple[str, Sequence[int]]]):
        """In this block, groups have the declared axes, in place of those that an outer block gave to their
        ranks. named: (axis, ranks of the group).
        """
        before, self._declared = self._declared, dict(self._declared)
        for name, ranks in named:
            key = tuple(sorted(ranks))
            self._declared[key] = self._declared.get(key, set()) - before.get(key, set()) | {name}
        try:
            yield
        finally:
            self._declared = before

    def listen(self) -> None:
        """From now on, record for which mesh dimension a group is requested."""
        self._get_group, self._resolve = DeviceMesh.get_group, getattr(functional, RESOLVE, None)
        self._replaced.put(DeviceMesh, "get_group", lambda mesh, mesh_dim=None: self._get(mesh, mesh_dim))
        if self._resolve:
            self._replaced.put(functional, RESOLVE, lambda group, tag="": self._about_to_call(group, tag))

    def leave(self) -> None:
        """Undo `listen`: restore PyTorch's own functions."""
        self._replaced.restore()

    def _get(self, mesh: DeviceMesh, dim):
        group = self._get_group(mesh, dim)
        if not torch.compiler.is_compiling() and (name := _dimension(mesh, dim or 0)):
            self._asked.setdefault(group.group_name, set()).add(name)
        return group

    def _about_to_call(self, group, tag: str):
        assert self._resolve  # the function that was replaced
        resolved = self._resolve(group, tag)
        if not torch.compiler.is_compiling():
            mesh, dim = group if isinstance(group, tuple) else (group, 0)
            name = _dimension(mesh, dim) if isinstance(mesh, DeviceMesh) else None
            self._resolved = (getattr(resolved, "group_name", resolved), name) if name else None
        return resolved

    def members(self, group: dist.ProcessGroup) -> Members:
        """What is known of a group. It is kept after the first call."""
        if (known := self._members.get(group)) is None:
            described, ranks = group.group_desc.removeprefix("mesh_"), dist.get_process_group_ranks(group)
            # 'default' is a second group over all ranks, which a mesh makes if it finds gloo and a GPU.
            if described in ("default_pg", "default"):
                described = "world"
            elif described in ("undefined", ""):
                described = "ranks " + ",".join(map(str, ranks))
            known = self._members[group] = Members(described, ranks, group.rank())
        return known

    def name(self, group: dist.ProcessGroup, op: str, peer: int | None = None) -> str:
        """The axis of a collective that is being issued. op: its kind. peer: for a message, the other rank's
        number in the group.
        """
        described, ranks, me = self.members(group)
        declared = self._declared.get(tuple(sorted(ranks))) if self._declared else None
        asked: Collection[str] = declared or self._asked.get(group.group_name) or ()
        resolved, self._resolved = self._resolved, None
        # First, but for 'world': the only name declared, else the only one requested, else the group's own.
        if described != "world" and (len(asked) == 1 or not asked and not described.startswith("ranks ")):
            return next(iter(asked), described)
        if resolved and resolved[0] == group.group_name:
            return resolved[1]
        # A message may be sent over a larger group than the one that was declared.
        ends = set() if peer is None else {ranks[me], ranks[peer]}
        holding = (names for held, names in self._declared.items() if ends and ends <= set(held))
        only: Collection[str] = asked if len(asked) == 1 else set().union(*holding)
        only = only if len(only) == 1 else ()
        return _of_caller(op) or next(iter(only), described)


def of_meshes(meshes: Iterable[DeviceMesh]) -> list[tuple[str, list[int]]]:
    """(name, ranks) of this rank's group along each named dimension of these meshes."""
    return [
        (name, dist.get_process_group_ranks(mesh.get_group(dim)))
        for mesh in meshes
        for dim, name in enumerate(mesh.mesh_dim_names or ())
    ]


def parse_axes(text: str, size: int) -> list[tuple[str, list[int]]]:
    """Parse `--axes` of a job of `size` ranks: a mesh, the outermost axis first, 'dp=2,tp=2'. Returns (axis,
    ranks) of each group. Raises ValueError.
    """
    if not re.fullmatch(r"(\w+=\d+)(,\w+=\d+)*", text):
        raise ValueError(f"--axes {text}: give a mesh, the outermost axis first: 'dp=2,tp=2'")
    parts = [part.split("=") for part in text.split(",")]
    sizes = {axis: int(n) for axis, n in parts}
    if len(sizes) < len(parts):
        raise ValueError(f"--axes {text} names an axis twice")
    if (n := math.prod(sizes.values())) != size:
        raise ValueError(f"--axes {text} is of {n} ranks, and this job has {size}")
    return [(axis, group) for axis in sizes for group in Placement(sizes).groups(axis)]


def _dimension(mesh: DeviceMesh, dim: int | str) -> str | None:
    names = mesh.mesh_dim_names
    return dim if isinstance(dim, str) else names[dim] if names and dim < len(names) else None


def _of_caller(op: str) -> str | None:
    """FSDP2's dimension for a collective; 'pp' for PyTorch's pipelining; None for other callers."""
    for frame in lines.callers(sys._getframe(2), most=FRAMES):
        if PIPELINING in frame.f_code.co_filename:
            return "pp"
        if FSDP in frame.f_code.co_filename:
            info = getattr(frame.f_locals.get("self"), "mesh_info", None)
            if info is not None:
                dims = [getattr(info, f"{kind}_mesh_dim", None) for kind in ("replicate", "shard")]
                known = [dim for dim in dims if dim is not None]  # both for HSDP
                return _dimension(info.mesh, known[0] if op == "all_reduce" else known[-1])
    return None
