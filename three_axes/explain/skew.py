"""Separates waiting from transfer in several ranks' traces: finds which rank entered the collectives last.

Clocks are not compared. All ranks of a group leave an all-reduce, an all-gather, a reduce-scatter or a
barrier at the same moment, when the last rank has entered and the bytes have moved. So the rank that entered
last was in the collective for the shortest time. That time is the transfer; the rest of another rank's time
is waiting. All-to-alls are left out: with unequal parts, each rank leaves when its own parts have arrived.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..table import ranks
from .collectives import EXPERTS, Collective
from .split import Split

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "barrier")  # all ranks leave at the same moment
ALONE = ("all_to_all", *EXPERTS)  # each rank leaves when its own parts have arrived
# A rank is named as the latest if, were each rank last equally often, some rank came last so often with less
# than this probability.
CHANCE = 0.05


@dataclass
class Skew:
    """Waiting and transfer in the collectives of one group. calls: the number of collectives. transfer:
    seconds of all of them without waiting. waited: rank -> seconds of the whole recording in which it waited
    for later ranks. last: rank -> how often it entered last.
    """

    axis: str
    calls: int = 0
    transfer: float = 0.0
    waited: dict[int, float] = field(default_factory=dict)
    last: Counter[int] = field(default_factory=Counter)

    @property
    def latest(self) -> int | None:
        """The rank that entered last most often; None if that may be chance (`CHANCE`)."""
        rank, times = self.last.most_common(1)[0]
        share = 1 / len(self.waited)
        tail = sum(
            math.comb(self.calls, k) * share**k * (1 - share) ** (self.calls - k)
            for k in range(times, self.calls + 1)
        )
        return rank if len(self.waited) * tail < CHANCE else None

    def sentence(self) -> str:
        """A sentence with the mean wait of a rank, the transfer (both in ms), and the latest rank."""
        mean = sum(self.waited.values()) / len(self.waited)
        late = self.latest
        often = self.last.most_common(1)[0][1]
        last = (
            f"no rank came last clearly more often than the others (at most {often} times)"
            if late is None
            else f"rank {late} came last to {often} of them"
        )
        return (
            f"{self.axis}, {ranks(list(self.waited))}: in {self.calls} collectives a rank waits"
            f" {1e3 * mean:.1f} ms in the mean, and {1e3 * self.transfer:.1f} ms are transfer; {last}"
        )


def skews(splits: Sequence[Split]) -> tuple[list[Skew], list[str]]:
    """(a Skew for each group in at least two traces, longest wait first; sentences on what is unclear)."""
    by_group: dict[str, dict[int, list[Collective]]] = {}
    for split in splits:
        for c in sorted(split.collectives, key=lambda c: c.start):
            if c.op in TOGETHER and c.group:
                by_group.setdefault(c.group, {}).setdefault(split.rank, []).append(c)
    found, inconclusive = [], []
    if len(splits) > 1 and any(c.op in ALONE for split in splits for c in split.collectives):
        inconclusive.append(
            "not known: who waits for whom in an all_to_all; a rank leaves it when its own parts are there"
        )
    for members in by_group.values():
        axis = next(iter(members.values()))[0].axis
        if len(members) < 2:
            continue
        alike = len({tuple((c.op, c.payload) for c in sent) for sent in members.values()}) == 1
        if not alike or len(members) > (next(iter(members.values()))[0].size or len(members)):
            inconclusive.append(
                f"inconclusive: who waits for whom along {axis}, since {ranks(list(members))} recorded other"
                " collectives, or are several groups of one name; record the same steps on each"
            )
            continue
        skew = Skew(axis, waited=dict.fromkeys(members, 0.0))
        for call in zip(*members.values()):
            took = dict(zip(members, ((c.end - c.start) / 1e6 for c in call)))
            least = min(took, key=took.__getitem__)
            skew.calls, skew.transfer = skew.calls + 1, skew.transfer + took[least]
            skew.last[least] += 1
            for rank in took:
                skew.waited[rank] += took[rank] - took[least]
        found.append(skew)
    return sorted(found, key=lambda skew: -sum(skew.waited.values())), inconclusive
