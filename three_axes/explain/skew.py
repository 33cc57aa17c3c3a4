"""Waiting and transfer, told apart: who came last to the collectives that several ranks' traces have.

No clocks are compared. All members of a group leave an all-reduce, an all-gather, a reduce-scatter or a
barrier together, when the last rank has come and the bytes have moved. So the rank that came last was in it
for the shortest time, and that time is the transfer; what another rank was in it for longer, it waited. An
all-to-all is left out: of one with unequal parts each rank leaves when its own parts are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..table import ranks
from .collectives import EXPERTS, Collective
from .split import Split

TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "barrier")  # that all ranks leave at once
ALONE = ("all_to_all", *EXPERTS)  # that each rank leaves when its own parts are there


@dataclass
class Skew:
    """One group's collectives, waiting told apart from transfer. waited: rank -> seconds of the whole
    recording in which it waited for later ranks. transfer: seconds of a rank. last: how often each came last.
    """

    axis: str
    calls: int = 0
    transfer: float = 0.0
    waited: dict[int, float] = field(default_factory=dict)
    last: Counter[int] = field(default_factory=Counter)

    @property
    def latest(self) -> int:
        """The rank that came last most often."""
        return self.last.most_common(1)[0][0]

    def sentence(self) -> str:
        """The mean wait of a rank, the transfer (both in ms), and who came last, in words."""
        mean = sum(self.waited.values()) / len(self.waited)
        late = self.latest
        return (
            f"{self.axis}, {ranks(list(self.waited))}: in {self.calls} collectives a rank waits"
            f" {1e3 * mean:.1f} ms in the mean, and {1e3 * self.transfer:.1f} ms are transfer; rank {late}"
            f" came last to {self.last[late]} of them"
        )


def skews(splits: Sequence[Split]) -> tuple[list[Skew], list[str]]:
    """(each group that two ranks or more tell of, the one with most waiting first; what is inconclusive)."""
    told: dict[str, dict[int, list[Collective]]] = {}
    for split in splits:
        for c in sorted(split.collectives, key=lambda c: c.start):
            if c.op in TOGETHER and c.group:
                told.setdefault(c.group, {}).setdefault(split.rank, []).append(c)
    found, inconclusive = [], []
    if len(splits) > 1 and any(c.op in ALONE for split in splits for c in split.collectives):
        inconclusive.append(
            "not known: who waits for whom in an all_to_all; a rank leaves it when its own parts are there"
        )
    for members in told.values():
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
        for meeting in zip(*members.values()):
            took = dict(zip(members, ((c.end - c.start) / 1e6 for c in meeting)))
            least = min(took, key=took.__getitem__)
            skew.calls, skew.transfer = skew.calls + 1, skew.transfer + took[least]
            skew.last[least] += 1
            for rank in took:
                skew.waited[rank] += took[rank] - took[least]
        found.append(skew)
    return sorted(found, key=lambda skew: -sum(skew.waited.values())), inconclusive
