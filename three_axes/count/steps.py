"""Divides the counts of a run into training steps. A step ends when the optimizer has stepped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .clock import Span
from .meter import Recorder
from .report import CollectiveCount, alike

APART = 2  # so many first steps are kept separately: DDP makes buckets in the first, new ones in the second


@dataclass
class BySteps:
    """One rank's counts, by step: the first steps separately, the further ones together."""

    first: list[list[CollectiveCount]] = field(default_factory=list)  # the rows of each of the first steps
    sums: list[CollectiveCount] = field(default_factory=list)  # the summed rows of the further steps
    further: int = 0  # how many further steps there were
    same: bool = True  # whether all of them made the same calls with the same bytes
    after: list[CollectiveCount] = field(default_factory=list)  # the rows after the last step
    seconds: float = 0.0  # that the further steps took together

    @property
    def number(self) -> int:
        """The number of steps that have ended."""
        return len(self.first) + self.further

    def mean(self) -> list[CollectiveCount]:
        """The rows of the mean of the further steps."""
        return [row.part(self.further) for row in self.sums]


class Stepping:
    """Hooks on every optimizer of this process, until `stop`.

    Of several optimizers, the one that stepped first in the run ends each training step. An optimizer that
    steps inside another's step (as in ZeroRedundancyOptimizer) is ignored. begins(ends), ended(ends): called
    before and after all steps that are not ignored. ends: whether the step ends a training step.
    """

    def __init__(self, begins: Callable[[bool], None], ended: Callable[[bool], None]):
        self._begins, self._ended = begins, ended
        self._inside: list[object] = []  # optimizers that are stepping, the outer one first
        self._first: object = None
        self._hooks = (
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._starts(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer)),
        )

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _starts(self, optimizer) -> None:
        if optimizer in self._inside:  # its last step raised
            del self._inside[self._inside.index(optimizer) :]
        self._inside.append(optimizer)
        if len(self._inside) == 1:
            self._first = self._first or optimizer
            self._begins(optimizer is self._first)

    def _stepped(self, optimizer) -> None:
        del self._inside[self._inside.index(optimizer) :]
        if not self._inside:
            self._ended(optimizer is self._first)


class Steps:
    """Divides what a recorder counts into training steps, while they run. counted: the counts so far."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.counted = recorder, BySteps()
        self._began = self._stepping = time.monotonic()
        self._before: list[CollectiveCount] = []
        self._optimizers = Stepping(self._starts, self._stepped)

    def stop(self) -> BySteps:
        """Stop watching the optimizers. What was counted since the last step is added to `after`."""
        self._optimizers.stop()
        self.counted.after = self._since()
        return self.counted

    def _starts(self, ends: bool) -> None:
        self._stepping = time.monotonic()

    def _stepped(self, ends: bool) -> None:
        now = time.monotonic()
        self.recorder.keep(Span("step", "", self._stepping, now))
        if ends:
            self.recorder.keep(Span("busy", str(self.counted.number + 1), self._began, now))
            self._end(now - self._began)
            self._began = now

    def _end(self, seconds: float) -> None:
        rows, counted = self._since(), self.counted
        if len(counted.first) < APART:
            counted.first.append(rows)
            return
        if counted.further:
            counted.same &= alike(rows, counted.mean())
        counted.sums = _joined(counted.sums, rows, 1)
        counted.further += 1
        counted.seconds += seconds

    def _since(self) -> list[CollectiveCount]:
        """The rows since the last call of `_since`."""
        now = self.recorder.counted_so_far()
        since, self._before = _joined(now, self._before, -1), now
        return [row for row in since if row.calls]


def _joined(rows: list[CollectiveCount], others: list[CollectiveCount], sign: int) -> list[CollectiveCount]:
    """rows + sign · others, by operation and axis."""
    joined = {(row.op, row.axis): row for row in rows}
    for other in others:
        key = other.op, other.axis
        joined[key] = joined.get(key, CollectiveCount(*key)).plus(other, sign)
    return list(joined.values())
