"""What `verify` found, as a table with a line for each difference."""

from __future__ import annotations

from dataclasses import dataclass

from ..table import Table
from ..terminal import fold
from .verdict import Found, Verdict

COLUMNS = ("loss", "gradients", "clip", "update")
NAMES = 2  # parameters that a line names
WIDE = 100  # characters of a line, if the terminal is not narrower: a notebook breaks lines inside words


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
    when = {None: "", 0: "before step 1, "}.get(found.step, f"step {found.step}, ")
    return f"{when}{found.what}{' of ' + names if names else ''}: {found.cause.text}"
