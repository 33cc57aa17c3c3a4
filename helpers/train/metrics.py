"""A run's metrics: a line of JSON for each step, in the folder's metrics.jsonl."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILE = "metrics.jsonl"


class Metrics:
    """Appends lines. What the disk does not take waits in memory for the next one, and `say` is told once.

    waiting: the bytes that are not written yet.
    """

    def __init__(self, handle: int, say: Callable[[str], None]):
        self.waiting, self._handle, self._say, self._told = b"", handle, say, False

    def write(self, line: dict) -> None:
        """Append a step's line. Raises nothing where the disk refuses it: training goes on."""
        self.waiting += json.dumps(line).encode() + b"\n"
        try:
            while self.waiting:  # a disk that is almost full takes a part
                self.waiting = self.waiting[os.write(self._handle, self.waiting) :]
            self._told = False
        except OSError as e:
            if not self._told:
                self._say(
                    f"metrics of step {line['step']} on wait in memory ({e.strerror}); training goes on"
                )
            self._told = True


@contextmanager
def metrics_of(run: Path, step: int, say: Callable[[str], None]) -> Iterator[Metrics]:
    """Go on with a run's metrics after `step`: lines of steps that will be done again are dropped, and one
    that was cut short. Nothing is copied, so that it needs no room on the disk. `say` is told which steps
    before have no line.

    Raises ValueError where the file cannot be opened.
    """
    try:
        handle = os.open(run / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        before = [(line["step"], end) for line, end in _lines(run) if line["step"] <= step]
        os.ftruncate(handle, max((end for _, end in before), default=0))
    except OSError as e:
        raise ValueError(f"{run / FILE} cannot be written: {e.strerror}") from None
    if missing := sorted(set(range(1, step + 1)) - {number for number, _ in before}):
        say(
            f"{FILE} is damaged: {len(missing)} of the {step} steps so far have no line in it, step"
            f" {missing[0]} is the first"
        )
    metrics = Metrics(handle, say)
    try:
        yield metrics
    finally:
        os.close(handle)
        if metrics.waiting:
            lost = len(metrics.waiting.splitlines())
            say(f"the disk never took the last {lost} lines of {FILE}; they are lost")


def read_metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics, without those that are damaged or not yet whole."""
    return [line for line, _ in _lines(run)]


def _lines(run: Path) -> Iterator[tuple[dict, int]]:
    """Each whole line, and where in the file it ends."""
    end = 0
    for line in (run / FILE).read_bytes().splitlines(keepends=True) if (run / FILE).exists() else []:
        end += len(line)
        with suppress(ValueError, RecursionError):
            metrics = json.loads(line)
            if isinstance(metrics, dict) and type(metrics.get("step")) is int and line.endswith(b"\n"):
                yield metrics, end
