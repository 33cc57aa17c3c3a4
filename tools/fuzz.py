"""Command lines and files as strangers may give them, made at random, and a look at what comes of each.

    python tools/fuzz.py --cases 1000 --seed 0

A case is a good command line with good files. It may stay good: then it must be answered. One thing in it may
be spoilt in a way that is known to be wrong: then it must be refused. Or several things are exchanged for
strange ones, and either will do. None may end in a traceback or a warning of NumPy's, take more than 10
seconds of a core or 1 GB, steer the terminal, or write a script into a page or a formula into a spreadsheet.

Each runs in a process of its own, forked when all is imported. Of those that fail the folder is kept. Linux.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
import warnings
from functools import reduce
from operator import getitem
from pathlib import Path
from random import Random

import psutil

from helpers.practice.progress import exercises
from three_axes.__main__ import main as three_axes

SECONDS, BYTES = 10, 10**9
WAYS = {"good": 2, "option": 2, "argument": 1, "value": 2, "field": 1, "file": 2, "strange": 6}
NASTY = "=<script>\x1b[2J\u202e\udc80"  # a name that a terminal, a page or a spreadsheet would obey
STRANGE = [None, True, 0, -1, 1, 2, 7, 8192, 10**7, 10**8, 10**9, 10**18 - 1, 0.5, 1e30, 1e308, math.nan]
STRANGE += ["", "x", NASTY, [], {}, [[2]], [7] * 3000]
# command -> the files that it reads, what it always has, what it may have
JOB = "--batch=32 --seq=128 --framework=megatron-lm --gradients=4 --precision=fp8 --lora=4 --loss-chunks=4"
PLAN = "--rows=1 --tp=2 --chunks=2 --train-tokens=4M --price=0 --headroom=0 --why=1,2,2 --report=page.html"
PLAN += " --mtbf=9"
LAYOUT = "--dp=2 --tp=2 --pp=2 --microbatch=2 --zero=0 --shard=0 --schedule=gpipe --recompute=full"
READ = "model.json cluster.json", "model.json --cluster=cluster.json"
COMMANDS = {
    "plan": (READ[0], f"{READ[1]} --gpus=4 --batch=8", f"--gpus=4 {PLAN} {JOB}"),
    "memory": (*READ, f"{LAYOUT} {JOB}"),
    "bytes": (*READ, f"{LAYOUT} {JOB}"),
    "bubble": ("", "--pp=2 --microbatches=4", "--pp=4 --microbatches=8 --schedule=ZB-H1"),
    "normal": (READ[0], f"{READ[1]} --gpus=8 --step=1", f"{LAYOUT.removeprefix('--dp=2 ')} {JOB}"),
    "explain": ("trace.json", "trace.json", ""),
    "class": ("class/a.json class/b.json", "collect class --csv=class.csv", ""),
}
# option -> what it never is; others are counts
NO_COUNT = ["0", "-1", "1.5", "nan", "inf", "1e3", "x", "", "9" * 400]
NO_NUMBER = ["-1", "nan", "inf", "1e999", "x", ""]
NO_NAME = ["x", "", "nan", "-1", NASTY, "x" * 5000]
NEVER = dict.fromkeys(("--schedule", "--recompute", "--framework", "--precision"), NO_NAME)
NEVER |= dict.fromkeys(("--zero", "--shard"), NO_COUNT[1:])
NEVER |= {
    "--train-tokens": [*NO_NUMBER, "0", "4Q"],
    "--price": NO_NUMBER,
    "--mtbf": [*NO_NUMBER, "0"],
    "--headroom": [*NO_NUMBER, "1"],
}
NEVER |= {"--step": [*NO_NUMBER, "0"]}
NEVER |= {"--why": [*NO_NAME, "0,1,1", "8,1", "1,1,1,1,1,1,1", "8,1,nan"], "--report": ["no/page.html", "."]}

SIZES = "num_hidden_layers hidden_size num_attention_heads vocab_size num_local_experts".split()
SIZES += ["intermediate_size", "num_experts_per_tok"]
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
NO_VALUE = [math.nan, math.inf, 10**400, -1, [[[1]]], True, "4"]  # but a text or a truth in place of another
NO_FILE = [lambda path: None, os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero"), "", "{", "5"]
NO_FILE += ["[1]", "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "\udcff", " " * 11_000_000]
# a file that is written -> what must not be in it: a script, a formula
NOT_WRITTEN = {"page.html": "<script>", "class.csv": r'(?m)(^|,)"?[=+@-]'}


def places(value, at: tuple = ()) -> list[tuple]:
    """(the way to it, itself) of all that stands in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(at, value)] * bool(at) + [place for key, one in inside for place in places(one, (*at, key))]


def put(into, at: tuple, value) -> None:
    reduce(getitem, at[:-1], into)[at[-1]] = copy.deepcopy(value)


class Case:
    """argv: the command line. files: path -> a JSON value, a text, or what makes something else there.
    may: the exit statuses that are right.
    """

    def __init__(self, random: Random):
        command = random.choices(list(COMMANDS), [3, 2, 2, 1, 2, 1, 2])[0]
        names, always, options = (words.split() for words in COMMANDS[command])
        chosen = dict(word.split("=") for word in options if random.random() < 0.3)
        self.files = {name: copy.deepcopy(FILES[name]) for name in names}
        [way] = random.choices(list(WAYS), WAYS.values())
        if not (options if way == "option" else names or way == "strange"):
            way = "argument"
        if way == "option":
            name = random.choice(options).split("=")[0]
            chosen[name] = random.choice(NEVER.get(name, NO_COUNT))
        elif way == "argument":
            always, chosen = always[1:], {}
        elif way == "strange":
            chosen |= {w.split("=")[0]: str(random.choice(STRANGE)) for w in options if random.random() < 0.3}
            for value in self.files.values():
                put(value, random.choice(places(value))[0], random.choice(STRANGE))
        elif way != "good":
            self._spoil(random, way, names[0] if command == "class" else random.choice(names))
        refused = {1} if command == "class" and way != "argument" else {2}
        self.may = {"good": {0}, "strange": {0, 1, 2}}.get(way, refused)
        self.argv = [command, *always, *(f"{name}={value}" for name, value in chosen.items())]

    def _spoil(self, random: Random, way: str, file: str) -> None:
        inside = places(self.files[file])
        needed = [at for at, _ in inside if at[-1] in NEEDED]
        if way == "file":
            self.files[file] = random.choice(NO_FILE[file.startswith("class") :])  # of a class none is missed
        elif way == "field" and needed:
            *at, name = random.choice(needed)
            del reduce(getitem, at, self.files[file])[name]
        else:  # of a trace much may be missing or strange
            at, value = random.choice([one for one in inside if file != "trace.json" or one[0][-1] == "dur"])
            wrong = [one for one in NO_VALUE if type(one) not in (bool, str) or type(one) is not type(value)]
            put(self.files[file], at, random.choice(wrong))

    def run(self, folder: Path) -> str:
        """What is wrong with how it ends; "" for nothing."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                text = content if isinstance(content, str) else json.dumps(content)
                path.write_text(text, "utf-8", "surrogateescape")
        folder.mkdir(exist_ok=True)  # where there is no file
        if not (process := os.fork()):
            _child(self.argv, folder)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        told = (folder / "told").read_text()
        if status in (-signal.SIGXCPU, -signal.SIGALRM):
            return f"takes more than {SECONDS} s, or waits for ever"
        if "Traceback" in told:
            return told.strip().splitlines()[-1]
        if status not in self.may or status and not told:
            return f"ends with {status}, and not with {' or '.join(map(str, self.may))}"
        if not all(c.isprintable() or c in "\n\u2007" for c in told):
            return "steers the terminal"
        for name, pattern in NOT_WRITTEN.items():
            if (folder / name).exists() and re.search(pattern, (folder / name).read_text()):
                return f"writes {pattern} into {name}"
        return ""


def _child(argv: list[str], folder: Path) -> None:
    code = 3
    try:
        os.chdir(folder)
        sys.stdout = sys.stderr = open("told", "w", encoding="utf-8", errors="replace")
        warnings.simplefilter("error", RuntimeWarning)
        resource.setrlimit(resource.RLIMIT_AS, [psutil.Process().memory_info().vms + BYTES] * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        signal.alarm(6 * SECONDS)  # who waits takes no processor
        code = three_axes(argv)
    except SystemExit as e:
        code = e.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    exercises()  # what `class` imports takes seconds
    gc.freeze()  # children need not copy what they do not change
    random, root, begun = Random(args.seed), Path(tempfile.mkdtemp(prefix="fuzz-")), time.monotonic()
    faults = 0
    for number in range(args.cases):
        case, folder = Case(random), root / str(number)
        if fault := case.run(folder):
            faults += 1
            print(f"{fault}:\n  cd {folder} && three-axes {shlex.join(case.argv)}", flush=True)
        else:
            shutil.rmtree(folder)
    if not faults:
        root.rmdir()
    speed = 60 * args.cases / (time.monotonic() - begun)
    print(f"{args.cases} cases, {speed:,.0f} a minute: {faults} failed")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
