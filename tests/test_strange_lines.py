"""Random command lines with random files: each must be answered or refused.

A case is a good command line with good files. It may stay good: then it must be answered. Or one thing in it
is changed to something that is known to be wrong: then it must be refused. Or several things are exchanged
for strange ones: then it may be answered or refused. None may end in a traceback or a warning of NumPy's,
take more than 10 seconds of a core or 1 GB, control the terminal, or write a script into a page or a formula
into a spreadsheet.

Each case runs in a forked process of its own. `--hypothesis-profile thorough` runs more cases.
"""

import copy
import json
import math
import os
import re
import resource
import signal
import sys
import warnings
from functools import reduce
from operator import getitem
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.practice.progress import exercises
from three_axes.__main__ import main as three_axes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of a process")
SECONDS, BYTES = 10, 10**9  # limits of a case
# How a case is made (see `cases`): "good" changes nothing; the others name what is made wrong.
WAYS = ["good", "option", "argument", "value", "field", "file", "strange", "strange"]
NASTY = "=<script>\x1b[2J\u202e\udc80"  # a name that a terminal, a page or a spreadsheet would obey
# values that replace an option or a value in a file
STRANGE = [None, True, 0, -1, 1, 2, 7, 8192, 10**7, 10**8, 10**9, 10**18 - 1, 0.5, 1e30, 1e308, math.nan]
STRANGE += ["", "x", NASTY, [], {}, [[2]], [7] * 3000]
JOB = "--batch=32 --seq=128 --framework=megatron-lm --precision=fp8 --lora=4 --with=offload"
PLAN = "--tp=2 --train-tokens=4M --why=1,2,2 --report=page.html"
LAYOUT = "--dp=2 --tp=2 --pp=2 --microbatch=2 --zero=0 --shard=0 --schedule=gpipe --recompute=full"
READ = "model.json cluster.json", "model.json --cluster=cluster.json"  # files, and how arguments name them
# command -> the files that it reads, arguments that it always has, optional arguments
COMMANDS = {
    "plan": (READ[0], f"{READ[1]} --gpus=4 --batch=8", f"--gpus=4 {PLAN} {JOB} --measured=9s"),
    "estimate": (*READ, f"{LAYOUT} {JOB} --measured=9s"),
    "explain": ("trace.json", "trace.json", ""),
    "class": ("class/a.json class/b.json", "collect class --csv=class.csv", ""),
}
# option -> values that are always refused; other options are counts
NO_COUNT = ["0", "-1", "1.5", "nan", "inf", "1e3", "x", "", "9" * 400]
NO_NUMBER = ["-1", "nan", "inf", "1e999", "x", ""]
NO_NAME = ["x", "", "nan", "-1", NASTY, "x" * 5000]
NEVER = dict.fromkeys(("--schedule", "--recompute", "--framework", "--precision", "--with"), NO_NAME)
NEVER |= dict.fromkeys(("--zero", "--shard"), NO_COUNT[1:])
NEVER |= {
    "--batch": [*NO_COUNT, "4Q"],
    "--train-tokens": [*NO_NUMBER, "0", "4Q"],
    "--measured": [*NO_NAME, "0s", "nan s", "dp 8 = 1s", "450TFLOP/s", "1" * 400 + "s"],
    "--why": [*NO_NAME, "0,1,1", "8,1", "1,1,1,1,1,1,1", "8,1,nan"],
    "--report": ["no/page.html", "."],
}

SIZES = "num_hidden_layers hidden_size num_attention_heads vocab_size num_local_experts".split()
SIZES += ["intermediate_size", "num_experts_per_tok", "num_key_value_heads"]
SPEEDS = "flops achievable bandwidth memory".split()
NEEDED = {*SIZES, *SPEEDS, "device", "ts"}
DEVICE = dict.fromkeys([*SPEEDS, "fp8", "achievable_fp8"], 1e14) | {"name": NASTY, "assumed": True}
KERNEL = {"ph": "X", "cat": "kernel", "name": NASTY, "ts": 5.5, "dur": 20.5, "tid": 7}
FILES = {
    "model.json": dict.fromkeys([*SIZES, "mtp"], 4) | {"model_type": "mixtral", "name": NASTY, "tied": True},
    "cluster.json": {"name": NASTY, "device": DEVICE, "gpus_per_node": 4, "inter_node_bandwidth": 5e10}
    | {"all_to_all": [3e11, 4e10], "busbw": [[2, 3.6e11], [4, 1.6e11]]},
    "trace.json": {"traceEvents": [KERNEL, KERNEL | {"name": "gemm", "ts": 30.5}]},
    "class/a.json": {"exercises": {NASTY: {"tries": 2, "passed": True, "mistakes": {NASTY: 1}}}},
    "class/b.json": {"exercises": {"another": {"tries": 3, "passed": False, "mistakes": {"no sum": 3}}}},
}
NO_VALUE = [math.nan, math.inf, 10**400, -1, [[[1]]], True, "4"]  # not for another text or boolean
NO_FILE = {
    "not there": lambda path: None,
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "nested lists": "[" * 100_000,
    "nested objects": '{"a":' * 500 + "1" + "}" * 500,
    "no text": "\udcff",
    "too large": " " * 11_000_000,
} | {text: text for text in ("", "{", "5", "[1]")}
# a file that is written -> what it must not contain: a script, a formula
NOT_WRITTEN = {"page.html": "<script>", "class.csv": r'(?m)(^|,|;)"?[=+@＝＋－＠-]'}


def places(value, at: tuple = ()) -> list[tuple]:
    """(path, value) of everything in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(at, value)] * bool(at) + [place for key, one in inside for place in places(one, (*at, key))]


def put(into, at: tuple, value) -> None:
    reduce(getitem, at[:-1], into)[at[-1]] = copy.deepcopy(value)


@st.composite
def cases(draw) -> tuple[list[str], dict, set[int]]:
    """(command line, files: path -> a JSON value or a key of `NO_FILE`, accepted exit statuses)."""
    one = lambda of: draw(st.sampled_from(list(of)))
    some = lambda of: [word for word in of if one((True, False, False))]
    command = one(COMMANDS)
    names, always, options = (words.split() for words in COMMANDS[command])
    chosen = dict(word.split("=") for word in some(options))
    files = {name: copy.deepcopy(FILES[name]) for name in names}
    way = one(WAYS)
    if not (options if way == "option" else names or way == "strange"):
        way = "argument"
    if way == "option":
        name = one(options).split("=")[0]
        chosen[name] = one(NEVER.get(name, NO_COUNT))
    elif way == "argument":
        always, chosen = always[1:], {}
    elif way == "strange":
        chosen |= {word.split("=")[0]: str(one(STRANGE)) for word in some(options)}
        for value in files.values():
            put(value, one(places(value))[0], one(STRANGE))
    elif way != "good":
        file = names[0] if command == "class" else one(names)
        inside = places(files[file])
        needed = [at for at, _ in inside if at[-1] in NEEDED]
        if way == "file":
            # For `class` a missing file is no fault.
            files[file] = one(list(NO_FILE)[file.startswith("class") :])
        elif way == "field" and needed:
            *at, name = one(needed)
            del reduce(getitem, at, files[file])[name]
        else:  # of a trace much may be missing or strange
            at, value = one([place for place in inside if file != "trace.json" or place[0][-1] == "dur"])
            wrong = [v for v in NO_VALUE if type(v) not in (bool, str) or type(v) is not type(value)]
            put(files[file], at, one(wrong))
    refused = {1} if command == "class" and way != "argument" else {2}
    may = {"good": {0}, "strange": {0, 1, 2}}.get(way, refused)
    return [command.strip(), *always, *(f"{name}={value}" for name, value in chosen.items())], files, may


def fault(argv: list[str], files: dict, may: set[int], folder: Path) -> str:
    """Run a case in `folder`. Returns what is wrong with how it ended, "" if nothing is."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = NO_FILE[content] if isinstance(content, str) else json.dumps(content)
        if callable(content):
            content(path)
        else:
            path.write_text(content, "utf-8", "surrogateescape")
    if not (process := os.fork()):
        _child(argv, folder)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    told = (folder / "told").read_text()
    if status in (-signal.SIGXCPU, -signal.SIGALRM):
        return f"takes more than {SECONDS} s, or waits for ever"
    if "Traceback" in told:
        return told.strip().splitlines()[-1]
    if status not in may or status and not told:
        return f"ends with {status}, and not with {' or '.join(map(str, may))}"
    if not all(c.isprintable() or c in "\n\u2007" for c in told):
        return "controls the terminal"
    for name, pattern in NOT_WRITTEN.items():
        if (folder / name).exists() and re.search(pattern, (folder / name).read_text()):
            return f"writes {pattern} into {name}"
    return ""


def _child(argv: list[str], folder: Path) -> None:
    """In the forked process: run the command under the limits, with its output in the file `told`."""
    code = 3
    try:
        os.chdir(folder)
        sys.stdout = sys.stderr = open("told", "w", encoding="utf-8", errors="replace")
        warnings.simplefilter("error", RuntimeWarning)
        resource.setrlimit(resource.RLIMIT_AS, [psutil.Process().memory_info().vms + BYTES] * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        signal.alarm(6 * SECONDS)  # a process that waits uses no processor time
        code = three_axes(argv)
    except SystemExit as e:
        code = e.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


@pytest.fixture(scope="module")
def imported():
    """The imports of `class` take seconds, so they are done once."""
    exercises()


@given(cases())
def test_any_command_line_and_file_is_answered_or_refused(tmp_path_factory, imported, case):
    assert fault(*case, tmp_path_factory.mktemp("strange")) == ""
