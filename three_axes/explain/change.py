"""Compares two recordings of one job, before and after a change."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ..table import Table
from .report import Explained


@dataclass
class Change:
    """Two recordings. Times: a rank's mean seconds in a step, or in the recording if no steps are marked."""

    before: Explained
    after: Explained

    def parts(self) -> dict[str, tuple[float, float]]:
        """Part -> (seconds of a step before, after); the largest change is first, 'together' is last."""
        names = {part for s in (*self.before.splits, *self.after.splits) for part in s.parts}
        both = {name: (_mean(self.before, name), _mean(self.after, name)) for name in names}
        ranked = sorted(both.items(), key=lambda part: -abs(part[1][1] - part[1][0]))
        return dict(ranked) | {"together": (_mean(self.before), _mean(self.after))}

    def __repr__(self) -> str:
        *rows, total = [
            [name, f"{1e3 * was:.1f} ms", f"{1e3 * now:.1f} ms", f"{1e3 * (now - was):+.1f} ms"]
            for name, (was, now) in self.parts().items()
            if was or now
        ]
        marked = all(s.steps for s in (*self.before.splits, *self.after.splits))
        what = "a step" if marked else "what was recorded"
        return repr(Table([what, "before", "after", "change"], rows, total, title=f"what changed in {what}"))

    def json(self) -> dict:
        """Both recordings, for --json, with part -> (seconds before, seconds after) of a step."""
        return {"before_and_after": self.parts(), "before": self.before.json(), "after": self.after.json()}


def _mean(recording: Explained, part: str = "") -> float:
    """Seconds of a step, of one part or of the whole step."""
    of = lambda s: s.parts.get(part, 0.0) if part else s.seconds
    return statistics.fmean(of(s) / max(1, s.steps) for s in recording.splits)
