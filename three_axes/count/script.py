"""`torchrun … -m three_axes count train.py`: runs a script unchanged, and counts what its ranks send."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from ..plan.job import Job
from ..plan.layout import Layout
from . import on_cpu, watch, wire
from .against import against
from .axes import parse_axes
from .counted import Counted
from .counter import Counter
from .interpose import interposer

AT_THE_END = 10.0  # seconds for which rank 0, when its own script is over, waits for the others' reports


def prepare(args, job: Callable[[], tuple[Job, Layout]]) -> Callable[[], int]:
    """Check the options `args` of the command. Returns a function that runs `args.script` as Python would,
    lets rank 0 print the counts, raises the script's exceptions, and returns an exit status.

    job: returns what the counts are compared with; it is called only if `args` names a model. Raises
    ValueError for options that cannot be used.
    """
    compared = None
    size = int(os.environ.get("WORLD_SIZE", 1))
    named = parse_axes(args.axes, size) if args.axes else []
    if args.model:
        if args.batch is None or args.seq is None:
            raise ValueError("--model needs --batch and --seq too: what a step sends depends on them")
        compared = job()
        compared[0].check(compared[1], size)
    if args.exit is not None and not (args.watch and 0 < args.exit < 256):
        raise ValueError(f"--exit {args.exit}: give a status of 1 to 255, together with --watch")
    if not args.module and not os.path.isfile(args.script):
        raise ValueError(f"there is no script {args.script!r}; options of count come before it")
    for file in filter(None, (args.json, args.trace)):
        if not os.path.isdir(os.path.dirname(file) or "."):
            raise ValueError(f"{file}: there is no such folder to write to")
    return lambda: _counted(args, compared, named)


def _counted(args, compared: tuple[Job, Layout] | None, named: list[tuple[str, list[int]]]) -> int:
    counter = Counter(trace=args.trace is not None, box=watch.box() if args.watch else None)
    _kept.append(counter)
    counted, exit_process, me = Counted(counter, AT_THE_END), os._exit, os.getpid()
    end = partial(exit_process, args.exit) if args.exit else None
    watches = watch.Watch(counter, say, end) if args.watch else None

    def finish() -> None:
        if os.getpid() != me:  # a process that the script has forked has no report
            return
        os._exit = exit_process
        if watches:
            watches.leave()
        counted.finish()
        if counter.rank == 0:
            if not counter.all_have_reported():
                # Others may wait for this rank: without `count`, its process would have ended by now.
                wire.cut(anywhere=True)
            _print_report(counted, args, compared)

    def finish_and_exit(status: int) -> NoReturn:
        """Replaces os._exit, which some scripts call because Python's normal end takes too long, or fails."""
        if status == 0 and threading.current_thread() is threading.main_thread():
            finish()
        exit_process(status)

    os._exit = finish_and_exit
    atexit.register(finish)  # registered before the script's functions, so it is called after them
    try:
        with interposer.axes.declared(named):
            run_script(args)
    except BaseException as error:
        os._exit = exit_process
        atexit.unregister(finish)
        if watches and watches.explain(error) and args.exit:
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(args.exit) from None
        raise
    return 0


# The script's variables, and the counter with the script's groups, kept as long as the process lives. To free
# a group is to wait for gloo's threads, and one of these may wait for Python, to free what the interposer has
# handled.
_kept: list[object] = []


def run_script(args) -> None:
    """Run the script like `python script arguments` or `python -m module arguments`. Raises its exceptions,
    except an exit with status 0.
    """
    if args.cpu:
        on_cpu.emulate_cuda()
        if os.environ.get("RANK", "0") == "0":
            say(on_cpu.CHANGES)
    sys.argv = [args.script, *args.arguments]
    sys.excepthook = partial(_from_the_script_on, sys.excepthook)
    try:
        if args.module:
            sys.path.insert(0, os.getcwd())
            _kept.append(runpy.run_module(args.script, run_name="__main__", alter_sys=True))
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(args.script))
            _kept.append(runpy.run_path(args.script, run_name="__main__"))
    except SystemExit as end:
        _kept.append(end)  # its frames refer to the variables
        if end.code not in (None, 0):
            raise


def _from_the_script_on(show: Callable, kind, error, trace) -> None:
    """Print an uncaught exception without the frames above the script's first, which are this project's."""
    ours, first = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), trace
    while first and first.tb_frame.f_code.co_filename.startswith((ours, "<frozen runpy>")):
        first = first.tb_next
    trace = first or trace
    show(kind, error.with_traceback(trace), trace)


def _print_report(counted: Counted, args, compared) -> None:
    if not any(counted.ranks):
        say(
            f"{args.script} called no collective in the process that was counted. Ranks that a script starts"
            " itself, with mp.spawn say, are not counted. Start it on several ranks:"
            f" torchrun --nproc-per-node 4 -m three_axes count {args.script}"
        )
        return
    steps = counted.steps[0].number
    say(f"\n{args.script}: {len(counted.ranks)} ranks, {steps} steps of the optimizer\n\n{counted}")
    if compared:
        table, words = against(counted.of_a_step(), *compared)
        say("\n".join(["", repr(table), *words]))
    for file, made in ((args.json, counted.json), (args.trace, counted.trace)):
        if file:
            with open(file, "w", encoding="utf-8") as f:
                json.dump(made(), f)


def say(text: str) -> None:
    """Print, if standard output still works."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):  # the script has closed its output
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
