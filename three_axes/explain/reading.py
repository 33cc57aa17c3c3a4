"""A trace of `torch.profiler`, event by event: only what is needed is kept, so that a large file fits.

The format is Chrome's "Trace Event Format"; what PyTorch writes into it is in Kineto's output_json.cpp.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CHUNK = 1 << 22  # characters read at once
HEAD = 1 << 26  # so far the list of events is looked for
_BETWEEN = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_RANK = re.compile(r"rank[-_ ]?(\d+)", re.I)
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
NOTES = ("user_annotation", "gpu_user_annotation")


class Unreadable(ValueError):
    """A file that is no whole trace. The message is one sentence."""


@dataclass(slots=True)
class Event:
    """Times in microseconds."""

    name: str
    start: float
    end: float
    thread: object
    args: dict = field(default_factory=dict)


@dataclass
class Trace:
    """What one rank's trace has. gpu: kernels and copies. launches: correlation -> when the host's call that
    launched it ended, and its thread and start. notes: annotations. cpu: operators of a run without GPU.
    """

    file: str
    rank: int | None
    info: dict
    gpu: list[tuple[str, Event]]
    launches: dict[int, tuple[float, object, float]]
    notes: list[Event]
    cpu: list[Event]


def read(path: str) -> Trace:
    """One file, plain or gzipped. Raises Unreadable for what is no whole trace."""
    file, info, gpu, launches, notes, cpu = Path(path).name, {}, [], {}, [], []
    names: dict[str, str] = {}  # a trace repeats few names
    try:
        for event in _events(path, info):
            if not isinstance(event, dict) or event.get("ph") != "X":
                continue
            kind, start, args = str(event.get("cat")).lower(), event.get("ts"), event.get("args") or {}
            if not isinstance(start, (int, float)):
                continue
            end, name = start + (event.get("dur") or 0), str(event.get("name"))
            name, thread = names.setdefault(name, name), event.get("tid")
            if kind in GPU:
                gpu.append((kind, Event(name, start, end, thread, _needed(args))))
            elif kind.endswith("_runtime") or kind.endswith("_driver"):
                if "correlation" in args:
                    launches[args["correlation"]] = end, thread, start
            elif kind in NOTES or name.startswith(("enumerate(DataLoader)", "ProfilerStep")):
                notes.append(Event(name, start, end, thread if kind != "gpu_user_annotation" else None))
            elif kind in ("cpu_op", "operator") and not gpu:
                cpu.append(Event(name, start, end, thread))
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise Unreadable(f"{file} ends too early or is damaged: copy it again, or record it again") from None
    except (OSError, UnicodeDecodeError) as e:
        raise Unreadable(
            f"{file} cannot be read: {getattr(e, 'strerror', None) or 'it is no text'}"
        ) from None
    known = info.get("distributedInfo")
    info["distributedInfo"] = known if isinstance(known, dict) else {}
    rank = info["distributedInfo"].get("rank")
    if rank is None and (in_name := _RANK.search(file)):
        rank = int(in_name[1])
    if not gpu and not cpu:
        raise Unreadable(f"{file} has no kernels and no operators: was anything run while it was recorded?")
    return Trace(file, rank, info, gpu, launches, notes, [] if gpu else cpu)


NEEDED = (
    "correlation",
    "bytes",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "dtype",
    "Process Group Name",
    "Process Group Description",
)


def _needed(args: dict) -> dict:
    return {key: args[key] for key in NEEDED if key in args}


def _open(path: str) -> io.TextIOBase:
    raw = open(path, "rb")
    zipped = raw.read(2) == b"\x1f\x8b"
    raw.seek(0)
    return io.TextIOWrapper(gzip.open(raw) if zipped else raw, encoding="utf-8", errors="strict")


def _events(path: str, info: dict) -> Iterator[object]:
    """The events of a file; what stands beside them goes into `info`."""
    name, decode = Path(path).name, json.JSONDecoder().raw_decode
    with _open(path) as file:
        text = file.read(CHUNK)
        if not text.strip():
            raise Unreadable(f"{name} is empty")
        at = 0
        if text.lstrip()[0] == "[":  # the format's other form: a bare list
            at = text.index("[") + 1
        else:
            while not (events := _EVENTS.search(text)):
                more = file.read(CHUNK)
                if not more or len(text) > HEAD or text.lstrip()[0] != "{":
                    raise Unreadable(f"{name} is no trace of torch.profiler: it has no list of traceEvents")
                text += more
            info |= _object(text[: events.start()].rstrip().rstrip(",") + "}")
            at = events.end()
        while True:
            at = _BETWEEN.match(text, at).end()
            if at < len(text) and text[at] == "]":
                break
            try:
                event, at = decode(text, at)
                yield event
            except json.JSONDecodeError:
                more = file.read(CHUNK)
                if not more:
                    raise Unreadable(
                        f"{name} ends in the middle of an event: it was cut off as it was written or copied;"
                        " record it again"
                    ) from None
                text, at = text[at:] + more, 0
                if len(text) > HEAD:
                    raise Unreadable(f"{name} is damaged: an event in it cannot be read") from None
        info |= _object("{" + (text[at + 1 :] + file.read(CHUNK)).strip().lstrip(","))


def _object(text: str) -> dict:
    """What stands before or behind the events; nothing where it cannot be read."""
    try:
        parsed = json.loads(text)
        return parsed if isinstance(parsed, dict) else {}
    except json.JSONDecodeError:
        return {}
