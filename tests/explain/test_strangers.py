"""Traces and JSON files from unknown sources: an invalid file gets one sentence."""

import gzip
import json
import math
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import by_hand, nccl, x

from three_axes import foreign
from three_axes.__main__ import main
from three_axes.foreign import Unreadable, plain, read_json

HUGE = 10**400
DEEP = "[" * 100_000
BY_HAND = json.dumps({"traceEvents": by_hand()}).encode()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"ts": math.nan}, "event gemm begins at nan, which is no number of microseconds"),
        ({"ts": "soon"}, "begins at 'soon'"),
        ({"ts": HUGE}, "begins at 1000"),
        ({"dur": "12"}, "takes '12', which is no number of microseconds of at least 0"),
        ({"dur": -5}, "takes -5"),
        ({"dur": None}, "its event gemm has no duration"),
        ({"dur": True}, "takes True"),
        ({"dur": math.inf}, "takes inf"),
        ({"args": [1]}, "has the arguments [1]"),
        ({"dur": 0}, "has nothing that took time"),
        ({"ts": 0, "name": "\x1b[31m" * 100, "dur": "x"}, "its event �[31m"),
        (DEEP, "is nested too deeply"),
        (b"", "trace.json is empty"),
        (b"\x1f\x8b\x08\x00", "trace.json ends too early or is damaged"),
        (gzip.compress(BY_HAND)[:-200], "trace.json ends too early or is damaged"),
        (BY_HAND[:-500], "trace.json ends in the middle of an event"),
        (b'{"a": 1}', "trace.json is no trace of torch.profiler"),
        (b"step,loss\n1,2\n", "trace.json is no trace of torch.profiler"),
        (b"\xff\xfe\x00binary", "trace.json is no text"),
        (b'{"traceEvents": []}', "trace.json has no kernels and no operators"),
        (
            b'{"traceEvents": [1, "x", null, {"ph": "X"}, {"ph": "X", "ts": "?"}]}',
            "trace.json has no kernels",
        ),
        ("1" * 5000, "has no kernels" if sys.version_info < (3, 11) else "a number of thousands of digits"),
    ],
)
def test_an_invalid_trace_is_refused_in_one_sentence(tmp_path, capsys, change, sentence):
    """change: the file's bytes, the text of its only event, or changed fields of this event."""
    event = json.dumps(x("kernel", "gemm", 0, 10) | change) if isinstance(change, dict) else change
    file = tmp_path / "trace.json"
    file.write_bytes(change if isinstance(change, bytes) else f'{{"traceEvents": [{event}]}}'.encode())
    assert main(["explain", str(file)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and len(error.splitlines()) == 1 and error.rstrip("\n").isprintable()


def test_a_path_that_is_no_file_is_refused_at_once(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    said = {"": "no .json and no .json.gz", "pipe": "a pipe or a device", "no": "no: No such file"}
    for name, sentence in said.items():
        assert main(["explain", str(tmp_path / name), "--json"]) == 2
        assert sentence in capsys.readouterr().err


def test_names_in_a_trace_do_not_control_the_terminal(tmp_path, capsys):
    file = tmp_path / "trace.json"
    sent = nccl("allreduce", "\x1b[2Jtp\n", 1000, 0, 50)
    file.write_text(json.dumps([sent, x("kernel", "gemm", 50, 10)]))
    assert main(["explain", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "exposed �[2Jtp�" in printed and "\x1b" not in printed


def test_a_closed_pipe_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "trace.json").write_text(json.dumps(by_hand()))
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["explain", str(tmp_path / "trace.json")]) == 0


STRANGE = st.sampled_from([None, True, -1, 0, 2**70, HUGE, math.nan, "", "x", [], [[]], {}, {"a": [1]}])


@given(st.lists(st.tuples(st.integers(0, 17), st.integers(0, 20), STRANGE), min_size=1, max_size=4), STRANGE)
def test_a_trace_with_any_values_is_explained_or_refused(tmp_path_factory, changes, beside):
    """changes: the number of an event, the place of one of its fields or arguments, and the new value."""
    events = by_hand()
    for number, place, value in changes:
        event = events[number % len(events)]
        holder = event["args"] if place > 7 and isinstance(event["args"], dict) and event["args"] else event
        holder[list(holder)[place % len(holder)]] = value
    about = {"rank": beside, "pg_config": beside}
    file = tmp_path_factory.mktemp("strange") / "trace.json"
    file.write_text(json.dumps({"distributedInfo": about, "traceEvents": events}))
    assert main(["explain", str(file)]) in (0, 2)


@pytest.mark.parametrize(
    "content, sentence",
    [
        ('{"a": }', "is not a JSON file: line 1, column 7: expecting value"),
        (b"\xff\xfe", "is not a JSON file: it is no text in UTF-8"),
        (f'{{"a": {HUGE}}}', "holds a whole number of 401 digits: give one of at most 18"),
        ("[1e999]", "holds 1e999 for a number: give a finite one"),
        ('{"a": NaN}', "holds NaN for a number"),
        (DEEP + "]" * len(DEEP), "is nested deeper than 100 levels"),
        ("[" * 101 + "]" * 101, "is nested deeper than 100 levels"),
        (" " * 2000, "has more than 1,000 bytes"),
    ],
    ids=str.split("syntax encoding digits overflow nan deep deeper large"),
)
def test_an_invalid_json_file_is_refused(tmp_path, monkeypatch, content, sentence):
    file = tmp_path / "given.json"
    if content[:1] == " ":
        monkeypatch.setattr(foreign, "LARGEST", 1000)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Unreadable) as refused:
        read_json(file)
    assert f"given.json {sentence}" in str(refused.value)


def test_a_json_file_is_read(tmp_path):
    file = tmp_path / "given.json"
    for value in (None, {"a": [1, -2.5, "é", True]}, json.loads("[" * 100 + "]" * 100), 10**18 - 1):
        file.write_text(json.dumps(value), encoding="utf-8-sig")
        assert read_json(file) == value
    assert plain("é\u202e\x07\ud800 ok") == "é��� ok" and plain("long" * 100, 5) == "long…"
