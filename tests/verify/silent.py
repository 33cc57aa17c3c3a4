"""The parallel programs of data/silent, and edits that make their training wrong without an error."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import NamedTuple

from drops import b5
from three_axes.verify import verify


class Mutant(NamedTuple):
    """An edit that makes a program wrong. program: a file of data/silent. edit: 'old => new', several joined
    by ' & '; ⏎ ends a line. layout: a layout on which the edited program is wrong. kinds, axes, parameter: a
    right report has one of these causes, along these axes, and a parameter that matches this pattern ('' if
    no parameter is at fault). If kinds is empty, `verify` does not find the cause.
    """

    name: str
    program: str
    layout: str
    kinds: str
    axes: str
    parameter: str
    edit: str

    def found_by(self, report) -> bool:
        """Whether the report names the right parameter and the right axis."""
        return any(self._names(found) and self._axes(found) for found in report.found)

    def explained_by(self, report) -> bool:
        kinds = self.kinds.split("|")
        return any(self._names(f) and self._axes(f) and f.cause.kind in kinds for f in report.found)

    def _names(self, found) -> bool:
        return not self.parameter or any(fnmatch(name, self.parameter) for name in found.names)

    def _axes(self, found) -> bool:
        """Whether a cause has the right axes. It needs none if only one axis has several ranks."""
        return not found.cause.axes or set(found.cause.axes) == set(self.axes.split())


# program -> layouts on which it is right
PROGRAMS = {
    "dense": ["dp 2", "cp 2", "tp 2", "dp 2 tp 2", "dp 2 cp 2", "cp 2 tp 2"],
    "pipeline": ["pp 2 dp 1", "pp 1 dp 2", "pp 2 dp 2", "pp 4 dp 1"],
    "experts": ["edp 1 ep 2", "edp 2 ep 1", "edp 2 ep 2", "edp 1 ep 4"],
    "zero": ["dp 2", "dp 4"],
}


def mutants() -> list[Mutant]:
    return [Mutant(**row) for row in b5.edits().values()]


def verified(name: str, edit: str, layouts: list[str], steps: int = 2, dtype=None):
    """Run `verify` on ranks, on a program with an edit. Returns its reports."""
    names = b5.program(name, edit)
    types = {} if dtype is None else {"dtype": dtype}
    return verify(names["build"], names["step"], names["batch"](), layouts, steps=steps, **types)
