"""Where each rank's part of a tensor lies in the whole, and the whole from its parts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

import torch

Split = tuple[str, int]  # an axis, and the dimension of a tensor that is cut along this axis


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes, outermost first. Ranks are numbered along the innermost axis first."""

    sizes: dict[str, int]

    @property
    def ranks(self) -> range:
        """The numbers of all ranks, from 0."""
        return range(math.prod(self.sizes.values()))

    def at(self, rank: int) -> dict[str, int]:
        """A rank's coordinates: axis -> number along it, from 0."""
        place = {}
        for axis, size in reversed(self.sizes.items()):
            rank, place[axis] = divmod(rank, size)
        return place

    @property
    def real_axes(self) -> list[str]:
        """Axes of more than one rank, outermost first."""
        return [axis for axis, size in self.sizes.items() if size > 1]

    def sets_of_axes(self) -> Iterator[tuple[str, ...]]:
        """All non-empty sets of axes, small ones first."""
        axes = self.real_axes
        return itertools.chain.from_iterable(itertools.combinations(axes, n) for n in range(1, len(axes) + 1))

    def groups(self, axes: Iterable[str], among: Iterable[int] | None = None) -> list[list[int]]:
        """The groups of ranks whose coordinates differ only along these axes."""
        groups: dict[tuple, list[int]] = {}
        for rank in self.ranks if among is None else among:
            rest = tuple(i for axis, i in self.at(rank).items() if axis not in axes)
            groups.setdefault(rest, []).append(rank)
        return list(groups.values())

    def size(self, axes: Iterable[str]) -> int:
        """The number of ranks in a group along these axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def between(self, a: int, b: int) -> tuple[str, ...]:
        """The axes along which the coordinates of two ranks differ."""
        return tuple(axis for axis in self.real_axes if self.at(a)[axis] != self.at(b)[axis])

    def differing(self, classes: Mapping[int, object]) -> list[str]:
        """The axes along which ranks that differ in this coordinate alone are of different classes."""
        of_groups = lambda axis: (
            {classes[rank] for rank in group} for group in self.groups([axis], sorted(classes))
        )
        return [axis for axis in self.real_axes if any(len(found) > 1 for found in of_groups(axis))]


class Places:
    """For each parameter, and each rank with a part of it, the indices of this part's elements in the whole.

    of: name -> rank -> indices. held: rank -> name -> its tensor. known: rank -> name -> indices, of
    DTensors. shapes: of the whole tensors. splits: {pattern of names: (axis, dimension)}, for tensors whose
    split neither shapes nor values show. Raises ValueError if the names are not the whole model's, or if a
    split cannot be found.
    """

    def __init__(self, mesh: Mesh, held, known, shapes: Mapping[str, torch.Size], splits):
        self._mesh, self._shapes, self._splits = mesh, shapes, splits
        self._cut: dict[str, dict[int, tuple[str, ...]]] = {}  # name -> dimension -> how it is split
        self.of: dict[str, dict[int, torch.Tensor]] = {}
        missing = [name for name in shapes if not any(name in tensors for tensors in held.values())]
        strange = sorted({name for tensors in held.values() for name in tensors} - set(shapes))
        if missing or strange:
            raise ValueError(_names_differ(missing, strange))
        constant = {}
        for name, shape in shapes.items():
            parts = {rank: tensors[name] for rank, tensors in held.items() if name in tensors}
            if all(name in known[rank] for rank in parts):
                self.of[name] = {rank: known[rank][name].flatten() for rank in parts}
            elif (axes := self._axes(name, parts)) is None:
                constant[name] = parts
            else:
                self.of[name] = self._indices(name, parts, axes)
        usual = Counter(axes for cuts in self._cut.values() for axes in cuts.values())
        for name, parts in constant.items():
            self.of[name] = self._indices(name, parts, self._as_others(name, parts, usual))

    def whole(self, name: str, parts: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """The whole tensor, put together from its parts, rank -> part; None if an element is missing. Of
        several copies the lowest rank's is used.
        """
        shape = self._shapes[name]
        whole = torch.zeros(shape.numel(), dtype=next(iter(parts.values())).dtype)
        filled = torch.zeros(shape.numel(), dtype=torch.bool)
        for rank in sorted(parts, reverse=True):
            index = self.of[name][rank]
            whole[index], filled[index] = parts[rank].flatten(), True
        return whole.view(shape) if filled.all() else None

    def _axes(self, name: str, parts) -> dict[int, tuple[str, ...]] | None:
        """Dimension -> the axes along which it is cut; None if several answers are possible."""
        whole = self._shapes[name]
        for pattern, (axis, dim) in self._splits.items():
            if fnmatch(name, pattern):
                return {dim: (axis,)}
        axes = {}
        for dim, ratio in self._ratios(name, parts).items():
            fits = [axes for axes in self._mesh.sets_of_axes() if self._mesh.size(axes) == ratio]
            if len(fits) > 1:
                fits = [axes for axes in fits if self._fits_values(axes, parts)]
                if len(fits) != 1:
                    return None
            if not fits:
                raise ValueError(_unknown_split(name, whole, parts))
            axes[dim] = fits[0]
        self._cut[name] = axes
        return axes

    def _ratios(self, name: str, parts) -> dict[int, int]:
        """Dimension -> into how many equal parts it is cut."""
        whole, shapes = self._shapes[name], {part.shape for part in parts.values()}
        part = next(iter(shapes))
        if len(shapes) > 1 or len(part) != len(whole) or any(n == 0 or m % n for m, n in zip(whole, part)):
            raise ValueError(_unknown_split(name, whole, parts))
        return {dim: m // n for dim, (m, n) in enumerate(zip(whole, part)) if m != n}

    def _fits_values(self, axes: tuple[str, ...], parts) -> bool:
        """Whether ranks that differ along these axes hold different values, and other ranks the same."""
        others = tuple(set(self._mesh.sizes) - set(axes))
        same = all(
            torch.equal(parts[group[0]], parts[rank])
            for group in self._mesh.groups(others, parts)
            for rank in group
        )
        pairs = (
            pair for group in self._mesh.groups(axes, parts) for pair in itertools.combinations(group, 2)
        )
        return same and not any(torch.equal(parts[a], parts[b]) for a, b in pairs)

    def _as_others(self, name: str, parts, usual: Counter) -> dict[int, tuple[str, ...]]:
        """The split of a tensor whose values do not show it: along the axes that cut most other tensors."""
        axes = {}
        for dim, ratio in self._ratios(name, parts).items():
            fits = [axes for axes in usual if self._mesh.size(axes) == ratio]
            if not fits:
                raise ValueError(_unknown_split(name, self._shapes[name], parts))
            axes[dim] = max(fits, key=usual.__getitem__)
        return axes

    def _indices(self, name: str, parts, axes) -> dict[int, torch.Tensor]:
        """Rank -> the indices of its part's elements, if each dimension is cut along these axes."""
        whole = self._shapes[name]
        indices = {}
        for rank in parts:
            index, at = torch.arange(whole.numel()).view(whole), self._mesh.at(rank)
            for dim, along in axes.items():
                number = 0
                for axis in along:
                    number = number * self._mesh.sizes[axis] + at[axis]
                index = index.tensor_split(self._mesh.size(along), dim)[number]
            if index.shape != parts[rank].shape:
                raise ValueError(_unknown_split(name, whole, parts))
            indices[rank] = index.flatten()
        return indices


def _unknown_split(name: str, whole: torch.Size, parts) -> str:
    shapes = ", ".join(f"{tuple(part.shape)} on rank {rank}" for rank, part in parts.items())
    return (
        f"{name} is {tuple(whole)} in the whole model and {shapes}: its split is not clear. Give it:"
        f" splits={{{name!r}: ('tp', 0)}}, the axis and the dimension that is cut along it"
    )


def _names_differ(missing: list[str], strange: list[str]) -> str:
    wrong = []
    if missing:
        wrong.append(f"no rank has {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}")
    if strange:
        wrong.append(f"the whole model has no {', '.join(strange[:3])}{' …' if len(strange) > 3 else ''}")
    return f"{'; '.join(wrong)}. names= takes a function: a rank's name -> the whole model's"
