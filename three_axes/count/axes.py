"""What to call a process group: the mesh dimension whose group it is, or its ranks.

A mesh dimension over all ranks has no group of its own: PyTorch lends it the default one, and several such
dimensions share it. Then it is whoever issues the collective that tells the axis: DTensor resolves the mesh
and dimension right before, FSDP keeps them in its parameter groups. For plain calls the name is the one under
which the group was asked for (`mesh.get_group("dp")`), if there is one only.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..pytorch_private import RESOLVE, functional, timeout

FSDP = "_fully_shard"  # PyTorch's folder of it
FRAMES = 30  # so many callers are looked at
PATIENT = timedelta(minutes=1)


class Members(NamedTuple):
    """A group: its own description, its ranks as the world numbers them, this rank's place among them, and
    whether its timeout is so short that a program may count on it.
    """

    described: str
    ranks: list[int]
    me: int
    gives_up: bool


class Axes:
    """Names of the groups of this process."""

    def __init__(self):
        self._members: weakref.WeakKeyDictionary[dist.ProcessGroup, Members] = weakref.WeakKeyDictionary()
        # Name of a group -> the dimensions it was asked for as, or is said to be.
        self._asked: dict[str, set[str]] = {}
        self._declared: dict[str, set[str]] = {}
        self._resolved: tuple[str, str] | None = None  # group and dimension of the collective that comes next

    def forget(self) -> None:
        """Forget under which names groups were asked for."""
        self._asked.clear()
        self._resolved = None

    @contextmanager
    def declared(self, meshes: Sequence[DeviceMesh]):
        """In this block, the groups of these meshes have their dimensions' names."""
        before, self._declared = self._declared, dict(self._declared)
        for mesh in meshes:
            for dim, name in enumerate(mesh.mesh_dim_names or ()):
                group = mesh.get_group(dim).group_name
                self._declared[group] = self._declared.get(group, set()) - before.get(group, set()) | {name}
        try:
            yield
        finally:
            self._declared = before

    def listen(self) -> None:
        """From now on, note which mesh dimension a group is asked for."""
        self._get_group, self._resolve = DeviceMesh.get_group, getattr(functional, RESOLVE)
        DeviceMesh.get_group = lambda mesh, dim=None: self._get(mesh, dim)
        setattr(functional, RESOLVE, lambda group, tag="": self._about_to_call(group, tag))

    def leave(self) -> None:
        DeviceMesh.get_group = self._get_group
        setattr(functional, RESOLVE, self._resolve)

    def _get(self, mesh: DeviceMesh, dim):
        group = self._get_group(mesh, dim)
        if not torch.compiler.is_compiling() and (name := _dimension(mesh, dim or 0)):
            self._asked.setdefault(group.group_name, set()).add(name)
        return group

    def _about_to_call(self, group, tag: str):
        resolved = self._resolve(group, tag)
        if not torch.compiler.is_compiling():
            mesh, dim = group if isinstance(group, tuple) else (group, 0)
            name = _dimension(mesh, dim) if isinstance(mesh, DeviceMesh) else None
            self._resolved = (getattr(resolved, "group_name", resolved), name) if name else None
        return resolved

    def members(self, group: dist.ProcessGroup) -> Members:
        if (known := self._members.get(group)) is None:
            described, ranks = group.group_desc.removeprefix("mesh_"), dist.get_process_group_ranks(group)
            # A mesh over all ranks makes the latter where it finds gloo and a GPU.
            if described in ("default_pg", "default"):
                described = "world"
            elif described in ("undefined", ""):
                described = "ranks " + ",".join(map(str, ranks))
            gives_up = timeout(group) < PATIENT
            known = self._members[group] = Members(described, ranks, group.rank(), gives_up)
        return known

    def name(self, group: dist.ProcessGroup, op: str) -> str:
        """The axis of a collective that is being issued."""
        described = self.members(group).described
        known = self._declared if group.group_name in self._declared else self._asked
        asked = known.get(group.group_name, ())
        resolved, self._resolved = self._resolved, None
        if described != "world" and len(asked) < 2:
            return next(iter(asked), described)
        if resolved and resolved[0] == group.group_name:
            return resolved[1]
        return _of_fsdp(op) or (next(iter(asked)) if len(asked) == 1 else described)


def _dimension(mesh: DeviceMesh, dim: int | str) -> str | None:
    names = mesh.mesh_dim_names
    return dim if isinstance(dim, str) else names[dim] if names and dim < len(names) else None


def _of_fsdp(op: str) -> str | None:
    """The dimension that FSDP2 issues a collective for, None where it is not FSDP that does."""
    frame = sys._getframe(2)
    for _ in range(FRAMES):
        if frame is None:
            return None
        if FSDP in frame.f_code.co_filename:
            info = getattr(frame.f_locals.get("self"), "mesh_info", None)
            if info is not None:
                replicated = op == "all_reduce" or not hasattr(info, "shard_mesh_dim")
                return _dimension(info.mesh, info.replicate_mesh_dim if replicated else info.shard_mesh_dim)
        frame = frame.f_back
    return None
