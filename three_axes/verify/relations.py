"""The relation between two ranks: replicas, stages of a pipeline, or parts of a layer."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from .sketches import FLAT, PARAMETER, Sketch, Sketches

MOST = 0.75  # the share of equal parameters from which on two ranks are replicas


class Relations:
    """The relation between two ranks. first: for each rank, the sketches of its tensors before the first
    step. observed: for each rank, the result of `Observer.of_groups`; may be empty.
    """

    def __init__(self, first: Sequence[Sketches], observed: Sequence[Mapping]):
        self._first, self._observed = first, observed
        self.summed: dict[str, set[tuple[int, ...]]] = {}  # name -> the groups that sum its gradient
        groups = lambda key: {tuple(ranks) for record in observed for ranks in record[key]}
        self._sums, self._inside, self._wrapped = groups("sums"), groups("inside"), groups("wrapped")
        self._messages = {frozenset(pair) for record in observed for pair in record["messages"]}
        self._swaps = {tuple(ranks) for record in observed for ranks, _ in record["swaps"]}
        for record in observed:
            for name, ranks in record["summed"]:
                self.summed.setdefault(name, set()).add(tuple(ranks))
        self._compared = [  # the parameters by which models are compared
            {
                name: sketch
                for name, sketch in sketches.items()
                if sketch.part == PARAMETER and not sketch.constant and not name.startswith(FLAT)
            }
            for sketches in first
        ]
        self._width = [_width(sketches.values()) for sketches in self._compared]
        passes_on = lambda a, b: frozenset((a, b)) in self._messages
        pipelines = classes(range(len(first)), passes_on)
        self._stage = {rank: i for ranks in pipelines for i, rank in enumerate(ranks)}

    def kind(self, name: str, rank: int) -> Hashable:
        """A key for a rank's tensor; if two ranks' keys differ, their tensors are not copies. The key has the
        tensor's digest. A tensor of ones or zeros is equal everywhere, even as a shard (a bias cut with its
        matrix), so its key also has the module's other parameters. If "expert" is in the name, the key also
        has the rank's position in each all-to-all.
        """
        sketches = self._first[rank]
        module, mine = name.rpartition(".")[0], sketches[name]
        beside = (
            sketch.digest
            for other, sketch in self._compared[rank].items()
            if other.rpartition(".")[0] == module
        )
        place = (
            tuple(at for _, at in self._observed[rank]["swaps"])
            if self._observed and "expert" in name
            else ()
        )
        return mine.digest, mine.copies, tuple(beside) if mine.constant else (), place

    def replicas(self, a: int, b: int) -> bool:
        """Whether two ranks hold one model: at least three quarters of the parameters that both have are
        equal. The others may differ by mistake. Parameters whose numbers are all equal are not counted.
        """
        return self._equal_share(a, b) >= MOST

    def _equal_share(self, a: int, b: int) -> float:
        both = self._compared[a].keys() & self._compared[b].keys()
        what = lambda rank, name: (self._compared[rank][name].digest, self._compared[rank][name].copies)
        return sum(what(a, name) == what(b, name) for name in both) / max(1, len(both))

    def stages_apart(self, name: str, a: int, b: int) -> bool:
        """Whether equal tensors on two stages of a pipeline are no copies: another parameter of the module
        differs, or all common ones are equal (other layers that were seeded alike). False on the same stage,
        and if the tensor's gradients are summed over both ranks.
        """
        if self._stage[a] == self._stage[b] or any({a, b} <= set(g) for g in self.summed.get(name, ())):
            return False
        module = name.rpartition(".")[0]
        for other in self._compared[a].keys() & self._compared[b].keys() if module else ():
            if other.rpartition(".")[0] == module:
                if self._compared[a][other].digest != self._compared[b][other].digest:
                    return True
        both = self._compared[a].keys() & self._compared[b].keys()
        return 2 * len(both) > len(self._compared[a]) and len(both) > 1 and self._equal_share(a, b) == 1

    def constants_are_copies(self, name: str, a: int, b: int) -> bool:
        """Whether a parameter whose numbers are all equal is a copy, on two ranks with the same `kind` of it:
        if the ranks are replicas; if its module has another parameter; or if the parameter has the length of
        the model's width, which is not cut, and collectives send activations between the ranks (without
        `observed`, this is assumed).
        """
        if self._first[a][name].copies:  # a DTensor; `kind` has compared its shards
            return True
        module = name.rpartition(".")[0]
        beside = any(other.rpartition(".")[0] == module for other in self._compared[a])
        if name.startswith(FLAT):  # it may be a shard of all weights
            return False
        if beside or self.replicas(a, b):
            return True
        wide = list(self._first[a][name].shape) == [self._width[a]]
        return wide and (not self._observed or any(a in g and b in g for g in self._inside))

    def data_parallel(self, a: int, b: int) -> bool:
        """Whether two ranks should see different data. They hold the same stage; FSDP, DDP or, for replicas,
        the script sums gradients over both; and they send each other no activations.
        """
        with_both = lambda groups: any(a in g and b in g for g in groups)
        if with_both(self._inside) or with_both(self._swaps):
            return False
        return self._stage[a] == self._stage[b] and (
            with_both(self._wrapped) or with_both(self._sums) and self.replicas(a, b)
        )


def _width(sketches: Iterable[Sketch]) -> int:
    """The size that occurs in most matrices; 0 if there is none."""
    sizes: Counter[int] = Counter()
    number = 0
    for sketch in sketches:
        if len(sketch.shape) > 1:
            number += 1
            sizes.update(set(sketch.shape))
    size, times = sizes.most_common(1)[0] if sizes else (0, 0)
    return size if 2 * times > number else 0


def classes(ranks: Iterable[int], alike: Callable[[int, int], bool]) -> list[list[int]]:
    """Groups of ranks. Two ranks are in one group if they are alike, or connected by ranks that are alike."""
    ranks = list(ranks)
    class_of = {rank: [rank] for rank in ranks}
    for a, b in itertools.combinations(ranks, 2):
        if class_of[a] is not class_of[b] and alike(a, b):
            class_of[a] += class_of[b]
            for rank in class_of[b]:
                class_of[rank] = class_of[a]
    return sorted({id(group): sorted(group) for group in class_of.values()}.values())
