"""Finds which ranks hold equal copies of a tensor, and which copies differ later. It compares sketches, short
summaries of the ranks' tensors, and needs no process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .relations import Relations, classes
from .sketches import (
    ALONE,
    EITHER,
    OF,
    OTHER,
    PARAMETER,
    SEEDED,
    SHARDED,
    STATE,
    Sketch,
    Sketches,
    distance,
)  # fmt: skip


class Drift(NamedTuple):
    """A tensor whose copies differ. step: after which it was found; 0 before the first. groups: the groups
    of ranks whose copies should be equal and are not, each as rank -> digest. far: the largest relative
    distance.
    """

    step: int
    name: str
    groups: list[dict[int, str]]
    far: float


class Copies:
    """Finds in all ranks' first sketches which ranks hold equal copies, and compares later sketches of these.

    groups: name -> the groups of ranks that hold equal copies. left: name -> why the tensor is not watched.
    parted: name -> Drift, of copies that differ in the last sketches. met: name -> (step in which copies were
    found to differ, step in which they were equal again). strangers: parameters that differed before the
    first step although their gradients are summed.

    first: for each rank, its sketches. observed: for each rank, the result of `Observer.of_groups`.
    """

    def __init__(self, first: Sequence[Sketches], observed: Sequence[Mapping] = ()):
        self._relations = Relations(first, observed)
        self._first, self._last = first, first
        self._apart: set[str] = set()  # states that differ in the last sketches, on ranks with copies
        self.groups: dict[str, list[list[int]]] = {}
        self.left: dict[str, str] = {}
        self.parted: dict[str, Drift] = {}
        self.met: dict[str, tuple[int, int]] = {}
        for name in dict.fromkeys(name for sketches in first for name in sketches if OF not in name):
            self._group(name)
        self._apart = self._states_apart(first)
        self.strangers = list(filter(None, map(self._stranger, self._relations.summed)))

    def look(
        self, step: int, now: Sequence[Sketches], just_stepped: Sequence[Mapping[str, str]] = ()
    ) -> list[Drift]:
        """Compare the sketches after a step. Returns the tensors whose copies differ for the first time.
        just_stepped: for each rank, name -> a digest that was taken right after the step. A tensor that was
        equal then and differs now was changed after the step; that is no drift.
        """
        found = []
        changed = lambda name, rank: now[rank][name].digest != self._last[rank][name].digest
        differing = {name: self._differing(step, name, now, self.groups[name]) for name in self.groups}
        for name, drift in differing.items():
            if drift and just_stepped and self._were_equal(drift, just_stepped):
                continue
            if drift and name not in self.parted and name not in self.met:
                self.parted[name] = drift
                found.append(drift)
            elif not drift and name in self.parted:
                self.met[name] = self.parted.pop(name).step, step
        before, self._apart = self._apart, self._states_apart(now)
        for name in sorted(before & self._apart):
            owner = name.rpartition(OF)[2]
            ranks = itertools.chain(*self.groups[owner])
            if not differing[owner] and all(changed(owner, rank) for rank in ranks):
                self.left.setdefault(name, SHARDED)
        self._last = now
        return found

    @property
    def wrong(self) -> list[Drift]:
        """The findings that are errors: `strangers` and `parted`."""
        return [*self.strangers, *self.parted.values()]

    def watched(self) -> tuple[dict[str, str], dict[str, str]]:
        """(watched: name -> what it is; not watched: name -> why), by the last sketches."""
        every: dict[str, Sketch] = {}
        for sketches in self._last:
            every |= sketches
        left, watched = dict(self.left), {}
        for name, sketch in every.items():
            owner = name.rpartition(OF)[2]
            if OF in name and len(sketch.shape) and owner in self.groups and name not in left:
                watched[name] = STATE
                if name in self._apart and owner not in self.parted:
                    left[name] = SHARDED
                    del watched[name]
            elif name in self.groups:
                watched[name] = sketch.part
        return watched, left

    def equal_groups(self, of: Sequence[Sequence[object]]) -> list[list[int]]:
        """Groups of ranks that should see different data, but whose sequences are equal and not empty. of:
        for each rank, a sequence, such as the digests of its inputs.
        """
        same = lambda a, b: bool(of[a]) and of[a] == of[b] and self._relations.data_parallel(a, b)
        return [group for group in classes(range(len(of)), same) if len(group) > 1]

    def _group(self, name: str) -> None:
        """Find the groups of ranks with copies of a tensor; if there are none, why it is not watched."""
        holders = [rank for rank, sketches in enumerate(self._first) if name in sketches]
        sketch = self._first[holders[0]][name]
        key = lambda rank: self._relations.kind(name, rank)
        alike = [ranks for ranks in _by(holders, key) if len(ranks) > 1]
        together = lambda a, b: not self._relations.stages_apart(name, a, b)
        groups = [part for ranks in alike for part in classes(ranks, together) if len(part) > 1]
        if alike and not groups:
            self.left[name] = SEEDED
        if sketch.constant and sketch.part == PARAMETER:
            sure = lambda a, b: self._relations.constants_are_copies(name, a, b)
            groups = [part for ranks in groups for part in classes(ranks, sure) if len(part) > 1]
        if groups:
            self.groups[name] = groups
        else:
            why = EITHER if sketch.constant and sketch.part == PARAMETER else OTHER
            why = SHARDED if sketch.copies.strip("[]") else why
            self.left.setdefault(name, ALONE if len(holders) == 1 else why)

    def _stranger(self, name: str) -> Drift | None:
        """The difference of a parameter before the first step, on ranks that sum its gradient; None if there
        is none, if shapes differ, or for a DTensor.
        """
        groups = []
        for members in self._relations.summed[name]:
            sketches = {r: self._first[r][name] for r in members if name in self._first[r]}
            shapes = {tuple(sketch.shape) for sketch in sketches.values()}
            if len({sketch.digest for sketch in sketches.values()}) > 1 and len(shapes) == 1:
                if not any(sketch.copies for sketch in sketches.values()):
                    groups.append({rank: sketch.digest for rank, sketch in sketches.items()})
        far = [
            distance(self._first[rank][name], self._first[min(group)][name])
            for group in groups
            for rank in group
        ]
        return Drift(0, name, groups, max(far)) if groups else None

    def _states_apart(self, now: Sequence[Sketches]) -> set[str]:
        """The optimizer's states that differ on ranks that hold copies of their parameter."""
        names = {name for sketches in now for name in sketches if OF in name}
        groups = lambda name: self.groups.get(name.rpartition(OF)[2], [])
        return {name for name in names if self._differing(0, name, now, groups(name))}

    def _differing(self, step: int, name: str, now: Sequence[Sketches], groups) -> Drift | None:
        differ, far = [], 0.0
        for ranks in groups:
            sketches = {rank: now[rank][name] for rank in ranks if name in now[rank]}
            if len({sketch.digest for sketch in sketches.values()}) > 1:
                differ.append({rank: sketch.digest for rank, sketch in sketches.items()})
                far = max(far, *(distance(sketch, sketches[min(sketches)]) for sketch in sketches.values()))
        return Drift(step, name, differ, far) if differ else None

    def _were_equal(self, drift: Drift, digests: Sequence[Mapping[str, str]]) -> bool:
        return all(
            len({digests[rank].get(drift.name) for rank in group}) == 1 and drift.name in digests[min(group)]
            for group in drift.groups
        )


def _by(ranks: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return list(groups.values())
