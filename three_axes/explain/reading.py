"""Reads a trace of `torch.profiler` event by event, and keeps only the needed ones, so that large files fit
in memory.

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
from typing import Any, NamedTuple

from ..foreign import Unreadable, open_file, plain

CHUNK = 1 << 22  # characters read at once
HEAD = 1 << 26  # characters in which the list of events must begin, and in which one event must end
LATEST = 2.0**63  # microseconds; a larger time is an error
_BETWEEN = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_HOST = re.compile(r"(.+)_\d+\.\d+(?:\.pt)?\.trace\.json")  # torch's name of a trace: host, process, time
_RANK = re.compile(r"rank[-_ ]?(\d{1,9})", re.I)
GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a GPU's events
CALLS = ("runtime", "driver")  # how the categories of the host's calls end: "cuda_runtime", "Runtime"
STRANGE = ("mtia", "hpu", "privateuse1", "xpu", "glow")  # devices whose events are not read
BACKWARD = ("ackward", "bwd", "_grad", "autograd::engine", "Optimizer.step")  # in names of training only
NOTES = ("user_annotation", "gpu_user_annotation")


@dataclass(slots=True)
class Event:
    """An event. start, end: in microseconds. args: those in `NEEDED`."""

    name: str
    start: float
    end: float
    thread: object
    args: dict = field(default_factory=dict)


class HostCall(NamedTuple):
    """A call of the host to CUDA, or to another device's library. start, end: in microseconds."""

    name: str
    start: float
    end: float
    thread: object


@dataclass
class Trace:
    """The needed contents of one rank's trace.

    rank: None if neither the trace nor the file's name has it. gpu: (kind, event) of kernels, copies and
    memsets. launches: correlation -> the host's call that launched the kernel. notes: annotations. cpu:
    operators; [] if there are events of a GPU. groups: PyTorch's descriptions of the process groups. size: of
    the world; None if not known. strange: devices without events in the trace, or with events that are not
    read here. trains: False if operators were recorded and none is of a backward or an optimizer. devices:
    the process's own numbers of the GPUs that ran the kernels. host: the machine, if
    `tensorboard_trace_handler` named the file; otherwise ''. A trace itself names neither its machine nor its
    GPUs (output_json.cpp and DeviceProperties.cpp of Kineto at 002d991).
    """

    file: str
    rank: int | None
    groups: list[dict]
    gpu: list[tuple[str, Event]]
    launches: dict[object, HostCall]
    notes: list[Event]
    cpu: list[Event]
    size: int | None
    strange: set[str]
    trains: bool = True
    devices: set[str] = field(default_factory=set)
    host: str = ""


def files_of(path: str) -> list[str]:
    """The traces in a folder, by name; for a file, the file. Raises Unreadable if there are none."""
    if not Path(path).is_dir():
        return [path]
    files = sorted(str(f) for f in Path(path).iterdir() if f.name.endswith((".json", ".json.gz")))
    if not files:
        what_to_do = "give the folder of the traces"
        raise Unreadable(f"{plain(path, 1000)} has no .json and no .json.gz in it: {what_to_do}")
    return files


def read(path: str) -> Trace:
    """Read one file, plain or gzipped. Raises Unreadable if it cannot be read, is no whole trace, has no
    kernels and no operators, or has impossible values.
    """
    file, launches, notes, cpu = plain(Path(path).name), {}, [], []
    beside: dict = {}
    gpu: list[tuple[str, Event]] = []
    names: dict[str, str] = {}  # one string for each name, because events repeat few names
    strange: set[str] = set()
    called: set[str] = set()  # devices that are known only from the host's calls
    gpus: set[str] = set()
    operators = backward = False
    try:
        for found in _events(path, beside):
            if not isinstance(found, dict) or found.get("ph") != "X":
                continue
            kind, name = str(found.get("cat")).lower(), str(found.get("name"))
            launches_something = kind.endswith(CALLS)
            devices = called if launches_something else strange
            devices.update(device for device in STRANGE if kind.startswith(device))
            operators |= kind == "cpu_op"
            backward |= any(word in name for word in BACKWARD)
            if not (launches_something or kind in NOTES or kind in GPU or kind == "cpu_op" and not gpu):
                continue
            event = _event(file, found, names.setdefault(name, name))
            if kind in GPU:
                gpu.append((kind, event))
                gpus.add(str(found.get("pid")))
            elif launches_something:
                call = HostCall(event.name, event.start, event.end, event.thread)
                launches[event.args.get("correlation")] = call
            elif kind in NOTES:
                event.thread = None if kind == "gpu_user_annotation" else event.thread
                notes.append(event)
            else:
                cpu.append(event)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise Unreadable(f"{file} ends too early or is damaged: copy it again, or record it again") from None
    except UnicodeDecodeError:
        raise Unreadable(f"{file} is no text: give what export_chrome_trace wrote, gzipped or not") from None
    except OSError as e:
        raise Unreadable(f"cannot read {file}: {e.strerror}") from None
    except RecursionError:
        raise Unreadable(f"{file} is nested too deeply for a trace: record it again") from None
    launches.pop(None, None)
    if not gpu and not cpu:
        raise Unreadable(f"{file} has no kernels and no operators: was anything run while it was recorded?")
    job = beside.get("distributedInfo")
    job = job if isinstance(job, dict) else {}
    rank, groups, size = job.get("rank"), job.get("pg_config"), job.get("world_size")
    if type(rank) is not int or not 0 <= rank < 10**9:
        rank = int(in_name[1]) if (in_name := _RANK.search(file)) else None
    groups = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    size = size if type(size) is int and 0 < size <= 100_000 else None
    if not gpu:
        strange |= called
        has_gpus = launches or beside.get("deviceProperties") or "nccl" in str(job.get("backend"))
        if has_gpus and not strange and not any(note.name.startswith("gloo:") for note in notes):
            strange.add("GPU")
    trains = backward or not operators
    cpu = [] if gpu else cpu
    # A GPU that is behind its host still runs what was launched before the recording began.
    number = lambda event: event.args.get("correlation")
    begun = [event.start for _, event in gpu if number(event) is None or number(event) in launches]
    if launches and begun:
        gpu = [(kind, event) for kind, event in gpu if event.start >= min(begun)]
    host = _HOST.match(file)
    return Trace(
        file, rank, groups, gpu, launches, notes, cpu, size, strange, trains, gpus, host[1] if host else ""
    )


NEEDED = (
    "correlation",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "dtype",
    "Process Group Name",
    "Process Group Description",
    "Process Group Ranks",
)


def _event(file: str, found: dict, name: str) -> Event:
    """An event with its needed arguments, if they are valid. Raises Unreadable if its times are not."""
    start: Any = found.get("ts")
    lasts, args = found.get("dur"), found.get("args") or {}
    wrong = None
    if type(start) not in (int, float) or not abs(start) < LATEST:
        wrong = f"begins at {plain(repr(start), 40)}, which is no number of microseconds"
    elif lasts is None:
        wrong = "has no duration"
    elif type(lasts) not in (int, float) or not 0 <= lasts < LATEST:
        wrong = f"takes {plain(repr(lasts), 40)}, which is no number of microseconds of at least 0"
    elif not isinstance(args, dict):
        wrong = f"has the arguments {plain(repr(args), 40)}, which are no names with values"
    if wrong:
        raise Unreadable(f"{file} is damaged: its event {plain(name, 80)} {wrong}; record it again")
    thread = found.get("tid")
    needed = {key: args[key] for key in NEEDED if key in args and _is_sound(args[key])}
    return Event(name, start, start + lasts, thread if _is_sound(thread) else None, needed)


def _is_sound(value: object) -> bool:
    return isinstance(value, str) or isinstance(value, (int, float)) and 0 <= value < LATEST


def _events(path: str, beside: dict) -> Iterator[object]:
    """The events of a file. The fields beside the list of events are added to `beside`. Raises Unreadable for
    a file that is no trace, or is damaged.
    """
    name, decode = plain(Path(path).name), json.JSONDecoder().raw_decode
    with open_file(path) as raw:
        file = io.TextIOWrapper(gzip.open(raw) if raw.peek(2).startswith(b"\x1f\x8b") else raw, "utf-8")
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
            beside |= _object(text[: events.start()].rstrip().rstrip(",") + "}")
            at = events.end()
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) and text[at] == "]":
                break
            try:
                event, at = decode(text, at)
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
            except ValueError:
                raise Unreadable(f"{name} holds a number of thousands of digits: record it again") from None
            else:
                yield event
        beside |= _object("{" + (text[at + 1 :] + file.read(CHUNK)).strip().lstrip(","))


def _object(text: str) -> dict:
    """The fields before or after the list of events; {} if they cannot be read."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
