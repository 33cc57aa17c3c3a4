"""`torchrun … -m helpers count train.py`: run a script unchanged, and count what its ranks send."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable

from ..theory.job import Job
from ..theory.layout import Layout
from .against import against
from .counted import Counted
from .counter import Counter


def run(args, job: Callable[[], tuple[Job, Layout]]) -> int:
    """Run `args.script` as Python would, and let rank 0 print what was counted. job: what to compare with, if
    a model is named. Raises what the script raises. Returns an exit status.
    """
    compared = None
    if args.model:
        if args.batch is None or args.seq is None:
            raise ValueError("--model needs --batch and --seq too: what a step sends depends on them")
        compared = job()
        compared[0].check(compared[1], int(os.environ.get("WORLD_SIZE", 1)))
    if not args.module and not os.path.isfile(args.script):
        raise ValueError(f"there is no script {args.script!r}; options of count come before it")
    for file in filter(None, (args.json, args.trace)):
        if not os.path.isdir(os.path.dirname(file) or "."):
            raise ValueError(f"{file}: there is no such folder to write to")
    counted = Counted(Counter(trace=args.trace is not None))
    try:
        _run(args)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    counted.finish()
    if counted._counter.rank == 0:
        _report(counted, args, compared)
    return 0


def _run(args) -> None:
    sys.argv = [args.script, *args.arguments]
    if args.module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(args.script))
        runpy.run_path(args.script, run_name="__main__")


def _report(counted: Counted, args, compared) -> None:
    if not any(counted.ranks):
        print(
            f"{args.script} called no collective, so there is nothing to count. Start it on several ranks:"
            f" torchrun --nproc-per-node 4 -m helpers count {args.script}"
        )
        return
    steps = counted.steps[0].number
    print(f"\n{args.script}: {len(counted.ranks)} ranks, {steps} steps of the optimizer\n\n{counted}")
    if compared:
        table, words = against(counted.of_a_step(), *compared)
        print("\n".join(["", repr(table), *words]))
    for file, made in ((args.json, counted.json), (args.trace, counted.trace)):
        if file:
            with open(file, "w", encoding="utf-8") as f:
                json.dump(made(), f)
    sys.stdout.flush()
