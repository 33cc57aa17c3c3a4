"""The arguments of the planner's commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from .paper.axes import ALWAYS, AXES
from .paper.hardware import CLUSTERS
from .paper.pipelines import SCHEDULES
from .plan.estimate import HEADROOM
from .plan.frameworks import FRAMEWORKS
from .plan.job import FLOPS, MATRICES, PRECISIONS
from .plan.layout import RECOMPUTE, Axes
from .plan.models import MODELS
from .sizing import run_bubble, run_bytes, run_memory, run_normal, run_plan


def _schedule(name: str) -> str:
    """A schedule's name, however it is written."""
    return next((known for known in SCHEDULES if known.lower() == name.lower()), name)


def _names(option: argparse.Action, names: Iterable[str]) -> None:
    """What a shell may complete it to, where other words, such as a file, are allowed too."""
    setattr(option, "completer", lambda **_: list(names))


MUST, MAY = (",".join(axes).upper() for axes in (Axes._fields[: len(ALWAYS)], Axes._fields[len(ALWAYS) :]))


def _axes(text: str) -> Axes:
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
    "memory": (run_memory, "time and memory of one layout"),
    "bytes": (run_bytes, "what each GPU sends in a step"),
    "bubble": (run_bubble, "a pipeline schedule"),
    "normal": (run_normal, "is the speed that you measured normal"),
}


def add_command(commands, name: str) -> None:
    """One of these, to those of a command line."""
    run, help = PLANNING[name]
    sub = commands.add_parser(name, help=help)
    sub.set_defaults(run=run)
    sub.add_argument("--json", action="store_true", help="print JSON")
    if name == "bubble":
        sub.add_argument("--microbatches", type=int, required=True)
    else:
        _names(sub.add_argument("model", help=f"{', '.join(MODELS)}, or a JSON file"), MODELS)
        where = f"{', '.join(CLUSTERS)}, or a JSON file"
        _names(sub.add_argument("--cluster", default="dgx-h100", help=where), CLUSTERS)
        sub.add_argument("--batch", type=int, help="sequences in a step, over all GPUs (128)")
        sub.add_argument("--batch-tokens", metavar="4M", help="tokens in a step, in place of --batch")
        sub.add_argument("--seq", type=int, default=4096, help="tokens in a sequence")
        what = f"{', '.join(FRAMEWORKS)}: what it holds, sends, hides"
        _names(sub.add_argument("--framework", default="textbook", help=what), FRAMEWORKS)
        sub.add_argument("--gradients", type=int, choices=(2, 4), help="bytes of a gradient")
        sub.add_argument(
            "--precision", choices=PRECISIONS, default="bf16", help="of matrix products (%(default)s)"
        )
        sub.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank only")
        sub.add_argument("--lora-on", nargs="+", choices=MATRICES, help="these parts only")
        sub.add_argument("--four-bit", action="store_true", help="frozen weights in 4 bits (QLoRA)")
        sub.add_argument("--eight-bit", action="store_true", help="Adam's states in 8 bits")
        sub.add_argument("--offload", action="store_true", help="the optimizer on the host")
        sub.add_argument("--loss-chunks", type=int, help="parts that the head and the loss are cut into")
        sub.add_argument("--explain", action="store_true", help="formulas, and the numbers that went in")
    if name == "plan":
        sub.add_argument("--gpus", type=int, required=True)
        sub.add_argument("--rows", type=int, default=10, help="layouts to print")
        for axis in AXES:
            sub.add_argument(f"--{axis.name}", type=int, help=f"{axis.help}: this size only")
        sub.add_argument("--shard", type=int, help="ranks that share out what ZeRO does, of all replicas")
        sub.add_argument("--train-tokens", metavar="15T", help="in all: says GPU-hours and days")
        help = "GPU-hours from one interruption of a GPU to the next (50,677: Llama 3's, 2024)"
        sub.add_argument("--mtbf", type=float, metavar="HOURS", help=help)
        sub.add_argument("--price", type=float, help="of a GPU-hour: says what the training costs")
        sub.add_argument("--report", metavar="FILE.html", help="write the page for the meeting")
        sub.add_argument("--flags", metavar="FRAMEWORK", help="print the best in its words")
        sub.add_argument(
            "--headroom",
            type=float,
            default=HEADROOM,
            help="share of a GPU's memory to keep free (%(default)s)",
        )
        sub.add_argument("--chunks", type=int, help="at most so many on a pipeline rank, interleaved")
        sub.add_argument(
            "--why", type=_axes, metavar=f"{MUST}[,{MAY}]", help="why these sizes are not the best"
        )
        for option, kind, known, what in (
            ("--schedules", _schedule, SCHEDULES, "pipeline schedules"),
            ("--recompute", str, RECOMPUTE, "recompute policies"),
            ("--zero", int, (0, 1, 2, 3), "ZeRO stages"),
        ):
            help = f"{what} to look at, of {', '.join(map(str, known))}; else the framework's"
            sub.add_argument(option, nargs="+", type=kind, choices=known, metavar="ONE", help=help)
        return
    bubble = name == "bubble"
    if name == "normal":
        sub.add_argument("--gpus", type=int, required=True, help="of the run; --dp follows from them")
        measured = sub.add_mutually_exclusive_group(required=True)
        measured.add_argument("--step", type=float, metavar="4.1", help="seconds of a step")
        measured.add_argument("--tokens", type=float, metavar="1100", help="a second, of one GPU")
        measured.add_argument("--tflops", type=float, metavar="450", help="TFLOP/s of one GPU; see --flops")
        measured.add_argument(
            "--log", metavar="LINE", help="of Megatron-LM's, torchtitan's or nanotron's log"
        )
        help = (
            "what --tflops counts: attention whole, its causal half, or recomputed layers twice (%(default)s)"
        )
        sub.add_argument("--flops", choices=FLOPS, default=FLOPS[0], help=help)
    for axis in AXES:
        if axis.name == "pp" or not bubble and (axis.name, name) != ("dp", "normal"):
            sub.add_argument(f"--{axis.name}", type=int, default=1, required=bubble, help=axis.help)
    sub.add_argument(
        "--interleave", type=int, default=None if bubble else 1, help="chunks on each pipeline rank"
    )
    sub.add_argument("--schedule", type=_schedule, choices=SCHEDULES, default="1F1B")
    if not bubble:
        sub.add_argument("--microbatch", type=int, default=1)
        sub.add_argument("--zero", type=int, default=0)
        sub.add_argument("--shard", type=int, default=0)
        sub.add_argument("--recompute", choices=RECOMPUTE, default="none")
        help = "so many layers of a stage only, with --recompute full or host"
        sub.add_argument("--recomputed", type=int, default=0, help=help)
        sub.add_argument("--no-sp", action="store_true", help="no sequence parallelism")
