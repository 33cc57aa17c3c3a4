"""Right parallel code, edits of it that train without a word and wrongly, and who finds them.

    python tools/silent.py             every edit: what `verify` says, and what a monitor of the loss sees
    python tools/silent.py norm clip   those whose name has one of these words

The programs and their edits are in data/silent. A monitor of the loss rings when a step's loss is
half as much again as the lowest before it, or no number.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "notebooks"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from drops import b5
from helpers import World
from three_axes.table import Table
from three_axes.verify import verify

STEPS = 30  # that a monitor of the loss sees


class Mutant(NamedTuple):
    """program: a file of data/silent. edit: 'old => new', several with ' & '; ⏎ ends a line. layout: one on
    which it is wrong. kinds, axes, parameter: a right answer has one of these causes, along these axes, and
    a name like this ('' where no parameter is at fault). No kind: the cause is not found.
    """

    name: str
    program: str
    layout: str
    kinds: str
    axes: str
    parameter: str
    edit: str

    def found_by(self, report) -> bool:
        """Whether the parameter and the axis are right."""
        return any(self._names(found) and self._axes(found) for found in report.found)

    def explained_by(self, report) -> bool:
        kinds = self.kinds.split("|")
        return any(self._names(f) and self._axes(f) and f.cause.kind in kinds for f in report.found)

    def _names(self, found) -> bool:
        return not self.parameter or any(fnmatch(name, self.parameter) for name in found.names)

    def _axes(self, found) -> bool:
        """The layout has one axis of several ranks, so a cause without axes means that one."""
        return not found.cause.axes or set(found.cause.axes) == set(self.axes.split())


PROGRAMS = {
    "dense": ["dp 2", "cp 2", "tp 2", "dp 2 tp 2", "dp 2 cp 2", "cp 2 tp 2"],
    "pipeline": ["pp 2 dp 1", "pp 1 dp 2", "pp 2 dp 2", "pp 4 dp 1"],
    "experts": ["edp 1 ep 2", "edp 2 ep 1", "edp 2 ep 2", "edp 1 ep 4"],
    "zero": ["dp 2", "dp 4"],
}


def mutants() -> list[Mutant]:
    return [Mutant(**row) for row in b5.edits().values()]


def verified(name: str, edit: str, layouts: list[str], steps: int = 2, dtype=None):
    """On ranks: what verify says of a program."""
    names = b5.program(name, edit)
    types = {} if dtype is None else {"dtype": dtype}
    return verify(names["build"], names["step"], names["batch"](), layouts, steps=steps, **types)


def losses(name: str, edit: str, layout: str) -> list[float] | None:
    """On ranks: the losses that a monitor sees, on those that know them."""
    seen, _ = b5.trained(b5.program(name, edit), layout, STEPS, lambda model: None)
    return seen if seen and None not in seen else None


def main() -> None:
    words = sys.argv[1:]
    chosen = [m for m in mutants() if not words or any(word in m.name for word in words)]
    rows = []
    with World(4, timeout=120) as world:
        for mutant in chosen:
            report = world.run(verified, mutant.program, mutant.edit, [mutant.layout])[0]
            seen = next(filter(None, world.run(losses, mutant.program, mutant.edit, mutant.layout)))
            marks = [mutant.found_by(report), mutant.explained_by(report), b5.rings(seen)]
            rows.append([mutant.name, *("✓" if mark else "-" for mark in marks)])
            if words:
                print(report)
        for name, layouts in PROGRAMS.items():
            seen = next(filter(None, world.run(losses, name, "", layouts[0])))
            assert not b5.rings(seen), f"the monitor rings of {name}, which is right"
    total = [str(sum(row[i] == "✓" for row in rows)) for i in (1, 2, 3)]
    print(Table(["edit", "found", "cause", "a monitor rings"], rows, [f"of {len(rows)}", *total]))


if __name__ == "__main__":
    main()
