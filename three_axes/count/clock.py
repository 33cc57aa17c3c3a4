"""What each rank did when, and how many bytes it held for backward: `Timeline`, also as a Chrome trace.

    with span("F", 3):          # from helpers.ranks: this block is the forward of microbatch 3
        y = stage(x)

`helpers.World` runs a function with such blocks on its ranks; waits for collectives are recorded too. After
the run, `world.timeline` has the spans of every rank. Their times are comparable, because all processes of a
machine share its monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

COMPUTE = ("F", "B", "I", "W", "step", "busy")  # kinds of `Span` in which a rank computes
T = TypeVar("T")


class Span(NamedTuple):
    """An interval on one rank. start, end: seconds on the shared clock.

    kind: 'F', a forward; 'B', a backward; 'I' and 'W', its parts for inputs and for weights; 'step', the
    optimizer's step; 'busy', a whole step; 'wait', a wait for a collective; 'comm', a collective. label: the
    number of the microbatch or step, or the collective and its axis.
    """

    kind: str
    label: str
    start: float
    end: float


def shortest(measure: Callable[[], T], seconds: Callable[[T], float]) -> T:
    """The result of `measure()` in its fastest run, because other programs can only make a run slower.

    `measure` is called until the two fastest runs differ by less than 5 %, at most six times. So it gets more
    runs on a busy machine than on a quiet one.
    """
    runs: list[T] = []
    while len(runs) < 6 and (len(runs) < 2 or seconds(runs[1]) > 1.05 * seconds(runs[0])):
        runs = sorted([*runs, measure()], key=seconds)
    return runs[0]


class Timeline:
    """What every rank did in one call. Times are seconds from the first computation on any rank.

    rows[r]: rank r's spans by start. streams[r]: its collectives, each from its issue until its end was
    noticed. levels[r]: (time, bytes held for backward from then on), measured by `saved_activations`. shared:
    whether ranks shared a GPU and took turns, so that these seconds mean nothing.
    """

    unit, level_unit = "s", "B"

    def __init__(
        self,
        spans: Sequence[list[Span]],
        levels: Sequence[list[tuple[float, int]]],
        streams: Sequence[list[Span]] = (),
        shared: bool = False,
    ):
        self.shared = shared
        first = min(
            (s.start for rank in spans for s in rank if s.kind in COMPUTE),
            default=min((s.start for rank in spans for s in rank), default=0.0),
        )
        shifted = lambda s: s._replace(start=max(0.0, s.start - first), end=s.end - first)
        in_order = lambda rank: sorted((shifted(s) for s in rank if s.end > first), key=lambda s: s.start)
        self.rows = [in_order(rank) for rank in spans]
        self.streams = [in_order(rank) for rank in streams or [[]] * len(spans)]
        self.levels = []
        for rank in levels:
            # The bytes held at the first computation, for example by a warm-up before it.
            before = [size for at, size in rank if at <= first][-1:]
            self.levels.append(
                [(0.0, size) for size in before] + [(at - first, size) for at, size in rank if at > first]
            )

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((s.end for rank in self.rows for s in rank), default=0.0)

    def seconds(self, rank: int, *kinds: str) -> float:
        """The seconds that `rank` spent in spans of these kinds. Time inside another span is counted once."""
        total = until = 0.0
        for s in self.rows[rank]:
            if s.kind in kinds and s.end > until:
                total += s.end - max(s.start, until)
                until = s.end
        return total

    @property
    def bubble(self) -> float:
        """Share of wall time in which a rank does not compute, mean over ranks.

        Raises ValueError if nothing was recorded.
        """
        if not self.makespan:
            raise ValueError(
                'nothing was recorded: run what you want to see inside `with span("F"):` on the ranks'
            )
        ranks = range(len(self.rows))
        return 1 - sum(self.seconds(r, *COMPUTE) for r in ranks) / (self.makespan * len(ranks))

    def in_flight(self, rank: int) -> int:
        """The largest number of microbatches that `rank` had run forward and not yet backward."""
        held = most = 0
        for s in self.rows[rank]:
            held += (s.kind == "F") - (s.kind in ("B", "W"))
            most = max(most, held)
        return most

    def peak(self, rank: int) -> int:
        """The largest number of bytes that `rank` held for backward at one time."""
        return max((size for _, size in self.levels[rank]), default=0)

    def save(self, file: str) -> None:
        """Write the timeline as a Chrome trace, for ui.perfetto.dev and chrome://tracing: a row for each
        rank, a row for each axis along which it communicates, and memory as a counter.
        """
        with open(file, "w", encoding="utf-8") as f:
            json.dump(chrome(self.rows, self.streams, self.levels), f)

    def __repr__(self) -> str:
        if not any(self.rows):
            return "no spans: nothing was recorded on the ranks"
        words = [[s.kind + s.label for s in row if s.kind != "wait"] for row in self.rows]
        note = ["ranks shared a GPU: seconds mean nothing"] * self.shared
        return "\n".join([*(f"rank {r}: {' '.join(row)}" for r, row in enumerate(words)), *note])


# -- as a Chrome trace ----------------------------------------------------------------------------
# For Perfetto (ui.perfetto.dev) and chrome://tracing. Each rank is a process. Its first row has the rank's
# spans and waits; each axis has a row with its collectives, from issue to when their end was noticed. Memory
# is a counter. "Trace Event Format" (Google, 2016): complete events X, counters C, names M; times in
# microseconds.


NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "step": "optimizer",
    "busy": "step",
    "wait": "wait:",
}


def chrome(
    rows: Sequence[list[Span]], streams: Sequence[list[Span]], levels: Sequence[Sequence[tuple[float, float]]]
) -> dict:
    """The trace as a dict, ready for JSON. rows, streams: as in `Timeline`. levels[r]: (when, bytes that rank
    r held from then on). All times are seconds on one clock.
    """
    zero = min((s.start for spans in (*rows, *streams) for s in spans), default=0.0)
    events: list[dict] = []
    for rank, (mine, sent, held) in enumerate(zip(rows, streams, levels)):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events.append(_name("thread_name", rank, 0, "computes and waits"))
        events += [_event(rank, 0, s, f"{NAMES.get(s.kind, s.kind)} {s.label}".strip(), zero) for s in mine]
        by_axis: dict[str, list[Span]] = {}
        for s in sent:
            by_axis.setdefault(s.label.partition(" ")[2], []).append(s)
        lanes = [(axis, lane) for axis, spans in by_axis.items() for lane in _lanes(spans)]
        for line, (axis, lane) in enumerate(lanes, 1):
            events.append(_name("thread_name", rank, line, f"communication: {axis}"))
            events += [_event(rank, line, s, s.label.partition(" ")[0], zero) for s in lane]
        memory = {"ph": "C", "name": "memory", "pid": rank}
        events += [memory | {"ts": 1e6 * (at - zero), "args": {"B": n}} for at, n in held if at >= zero]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(rank: int, line: int, s: Span, name: str, zero: float) -> dict:
    # Whole nanoseconds: with rounding errors Perfetto drops a span that ends after the next one begins.
    start, end = (round(1e9 * (at - zero)) for at in (s.start, s.end))
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "cat": s.kind, "name": name, "pid": rank, "tid": _row(rank, line), **times}


def _name(what: str, rank: int, line: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": rank, "tid": _row(rank, line), "args": {"name": name}}


def _row(rank: int, line: int) -> int:
    """A row's number, different from that of every other row and process. (With number 0, Perfetto would put
    the row on that of the thread whose number is its process's.)
    """
    return 1_000_000 + 1000 * rank + line


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Distribute spans over as few rows as possible without overlap, because a row cannot show overlap."""
    lanes: list[list[Span]] = []
    for s in sorted(spans, key=lambda s: s.start):
        free = next((lane for lane in lanes if lane[-1].end <= s.start), None)
        lanes.append([s]) if free is None else free.append(s)
    return lanes
