"""The sentences that `three-axes verify` prints about a script."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..count.script import say
from ..table import ranks as ranks_named
from .causes import classes_text
from .drift import Copies, Drift
from .sketches import EITHER, SEEDED

SHOWN = 8  # lines that are printed for a step
PATTERNS = 3  # patterns of names that are printed for one reason
# What the check cannot see: if all ranks do the same wrong thing, their copies stay equal.
ALIKE = (
    "not seen: what all ranks do wrong alike (verify(build, step, batch) compares with one device), and a"
    " data set that is sharded twice (add up the rows that all ranks read)"
)


class Findings:
    """Prints the findings on copies, each only once. axes: ranks of a group -> the group's name."""

    def __init__(self, copies: Copies, axes: dict[tuple[int, ...], str]):
        self._copies, self._axes = copies, axes
        self._printed: set[str] = set()

    def strangers(self) -> None:
        """Print the parameters that differed before the first step although their gradients are summed."""
        if strangers := [drift for drift in self._copies.strangers if drift.name not in self._printed]:
            self._printed |= {drift.name for drift in strangers}
            first = max(strangers, key=lambda drift: drift.far)
            more = f" and {len(strangers) - 1} more" * (len(strangers) > 1)
            where = self._where(first._replace(name=first.name + more))
            plural = "differ" if more else "differs"
            why = "seeded apart, or loaded on one rank?"
            say(f"{where.replace('differs', plural, 1)}, and gradients are summed over these ranks: {why}")

    def watched(self) -> None:
        """Print how many tensors are watched."""
        kinds = Counter(self._copies.watched()[0].values())
        phrases = [f"{n} {part}{'s' * (n > 1)}" for part, n in kinds.items()]
        say(f"watched: {', '.join(phrases) or 'nothing'}")

    def found(self, drifts: Iterable[Drift]) -> None:
        """Print a line for each tensor whose copies differ after a step, largest difference first."""
        drifts = [drift for drift in drifts if drift.name not in self._printed]
        self._printed |= {drift.name for drift in drifts}
        drifts.sort(key=lambda drift: -drift.far)
        for drift in drifts[:SHOWN]:
            say(f"{self._where(drift)}, by {drift.far:.1g} of its length")
        if len(drifts) > SHOWN:
            say(f"after step {drifts[0].step}: and {len(drifts) - SHOWN} more")

    def ended(self, steps: int) -> None:
        """Print the findings that are known only at the end. steps: how many were compared."""
        if steps < 1:
            self.watched()
        if self._copies.met:
            when = {
                f"parted by step {parted} and equal again after step {met}"
                for parted, met in self._copies.met.values()
            }
            names = folded(self._copies.met)
            say(f"{names}: {', '.join(sorted(when))}: a note, for copies may be averaged now and then")

    def unequal(self, numbers: Mapping[int, int]) -> bool:
        """If the ranks' optimizers have not made equally many steps, print it. Returns whether they have not.
        numbers: rank -> steps, of the ranks that have ended.
        """
        if len(set(numbers.values())) < 2:
            return False
        made: dict[int, list[int]] = {}
        for rank, number in sorted(numbers.items()):
            made.setdefault(number, []).append(rank)
        named = ", ".join(f"{number} on {ranks_named(of)}" for number, of in made.items())
        say(
            f"the optimizers made unequal numbers of steps: {named}. So a step is not the same on all ranks,"
            " and what differs after it may differ by that alone"
        )
        return True

    def equal_inputs(self, inputs: Sequence[list]) -> None:
        """Print which ranks should see different data, but do not. inputs: for each rank, a list for each
        step, as `Observer.inputs` returns it.
        """
        when = f"in each of {len(inputs[0])} steps" if len(inputs[0]) > 1 else "in step 1"
        for ranks in self._copies.equal_groups([steps if all(steps) else [] for steps in inputs]):
            say(f"{ranks_named(ranks)} saw equal inputs {when}: a note, for their gradients are summed")

    def conclusion(self, script: str, steps: int) -> None:
        """Print how many tensors have copies, how many of these differ, and what could not be checked."""
        watched, left = self._copies.watched()
        copies = sum(name in self._copies.groups for name in watched)
        in_steps, wrong = f"{steps} step{'s' * (steps != 1)}", self._copies.wrong
        alike = [name for name, why in left.items() if why in (EITHER, SEEDED)]
        if wrong:
            copies += len(self._copies.strangers)
            say(f"{script}: of {copies} tensors with copies {len(wrong)} have parted, in {in_steps}")
        elif copies:
            say(f"{script}: {copies} tensors have copies on several ranks, equal after {in_steps}")
        elif alike:
            say(f"{script}: no tensor is known to have copies; {len(alike)} are equal on several ranks")
        else:
            say(f"{script}: no two ranks held the same before the first step: there are no copies")
        say(_unseen(left))

    def _where(self, drift: Drift) -> str:
        ranks = "; ".join(map(classes_text, drift.groups))
        axis = " and ".join(sorted({axis_of(classes, self._axes) for classes in drift.groups}))
        when = f"after step {drift.step}" if drift.step else "before step 1"
        return f"{when}: {drift.name} differs along {axis} ({ranks})"


def axis_of(classes: dict[int, str], axes: dict[tuple[int, ...], str]) -> str:
    """The names of the smallest groups whose members differ. classes: rank -> digest."""
    parted = {
        ranks: name for ranks, name in axes.items() if len({classes[r] for r in ranks if r in classes}) > 1
    }
    if not parted:
        return "no group"
    least = min(map(len, parted))
    return " and ".join(sorted({name for ranks, name in parted.items() if len(ranks) == least}))


def folded(names: Iterable[str]) -> str:
    """The first patterns of the names, with a star for each number: a name in many layers is printed once."""
    patterns = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
    more = f" and {len(patterns) - PATTERNS} more" if len(patterns) > PATTERNS else ""
    return ", ".join(patterns[:PATTERNS]) + more


def _unseen(left: Mapping[str, str]) -> str:
    """The tensors that were not watched, and what a comparison of copies cannot find. left: name -> why."""
    reasons: dict[str, list[str]] = {}
    for name, why in left.items():
        reasons.setdefault(why, []).append(name)
    parts = [f"{folded(names)} ({len(names)}: {why})" for why, names in reasons.items()]
    return f"not watched: {'; '.join(parts)}; {ALIKE}" if parts else ALIKE
