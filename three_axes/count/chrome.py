"""Times of all ranks as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process for each rank. Its first row has what the rank did and where it stood waiting; each axis has a row,
as a stream has, with its collectives from issue to when their end was seen. Memory is a counter.
Format: "Trace Event Format" (Google, 2016): complete events X, counters C, names M; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .clock import Span

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
    rows: Sequence[list[Span]], streams: Sequence[list[Span]], levels: Sequence[list[tuple[float, float]]]
) -> dict:
    """rows[rank], streams[rank]: its spans, those of kind 'comm' in streams. levels[rank]: (when, bytes held
    from then on). Seconds on one clock.
    """
    starts = [s.start for spans in (*rows, *streams) for s in spans]
    zero = min(starts, default=0.0)
    events: list[dict] = []
    for rank, (mine, sent, held) in enumerate(zip(rows, streams, levels)):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events.append(_name("thread_name", rank, 0, "computes and waits"))
        events += [_event(rank, 0, s, f"{NAMES.get(s.kind, s.kind)} {s.label}".strip(), zero) for s in mine]
        axes = list(dict.fromkeys(s.label.partition(" ")[2] for s in sent))
        line = 0
        for axis in axes:
            for lane in _lanes([s for s in sent if s.label.partition(" ")[2] == axis]):
                line += 1
                events.append(_name("thread_name", rank, line, f"communication: {axis}"))
                events += [_event(rank, line, s, s.label.partition(" ")[0], zero) for s in lane]
        for at, size in held:
            if at >= zero:
                events.append(
                    {"ph": "C", "name": "memory", "pid": rank, "ts": 1e6 * (at - zero), "args": {"B": size}}
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(rank: int, line: int, s: Span, name: str, zero: float) -> dict:
    # Whole nanoseconds: Perfetto drops a span that ends one after the next begins, as rounding made it seem.
    start, end = (round(1e9 * (at - zero)) for at in (s.start, s.end))
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "cat": s.kind, "name": name, "pid": rank, "tid": _row(rank, line), **times}


def _name(what: str, rank: int, line: int, name: str) -> dict:
    return {"ph": "M", "name": what, "pid": rank, "tid": _row(rank, line), "args": {"name": name}}


def _row(rank: int, line: int) -> int:
    """Perfetto puts a thread 0 on the row of the thread that has its process's number. So rows have numbers
    that no other row and no process has.
    """
    return 1_000_000 + 1000 * rank + line


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Spans on as few rows as keep those that overlap apart: a row shows nesting, not overlap."""
    lanes: list[list[Span]] = []
    for s in sorted(spans, key=lambda s: s.start):
        free = next((lane for lane in lanes if lane[-1].end <= s.start), None)
        lanes.append([s]) if free is None else free.append(s)
    return lanes
