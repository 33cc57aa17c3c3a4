"""Adds the planner's commands, `plan` and `estimate`, and their arguments to the command line's parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from .paper.axes import ALWAYS, AXES
from .paper.hardware import CLUSTERS
from .paper.pipelines import SCHEDULES
from .plan.frameworks import FRAMEWORKS
from .plan.job import PRECISIONS
from .plan.layout import RECOMPUTE, Axes
from .plan.models import MODELS
from .sizing import SWITCHES, run_estimate, run_plan


def _schedule(name: str) -> str:
    """The known schedule of this name, in upper or lower case; the name itself if there is none."""
    return next((known for known in SCHEDULES if known.lower() == name.lower()), name)


def _names(option: argparse.Action, names: Iterable[str]) -> None:
    """Give an option names for the shell's completion; other words, such as a file, remain allowed."""
    setattr(option, "completer", lambda **_: list(names))


def _recompute(text: str) -> str:
    """The text, if it is a recompute policy; full:5 recomputes five layers of each stage. Raises
    ArgumentTypeError if it is none.
    """
    name, colon, layers = text.partition(":")
    if name not in RECOMPUTE or colon and not (name == "full" and layers.isdecimal() and len(layers) < 6):
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(RECOMPUTE)}, nor full with a number of layers, full:5"
        )
    return text


# Axes whose sizes --why must have, and those that it may have after them: "DP,TP,PP" and "CP,EP,ETP".
MUST, MAY = (",".join(axes).upper() for axes in (Axes._fields[: len(ALWAYS)], Axes._fields[len(ALWAYS) :]))


def _axes(text: str) -> Axes:
    """The sizes in '4,8,2'. Raises ArgumentTypeError."""
    try:
        sizes = [int(part) for part in text.split(",")]
        if not len(ALWAYS) <= len(sizes) <= len(AXES) or min(sizes) < 1:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {MUST}, each at least 1, such as 4,8,2, with {MAY} behind where there are any"
        ) from None
    return Axes(*sizes)


PLANNING = {
    "plan": (run_plan, "rank all layouts"),
    "estimate": (run_estimate, "seconds, memory, bytes, bubble of one layout"),
}


def add_command(commands, name: str) -> None:
    """Add the parser of one of these commands."""
    run, help = PLANNING[name]
    sub = commands.add_parser(name, help=help)
    _job(sub)
    if name == "plan":
        _plan(sub)
    else:
        _layout(sub)
    sub.set_defaults(run=run)


def _job(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of a job: model, cluster, batch and so on."""
    sub.add_argument("--json", action="store_true", help="print JSON")
    _names(sub.add_argument("model", help=f"{', '.join(MODELS)}, or a JSON file"), MODELS)
    where = f"{', '.join(CLUSTERS)}, or a JSON file"
    _names(sub.add_argument("--cluster", default="dgx-h100", help=where), CLUSTERS)
    help = "in a step, over all GPUs: sequences, or tokens with a letter, 4M (%(default)s)"
    sub.add_argument("--batch", default="128", metavar="128", help=help)
    help = "tokens in a sequence (%(default)s)"
    sub.add_argument("--seq", type=int, default=4096, metavar="4096", help=help)
    what = f"{', '.join(FRAMEWORKS)}: what it holds, sends, hides"
    _names(sub.add_argument("--framework", default="textbook", help=what), FRAMEWORKS)
    help = "of matrix products (%(default)s)"
    sub.add_argument("--precision", choices=PRECISIONS, default="bf16", help=help)
    sub.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank only")
    help = f"what the framework does not do by itself: {', '.join(SWITCHES)}"
    several: dict[str, Any] = dict(nargs="+", choices=SWITCHES, metavar="ONE")
    sub.add_argument("--with", dest="switches", default=[], help=help, **several)
    help = "a step that you measured: its seconds, or 1,100tokens/s of one GPU; in plan, of the best layout"
    sub.add_argument("--measured", metavar="SECONDS", help=help)


def _plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--gpus", type=int, required=True)
    for axis in AXES:
        sub.add_argument(f"--{axis.name}", type=int, help=f"{axis.help}: this size only")
    sub.add_argument(
        "--train-tokens", metavar="15T", help="tokens of the whole training: adds GPU-hours, days"
    )
    sub.add_argument("--report", metavar="FILE.html", help="write the page for the meeting")
    sub.add_argument("--flags", metavar="FRAMEWORK", help="print the best layout as flags of this framework")
    sub.add_argument("--why", type=_axes, metavar=f"{MUST}[,{MAY}]", help="why these sizes are not the best")
    for option, kind, known, what in (
        ("--schedule", _schedule, SCHEDULES, "pipeline schedules"),
        ("--recompute", str, RECOMPUTE, "recompute policies"),
        ("--zero", int, (0, 1, 2, 3), "ZeRO stages"),
    ):
        help = f"{what} to consider, of {', '.join(map(str, known))}; else the framework's"
        sub.add_argument(option, nargs="+", type=kind, choices=known, metavar="ONE", help=help)


def _layout(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--gpus", type=int, help="number of GPUs; --dp follows from it if --dp is not given")
    sub.add_argument("--explain", action="store_true", help="print formulas, and the numbers in them")
    for axis in AXES:
        usual = None if axis.name == "dp" else 1
        sub.add_argument(f"--{axis.name}", type=int, default=usual, help=axis.help)
    sub.add_argument("--interleave", type=int, default=1, help="chunks on each pipeline rank")
    sub.add_argument("--schedule", type=_schedule, choices=SCHEDULES, default="1F1B")
    sub.add_argument("--microbatch", type=int, default=1, help="sequences in a microbatch")
    sub.add_argument("--zero", type=int, default=0)
    sub.add_argument("--shard", type=int, default=0, help="ranks over which ZeRO shards its state; 0: all")
    help = f"{', '.join(RECOMPUTE)}; full:5 is five layers of each stage"
    _names(sub.add_argument("--recompute", type=_recompute, default="none", help=help), RECOMPUTE)
    sub.add_argument("--no-sp", action="store_true", help="no sequence parallelism")
