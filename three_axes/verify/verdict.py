"""The result of a comparison: differences with their causes, and a verdict on each layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .causes import Cause, along, ranks_text
from .pieces import Mesh
from .record import Seen, Tensors

EXACT = 1e-9  # allowed in float64; differences from another order of summation are below 1e-12


@dataclass(frozen=True)
class Found:
    """A difference. step: 1, 2, …; 0 before the first; None if it belongs to no step. what: 'loss',
    'gradients' and so on. names: of parameters, buffers or modules. off: relative; 1 for dropouts.
    """

    step: int | None
    what: str
    names: tuple[str, ...]
    off: float
    cause: Cause


@dataclass
class Verdict:
    """The result for one layout. cells: what was compared -> 'equal', or how far off. found: the
    differences, in the order in which a step computes. exact: whether everything was computed in float64.
    least: a smaller relative difference may be rounding.
    """

    layout: str
    cells: dict[str, str] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)
    exact: bool = True
    least: float = EXACT

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.found

    def add(self, found: Iterable[Found], column: str) -> bool:
        """Add findings, and how far off this column is. Returns whether there were any findings."""
        found = list(found)
        self.found += found
        off = max((each.off for each in found), default=0.0)
        far = f"{off:.0%} off" if 0.005 <= off < 10 else f"{off:.2g} off"
        self.cells[column] = far if found else "equal"
        return bool(found)


@dataclass(frozen=True)
class Rows:
    """The twin's gradients of each part of the batch, in the batch's order. A part is some of its rows, or
    some tokens of each row. each: how many. refused: a text on why they could not be computed; or ''.
    """

    gradients: Sequence[Tensors]
    each: int = 1
    refused: str = ""


@dataclass
class Twin:
    """The whole model on one device.

    steps: its recorded steps. again: the same steps in a second run, in float64, from weights rounded to the
    ranks' type if that is coarser. If an operation has no float64, the second run has the type of the first,
    and weights moved by one unit in the last place. The difference of the two runs is the spread. own:
    the weights that `build` gave the model. aliases: name -> other names of the same tensor. parts(what): the
    gradients of parts of the batch. what: 'rows'; 'unmasked', rows with a mask that leaves nothing out; or
    'tokens', some of each row's tokens, with the others not scored.
    """

    steps: Sequence[Seen]
    again: Sequence[Seen]
    own: Tensors
    parts: Callable[[str], Rows] = lambda what: Rows([])
    aliases: Mapping[str, set[str]] = field(default_factory=dict)


Wrong = dict[str, tuple[float, Cause]]  # name -> how far off, and why


def of_dropouts(seen: Mapping[int, Mapping[str, list]], mesh: Mesh) -> list[Found]:
    """Dropouts that drop alike on two ranks, whose inputs differ, or differently, though these are equal.
    seen: rank -> dropout -> for each call, digests of (the input, which numbers were kept; b"" if all).
    """
    pairs: dict[bool, dict[str, set]] = {True: {}, False: {}}  # by whether they drop alike
    for a, b in itertools.combinations(seen, 2):
        for name in seen[a].keys() & seen[b].keys():
            for (given, kept), (other, kept_there) in zip(seen[a][name], seen[b][name]):
                alike = kept == kept_there
                if alike != (given == other) and (kept or kept_there):
                    pairs[alike].setdefault(name, set()).add((a, b))
    found = []
    for alike, names in pairs.items():
        if names:
            of_ranks = set().union(*names.values())
            axes = tuple(a for a in mesh.real_axes if any(mesh.between(*p) == (a,) for p in of_ranks))
            ranks = ranks_text({rank for pair in of_ranks for rank in pair})
            same = ("not ", "they drop at the same places") if alike else ("", "each keeps other numbers")
            text = f"what goes in is {same[0]}the same on {ranks}, and {same[1]}: along {along(axes)}"
            cause = Cause("drops alike" if alike else "drops apart", axes, text)
            found.append(Found(None, "dropout", tuple(sorted(names)), 1.0, cause))
    return found


def by_cause(step: int, what: str, wrong: Wrong) -> list[Found]:
    """The differences, grouped by cause, each with the names that share the cause."""
    groups: dict[Cause, list[str]] = {}
    for name, (_, cause) in wrong.items():
        groups.setdefault(cause, []).append(name)
    return [
        Found(step, what, tuple(filter(None, names)), max(wrong[name][0] for name in names), cause)
        for cause, names in groups.items()
    ]
