"""The result of `verify`: the differences with their causes, and a table with a line for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..table import Table
from ..terminal import fold
from .causes import Cause

COLUMNS = ("loss", "gradients", "clip", "update")
NAMES = 2  # parameters that a line names
WIDE = 100  # characters of a line, if the terminal is not narrower: a notebook breaks lines inside words


EXACT = 1e-9  # allowed in float64; differences from another order of summation are below 1e-12


@dataclass(frozen=True)
class Found:
    """A difference. step: 1, 2, …; 0 before the first. what: 'loss', 'gradients' and so on. names: of
    parameters, buffers or modules. off: relative.
    """

    step: int
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


@dataclass
class Report:
    """The verdicts of all layouts, in order. Printed, it is a table with a line for each difference."""

    verdicts: list[Verdict]

    @property
    def ok(self) -> bool:
        """Whether no layout differs from the twin."""
        return all(verdict.ok for verdict in self.verdicts)

    @property
    def found(self) -> list[Found]:
        """The differences of all layouts."""
        return [found for verdict in self.verdicts for found in verdict.found]

    def __repr__(self) -> str:
        rows = [[v.layout, *(v.cells.get(column, "-") for column in COLUMNS)] for v in self.verdicts]
        layouts: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            for found in verdict.found:
                layouts.setdefault(_line(found), []).append(verdict.layout)
        lines = [fold(f"{', '.join(where)}: {line}", WIDE) for line, where in layouts.items()]
        least = max(verdict.least for verdict in self.verdicts)
        exact = all(verdict.exact for verdict in self.verdicts)
        rounding = f"What is less than {least:.1g} off may be rounding."
        table = repr(Table(["layout", *COLUMNS], rows))
        return "\n".join([table, *lines, "In float64: a difference is a mistake." if exact else rounding])


def _line(found: Found) -> str:
    names = ", ".join(found.names[:NAMES]) + (
        f" and {len(found.names) - NAMES} more" if len(found.names) > NAMES else ""
    )
    when = f"step {found.step}, " if found.step else "before step 1, "
    return f"{when}{found.what}{' of ' + names if names else ''}: {found.cause.text}"
