"""Size a cluster from the command line, without torch and without a GPU; and check the machine that the
course runs on.

    python -m helpers plan llama-3-70b --gpus 64 --cluster dgx-h100 --batch 128 --seq 8192
    python -m helpers memory llama-3-70b --tp 8 --pp 2 --dp 4 --zero 1 --batch 128 --seq 8192
    python -m helpers bytes llama-3-8b --dp 8 --tp 2 --batch 64 --seq 4096
    python -m helpers bubble --pp 4 --microbatches 8 --schedule 1F1B
    python -m helpers doctor

A model is a name, or a JSON file: the config.json of a dense decoder on Hugging Face will do. A cluster is a
name, or a JSON file with a device and the speeds of its links. `--json` prints the same for other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from .table import Table, human
from .theory import schedules
from .theory.checks import whole
from .theory.cost import estimate, sent
from .theory.hardware import CLUSTERS, find_cluster
from .theory.layout import RECOMPUTE, SCHEDULES, USUAL, Layout
from .theory.models import MODELS, find_model
from .theory.planner import plan
from .theory.simulation import Times, simulate

MOST = 2_000_000  # operations of a schedule, some seconds' work


def _layout(args) -> Layout:
    return Layout(
        args.dp,
        args.tp,
        args.pp,
        args.microbatch,
        args.interleave,
        args.schedule,
        args.zero,
        args.recompute,
        not args.no_sp,
        eager=args.eager,
        balanced=args.balanced,
    )


def run_plan(args) -> tuple[str, dict]:
    whole("--rows", args.rows)
    made = plan(
        find_model(args.model),
        find_cluster(args.cluster),
        gpus=args.gpus,
        global_batch=args.batch,
        seq_len=args.seq,
        schedules=tuple(args.schedules),
        eager=args.eager,
        balanced=args.balanced,
    )
    best = made.estimate()
    out = [
        repr(made.table(args.rows)),
        "",
        f"best: {best.layout}",
        best.summary(),
        "",
        repr(best.time_table()),
        "",
        repr(best.memory_table()),
        "",
        best.went_in(),
    ]
    if made.impossible:
        out += ["", f"{len(made.impossible)} of the (dp, tp, pp) cannot be:"]
        out += [f"  {axes}: {reason}" for axes, reason in list(made.impossible.items())[:5]]
    if flips := made.flips():
        out += [
            "",
            "what would change the winner:",
            *(f"  {what} × {factor:g}: {row.layout}" for what, factor, row in flips),
        ]
    rows = [
        {
            "dp": r.layout.dp,
            "tp": r.layout.tp,
            "pp": r.layout.pp,
            "layout": str(r.layout),
            "step_seconds": r.seconds,
            "memory_bytes": r.memory,
        }
        for r in made.by_axes[: args.rows]
    ]
    return "\n".join(out), {
        "layouts": made.looked_at,
        "fit": len(made.ranked),
        "ranked": rows,
        "time": best.time,
        "memory": best.memory,
        "mfu": best.mfu,
    }


def run_memory(args) -> tuple[str, dict]:
    made = estimate(
        find_model(args.model),
        _layout(args),
        find_cluster(args.cluster),
        global_batch=args.batch,
        seq_len=args.seq,
    )
    return repr(made), {
        "memory": made.memory,
        "memory_bytes": made.memory_bytes,
        "stage": made.stage,
        "fits": made.fits,
        "time": made.time,
        "step_seconds": made.step_seconds,
        "mfu": made.mfu,
    }


def run_bytes(args) -> tuple[str, dict]:
    model, layout = find_model(args.model), _layout(args)
    # Refuses what cannot be.
    made = estimate(model, layout, find_cluster(args.cluster), global_batch=args.batch, seq_len=args.seq)
    names = {"dp": "data parallel", "tp": "tensor parallel", "pp": "pipeline"}
    by_axis = {names[axis]: size for axis, size in sent(model, layout, args.batch, args.seq).items()}
    table = Table(
        ["axis", "sent by each GPU in a step"],
        [[axis, human(size)] for axis, size in by_axis.items()],
        ["total", human(sum(by_axis.values()))],
        title=f"{model.name}: {made.layout}",
    )
    return repr(table), {"bytes": by_axis}


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
    schedule = schedules.MAKE[args.schedule](
        args.pp, args.microbatches, chunks if args.schedule == "interleaved" else 1
    )
    share = schedule.v  # a chunk is a fraction of a rank's layers
    line = simulate(schedule, Times(1 / share, 1 / share, 1 / share))
    held = [line.in_flight(r) for r in range(args.pp)]
    text = (
        f"{schedule.name}, p = {args.pp}, m = {args.microbatches}: {line.makespan:g} units (forward 1,"
        f" backward 2), {line.bubble:.2%} of wall time idle\nheld at once, by rank: {held}"
        + (f", each 1/{share} of a rank's layers" if share > 1 else "")
    )
    return text, {"makespan": line.makespan, "bubble": line.bubble, "in_flight": held}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m helpers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(
        dest="command", required=True, metavar="plan, memory, bytes, bubble or doctor"
    )
    doctor = commands.add_parser("doctor", help="check this machine, its GPUs and its launchers")
    doctor.add_argument(
        "checks", nargs="*", type=int, metavar="NUMBER", help="which of the fourteen; all if none is given"
    )
    doctor.add_argument(
        "--meet",
        default="",
        metavar="HOST",
        help="for the thirteenth: run it on two machines at once, HOST being the name of one of them",
    )
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
                "--eager",
                action="store_true",
                help="PyTorch's operations one by one, no fused kernels, no compiler",
            )
            sub.add_argument(
                "--balanced",
                action="store_true",
                help="fewer layers on the last pipeline stages, to make up for the head",
            )
        if name == "plan":
            sub.add_argument("--gpus", type=int, required=True)
            sub.add_argument("--rows", type=int, default=10, help="layouts to print")
            sub.add_argument(
                "--schedules",
                nargs="+",
                choices=SCHEDULES,
                default=USUAL,
                metavar="NAME",
                help=f"of {', '.join(SCHEDULES)}: what your framework runs (default {' '.join(USUAL)})",
            )
            continue
        sub.add_argument("--pp", type=int, default=1, required=name == "bubble")
        sub.add_argument(
            "--interleave",
            type=int,
            default=None if name == "bubble" else 1,
            help="chunks on each pipeline rank",
        )
        sub.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
        if name != "bubble":
            sub.add_argument("--dp", type=int, default=1)
            sub.add_argument("--tp", type=int, default=1)
            sub.add_argument("--microbatch", type=int, default=1)
            sub.add_argument("--zero", type=int, default=0)
            sub.add_argument("--recompute", choices=RECOMPUTE, default="none")
            sub.add_argument("--no-sp", action="store_true", help="no sequence parallelism")
    return top


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "doctor":
            from .doctor import examine  # the one command that needs torch

            return 0 if examine(args.checks, args.meet, lambda line: print(line, flush=True)) else 1
        text, data = args.run(args)
    except ValueError as e:
        print(f"{e}", file=sys.stderr)
        return 2
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
