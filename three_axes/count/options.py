"""The command-line options of `count` and `verify`. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

import argparse

from ..paper.hardware import CLUSTERS
from ..paper.pipelines import SCHEDULES
from ..plan.frameworks import FRAMEWORKS
from ..plan.layout import RECOMPUTE, Axes


def _count(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", metavar="FILE", help="write what was counted on every rank")
    sub.add_argument("--trace", metavar="FILE", help="write a Chrome trace, for ui.perfetto.dev")
    sub.add_argument(
        "--axes", metavar="AXES", help="name unnamed groups by a mesh, outermost first: dp=2,tp=2"
    )
    sub.add_argument(
        "--watch", action="store_true", help="print where each rank is when none has moved for 5 s"
    )
    sub.add_argument(
        "--exit", type=int, metavar="CODE", help="with --watch: end a job that hangs, with this status"
    )
    job = sub.add_argument_group("predicted beside counted", "what is trained, and how it is split")
    job.add_argument("--model", help="a name, or a JSON file, as for plan")
    job.add_argument("--batch", type=int, help="sequences in a step, over all ranks")
    job.add_argument("--seq", type=int, help="tokens in a sequence")
    job.add_argument("--framework", default="torchtitan", help=f"{', '.join(FRAMEWORKS)} (%(default)s)")
    for axis in Axes._fields:
        job.add_argument(f"--{axis}", type=int, default=1)
    job.add_argument("--zero", type=int, default=3, help="%(default)s, FSDP's")
    job.add_argument("--microbatch", type=int, default=1)
    job.add_argument("--interleave", type=int, default=1)
    job.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    job.add_argument("--recompute", choices=RECOMPUTE, default="none")
    job.add_argument("--no-sp", action="store_true", help="no sequence parallelism")
    job.add_argument("--shard", type=int, default=0, help="ranks that share out the weights (HSDP); 0: all")
    job.set_defaults(cluster=next(iter(CLUSTERS)), precision="bf16", lora=None, switches=[], parameters=None)
    _script(sub)


def _verify(sub: argparse.ArgumentParser) -> None:
    steps = "optimizer steps, after which the job ends (%(default)s)"
    sub.add_argument("--steps", type=int, default=5, help=steps)
    _script(sub)


def _script(sub: argparse.ArgumentParser) -> None:
    """Add the script to run, and its arguments, after the options."""
    sub.add_argument("--cpu", action="store_true", help="run a script written for CUDA on the CPU")
    sub.add_argument("-m", "--module", action="store_true", help="the script is a module: -m pkg.train")
    sub.add_argument("script", help="the script, as you would give it to python")
    sub.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments")


SCRIPTS = {
    "count": ("count what a script of yours sends, under torchrun", _count),
    "verify": ("check that copies stay equal in a script of yours, under torchrun", _verify),
}
