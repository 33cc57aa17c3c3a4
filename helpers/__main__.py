"""Size a cluster from the command line, without torch and without a GPU; open the course; train.

    three-axes plan llama-3-70b --gpus 64 --batch 128 --seq 8192
    three-axes memory llama-3-70b --tp 8 --pp 2 --dp 4 --zero 1
    three-axes bytes llama-3-8b --dp 8 --tp 2 --batch 64 --seq 4096
    three-axes bubble --pp 4 --microbatches 8 --schedule 1F1B
    three-axes lab
    torchrun --nproc-per-node 4 -m helpers count train.py --its-arguments
    three-axes explain trace-rank*.json.gz

`python -m helpers plan …` is the same as `three-axes plan …`.
A model is a name, or a JSON file: the config.json of a dense decoder on Hugging Face will do. A cluster is a
name, or a JSON file with a device and the speeds of its links: bytes per second, per GPU, one direction.
`--json` prints the same for other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from .commands import COMMANDS, call, course_needed
from .count.options import add_options
from .table import Table, human
from .terminal import Manual, fitted, fold
from .theory.checks import whole
from .theory.estimate import HEADROOM, Estimate, estimate
from .theory.frameworks import FRAMEWORKS, find_framework
from .theory.hardware import CLUSTERS, find_cluster
from .theory.job import Job
from .theory.layout import RECOMPUTE, Axes, Layout
from .theory.models import MODELS, find_model
from .theory.pipelines import SCHEDULES
from .theory.planner import plan
from .theory.precision import PRECISIONS
from .theory.simulation import Times, simulate
from .theory.traffic import sent

MOST = 2_000_000  # operations of a schedule, some seconds' work
NAMES = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline",
    "cp": "context parallel",
    "ep": "expert parallel",
    "etp": "experts' tensor parallel",
    "edp": "experts' data parallel",
}


def _job(args) -> Job:
    changed = {"gradient_bytes": args.gradients}
    piped = find_framework(args.framework).zeros_in_pipeline
    if args.command == "plan":
        changed |= {
            "schedules": args.schedules and tuple(args.schedules),
            "recomputes": args.recompute and tuple(args.recompute),
            "zeros": args.zero and tuple(args.zero),
            "zeros_in_pipeline": args.zero and tuple(z for z in args.zero if z in piped),
            "most_chunks": args.chunks,
        }
    framework = find_framework(args.framework, **changed)
    model, cluster = find_model(args.model), find_cluster(args.cluster)
    return Job(model, cluster, args.batch, args.seq, framework, args.precision)


def _inputs(job: Job) -> dict:
    """What went in, for other programs."""
    return {
        "model": job.model.name,
        "parameters": job.model.params,
        "cluster": job.cluster.name,
        "device": job.cluster.device.name,
        "framework": job.framework.name,
        "gradient_bytes": job.framework.gradient_bytes,
        "precision": job.precision,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
    }


def _fields(layout: Layout) -> dict:
    """A layout for other programs."""
    names = ("microbatch", "interleave", "schedule", "zero", "recompute", "sequence_parallel", "order")
    return {**layout.axes._asdict(), **{name: getattr(layout, name) for name in names}}


def _estimated(made: Estimate) -> dict:
    return {
        "layout": _fields(made.layout),
        "time": made.time,
        "step_seconds": made.step_seconds,
        "memory": made.memory,
        "memory_bytes": made.memory_bytes,
        "stage": made.stage,
        "fits": made.fits,
        "mfu": made.mfu,
        "warnings": made.warnings(),
    }


def run_plan(args) -> tuple[str, dict]:
    whole("--rows", args.rows)
    only = {axis: getattr(args, axis) for axis in Axes._fields}
    made = plan(_job(args), gpus=args.gpus, headroom=args.headroom, **only)
    best, flips = made.estimate(), made.flips()
    out = [repr(made.table(args.rows)), "", f"best: {best.layout}", best.summary(), *best.warnings()]
    if args.why:
        out += ["", f"{args.why}: {made.why(**args.why._asdict())}"]
    if args.explain:
        out += ["", repr(best.time_table()), "", repr(best.memory_table()), "", best.went_in()]
        refused = list(made.impossible.items())
        out += ["", f"{len(refused)} sizes cannot be:"] * bool(refused)
        out += [f"  {axes}: {reason}" for axes, reason in refused]
    if flips:
        out += ["", "what would change the winner:"]
        out += [f"  {what} × {factor:g}: {row.layout}" for what, factor, row in flips]
    if not args.explain:
        out += [
            "",
            "--explain says where time and memory go, by which formulas; --why 4,8,2 says why not DP 4,"
            " TP 8, PP 2.",
        ]
    rows = lambda found: [
        {"layout": _fields(r.layout), "step_seconds": r.seconds, "memory_bytes": r.memory} for r in found
    ]
    return "\n".join(out), {
        "inputs": _inputs(made.job) | {"gpus": made.gpus, "headroom": args.headroom},
        "layouts": made.looked_at,
        "fit": len(made.ranked),
        "tight": len(made.tight),
        "ranked": rows(made.by_axes[: args.rows]),
        "best": _estimated(best),
        "flips": [{"change": w, "factor": f, "winner": _fields(row.layout)} for w, f, row in flips],
        "refused": [{**axes._asdict(), "reason": reason} for axes, reason in made.impossible.items()],
    }


def _layout(args, job: Job) -> Layout:
    return job.framework.layout(
        **{axis: getattr(args, axis) for axis in Axes._fields},
        microbatch=args.microbatch,
        interleave=args.interleave,
        schedule=args.schedule,
        zero=args.zero,
        recompute=args.recompute,
        sequence_parallel=not args.no_sp,
    )


def run_memory(args) -> tuple[str, dict]:
    job = _job(args)
    made = estimate(job, _layout(args, job))
    return made.text(args.explain), {"inputs": _inputs(job), **_estimated(made)}


def run_bytes(args) -> tuple[str, dict]:
    job = _job(args)
    layout = _layout(args, job)
    job.check(layout)
    stages = (
        {"first": 0, "middle": layout.pp // 2, "last": layout.pp - 1}
        if layout.pp > 2
        else {name: k for k, name in enumerate(("first", "last")[: layout.pp])}
    )
    by_stage = {name: sent(job, layout, k) for name, k in stages.items()}
    columns = [f"{name} stage" for name in stages] if layout.pp > 1 else ["a step"]
    table = Table(
        ["axis", *columns],
        [
            [NAMES[axis], *(human(found.get(axis, 0.0)) for found in by_stage.values())]
            for axis in dict.fromkeys(axis for found in by_stage.values() for axis in found)
        ],
        ["total", *(human(sum(found.values())) for found in by_stage.values())],
        title=f"{job.model.name}, {job.framework.name}: {layout}. Sent by each GPU in a step",
    )
    return repr(table), {"inputs": _inputs(job), "layout": _fields(layout), "bytes": by_stage}


def run_bubble(args) -> tuple[str, dict]:
    if args.schedule != "interleaved" and args.interleave is not None:
        raise ValueError(f"--interleave belongs to the schedule interleaved, not to {args.schedule}")
    chunks = 2 if args.interleave is None else args.interleave
    if args.schedule == "interleaved" and args.pp < 2:
        raise ValueError(f"interleaving needs --pp of at least 2, not {args.pp}")
    if args.pp * args.microbatches * chunks > MOST:
        raise ValueError(
            f"{args.pp} stages and {args.microbatches:,} microbatches are more than {MOST:,} operations to"
            " draw up; take fewer microbatches"
        )
    schedule = SCHEDULES[args.schedule].make(args.pp, args.microbatches, chunks)
    share = schedule.v  # a chunk is a fraction of a rank's layers
    line = simulate(schedule, Times(1 / share, 1 / share, 1 / share))
    held = [line.in_flight(r) for r in range(args.pp)]
    text = (
        f"{schedule.name}, p = {args.pp}, m = {args.microbatches}: {line.makespan:g} units (forward 1,"
        f" backward 2), {line.bubble:.2%} of wall time idle\nheld at once, by rank: {held}"
        + (f", each 1/{share} of a rank's layers" if share > 1 else "")
    )
    return text, {"makespan": line.makespan, "bubble": line.bubble, "in_flight": held}


def _schedule(name: str) -> str:
    """A schedule's name, however it is written."""
    return next((known for known in SCHEDULES if known.lower() == name.lower()), name)


def _axes(text: str) -> Axes:
    try:
        sizes = [int(part) for part in text.split(",")]
        if not 3 <= len(sizes) <= len(Axes._fields):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not DP,TP,PP, such as 4,8,2, with CP,EP,ETP behind them where there are any"
        ) from None
    return Axes(*sizes)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="three-axes" if Path(sys.argv[0]).stem == "three-axes" else "python -m helpers",
        description=__doc__,
        formatter_class=Manual,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_options(commands.add_parser("count", help="count what a script of yours sends, under torchrun"))
    for name, run, help in (
        ("plan", run_plan, "rank all layouts"),
        ("memory", run_memory, "time and memory of one layout"),
        ("bytes", run_bytes, "what each GPU sends in a step"),
        ("bubble", run_bubble, "a pipeline schedule"),
    ):
        sub = commands.add_parser(name, help=help)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print JSON")
        if name == "bubble":
            sub.add_argument("--microbatches", type=int, required=True)
        else:
            sub.add_argument("model", help=f"{', '.join(MODELS)}, or a JSON file")
            sub.add_argument("--cluster", default="dgx-h100", help=f"{', '.join(CLUSTERS)}, or a JSON file")
            sub.add_argument("--batch", type=int, default=128, help="sequences in a step, over all GPUs")
            sub.add_argument("--seq", type=int, default=4096, help="tokens in a sequence")
            sub.add_argument(
                "--framework",
                default="textbook",
                help=f"{', '.join(FRAMEWORKS)}: what it holds, sends, hides",
            )
            sub.add_argument("--gradients", type=int, choices=(2, 4), help="bytes of a gradient")
            sub.add_argument(
                "--precision", choices=PRECISIONS, default="bf16", help="of matrix products (%(default)s)"
            )
            sub.add_argument("--explain", action="store_true", help="formulas, and the numbers that went in")
        if name == "plan":
            sub.add_argument("--gpus", type=int, required=True)
            sub.add_argument("--rows", type=int, default=10, help="layouts to print")
            for axis in Axes._fields:
                sub.add_argument(f"--{axis}", type=int, help="this size only")
            sub.add_argument(
                "--headroom",
                type=float,
                default=HEADROOM,
                help="share of a GPU's memory to keep free (%(default)s)",
            )
            sub.add_argument("--chunks", type=int, help="at most so many on a pipeline rank, interleaved")
            sub.add_argument(
                "--why", type=_axes, metavar="DP,TP,PP[,CP,EP,ETP]", help="why these sizes are not the best"
            )
            for option, kind, known, what in (
                ("--schedules", _schedule, SCHEDULES, "pipeline schedules"),
                ("--recompute", str, RECOMPUTE, "recompute policies"),
                ("--zero", int, (0, 1, 2, 3), "ZeRO stages"),
            ):
                help = f"{what} to look at, of {', '.join(map(str, known))}; else the framework's"
                sub.add_argument(option, nargs="+", type=kind, choices=known, metavar="ONE", help=help)
            continue
        sub.add_argument("--pp", type=int, default=1, required=name == "bubble")
        sub.add_argument(
            "--interleave",
            type=int,
            default=None if name == "bubble" else 1,
            help="chunks on each pipeline rank",
        )
        sub.add_argument("--schedule", type=_schedule, choices=SCHEDULES, default="1F1B")
        if name != "bubble":
            for axis in Axes._fields:
                if axis != "pp":
                    sub.add_argument(f"--{axis}", type=int, default=1)
            sub.add_argument("--microbatch", type=int, default=1)
            sub.add_argument("--zero", type=int, default=0)
            sub.add_argument("--recompute", choices=RECOMPUTE, default="none")
            sub.add_argument("--no-sp", action="store_true", help="no sequence parallelism")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help)  # they read their arguments themselves
    return top


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv and argv[0] in COMMANDS:
            return call(argv[0], argv[1:])
        args = parser().parse_args(argv)
        if args.command == "count":
            with course_needed("three-axes count"):
                from .count.script import prepare

                run = prepare(args, lambda: (job := _job(args), _layout(args, job)))
        else:
            with fitted(sys.stdout):
                text, data = args.run(args)
                text = fold(text)
    except (ValueError, ModuleNotFoundError) as e:
        with fitted(sys.stderr):
            print(fold(f"{e}"), file=sys.stderr)
        return 2
    if args.command == "count":
        return run()  # what the script raises is the script's own
    try:
        print(json.dumps(data, default=float, allow_nan=False) if args.json else text)
        sys.stdout.flush()
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        if not isinstance(e, BrokenPipeError):  # there the reader, head say, has seen enough
            print(f"cannot print: {e.strerror}", file=sys.stderr)
            return 1
    return 0


def command() -> None:
    """`three-axes`, which an installation brings; `python -m helpers` is the same."""
    sys.stdout.reconfigure(errors="replace")  # where bars cannot be shown there are question marks
    sys.exit(main())


if __name__ == "__main__":
    command()
