"""The relation between two ranks: replicas, stages of a pipeline, or parts of a layer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from .marks import FLAT, PARAMETER, Mark, Marks

MOST = 0.75  # the share of equal parameters from which on two ranks are replicas


class Between:
    """The relation between two ranks, from the first marks of their tensors and from what `Heard` noted."""

    def __init__(self, first: Sequence[Marks], heard: Sequence[Mapping]):
        self._first, self._heard = first, heard
        self.summed: dict[str, set[tuple[int, ...]]] = {}
        groups = lambda key: {tuple(ranks) for one in heard for ranks in one[key]}
        self._sums, self._inside, self._wrapped = groups("sums"), groups("inside"), groups("wrapped")
        self._messages = {frozenset(pair) for one in heard for pair in one["messages"]}
        self._swaps = {tuple(ranks) for one in heard for ranks, _ in one["swaps"]}
        for one in heard:
            for name, ranks in one["summed"]:
                self.summed.setdefault(name, set()).add(tuple(ranks))
        self._fixed = [
            {
                name: one
                for name, one in marks.items()
                if one.part == PARAMETER and not one.constant and not name.startswith(FLAT)
            }
            for marks in first
        ]
        self._width = [_width(marks.values()) for marks in self._fixed]
        passes_on = lambda a, b: frozenset((a, b)) in self._messages
        pipelines = classes(range(len(first)), passes_on)
        self._stage = {rank: i for ranks in pipelines for i, rank in enumerate(ranks)}

    def kind(self, name: str, rank: int) -> Hashable:
        """A key that is equal on ranks that hold copies of a tensor, as far as the tensor and its module
        show. Tensors of ones or zeros are equal everywhere, even as shards (a bias cut with its matrix): for
        these, the module's other tensors must be equal too. An expert counts as different at each position in
        its all-to-all.
        """
        marks = self._first[rank]
        module, mine = name.rpartition(".")[0], marks[name]
        beside = (
            one.digest for other, one in self._fixed[rank].items() if other.rpartition(".")[0] == module
        )
        place = tuple(at for _, at in self._heard[rank]["swaps"]) if self._heard and "expert" in name else ()
        return mine.digest, mine.copies, tuple(beside) if mine.constant else (), place

    def replicas(self, a: int, b: int) -> bool:
        """Whether two ranks hold one model: of the parameters that both have, three quarters are equal.
        Parameters of equal numbers are not counted. A parameter that differs may be a mistake.
        """
        return self._equal_share(a, b) >= MOST

    def _equal_share(self, a: int, b: int) -> float:
        both = self._fixed[a].keys() & self._fixed[b].keys()
        what = lambda rank, name: (self._fixed[rank][name].digest, self._fixed[rank][name].copies)
        return sum(what(a, name) == what(b, name) for name in both) / max(1, len(both))

    def stages_apart(self, name: str, a: int, b: int) -> bool:
        """Whether two ranks are stages of a pipeline that were seeded alike: names and numbers are equal, but
        the layers are different ones. Or whether other tensors of the tensor's module differ.
        """
        if self._stage[a] == self._stage[b] or any({a, b} <= set(g) for g in self.summed.get(name, ())):
            return False
        module = name.rpartition(".")[0]
        for other in self._fixed[a].keys() & self._fixed[b].keys() if module else ():
            if other.rpartition(".")[0] == module:
                if self._fixed[a][other].digest != self._fixed[b][other].digest:
                    return True
        both = self._fixed[a].keys() & self._fixed[b].keys()
        return 2 * len(both) > len(self._fixed[a]) and len(both) > 1 and self._equal_share(a, b) == 1

    def constants_are_copies(self, name: str, a: int, b: int) -> bool:
        """Whether a parameter of equal numbers is a copy. It is on replicas, and beside another parameter of
        its module that is a copy. It also is if it is as long as the model's width, which is not cut, and
        activations are sent between the two ranks by collectives.
        """
        if self._first[a][name].copies:  # a DTensor has this information
            return True
        module = name.rpartition(".")[0]
        beside = any(other.rpartition(".")[0] == module for other in self._fixed[a])
        if name.startswith(FLAT):  # it may be a piece of all weights
            return False
        if beside or self.replicas(a, b):
            return True
        wide = list(self._first[a][name].shape) == [self._width[a]]
        return wide and (not self._heard or self.activations_pass(a, b))

    def activations_pass(self, a: int, b: int) -> bool:
        """Whether both ranks take part in collectives that a module's forward calls."""
        return any(a in g and b in g for g in self._inside)

    def data_parallel(self, a: int, b: int) -> bool:
        """Whether the gradients of two ranks with the same model are summed, and nothing else is sent."""
        with_both = lambda groups: any(a in g and b in g for g in groups)
        if with_both(self._inside) or with_both(self._swaps):
            return False
        return self._stage[a] == self._stage[b] and (
            with_both(self._wrapped) or with_both(self._sums) and self.replicas(a, b)
        )


def _width(marks: Iterable[Mark]) -> int:
    """The size that occurs in most matrices; 0 if there is none."""
    sizes: Counter[int] = Counter()
    number = 0
    for one in marks:
        if len(one.shape) > 1:
            number += 1
            sizes.update(set(one.shape))
    size, times = sizes.most_common(1)[0] if sizes else (0, 0)
    return size if 2 * times > number else 0


def classes(ranks: Iterable[int], alike: Callable[[int, int], bool]) -> list[list[int]]:
    """Groups of ranks: two ranks are together if they are alike, or connected by ranks that are alike."""
    ranks = list(ranks)
    of = {rank: [rank] for rank in ranks}
    for a, b in itertools.combinations(ranks, 2):
        if of[a] is not of[b] and alike(a, b):
            of[a] += of[b]
            for rank in of[b]:
                of[rank] = of[a]
    return sorted({id(group): sorted(group) for group in of.values()}.values())
