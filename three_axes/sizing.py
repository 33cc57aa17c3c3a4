"""The planner's commands. Each gives (text, the same for other programs).

What only one of them needs is imported there: a command should be there at once.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .foreign import plain
from .paper.axes import NAMED
from .paper.checks import positive, whole
from .paper.hardware import find_cluster
from .paper.pipelines import SCHEDULES
from .plan.estimate import Estimate, estimate
from .plan.frameworks import find_framework
from .plan.job import MATRICES, Job, Lora
from .plan.layout import Axes, Layout
from .plan.models import find_model
from .plan.planner import plan
from .table import Table, human

# Of a layout, beside its axes.
CHOSEN = ("microbatch", "interleave", "schedule", "zero", "shard", "recompute", "recomputed")
MOST = 2_000_000  # operations of a schedule, some seconds' work


def job_of(args) -> Job:
    """What the arguments say is to be trained. Raises ValueError, in a sentence, for what makes no sense."""
    changed = {
        "gradient_bytes": args.gradients,
        "eight_bit": args.eight_bit or None,
        "offload": args.offload or None,
        "loss_chunks": args.loss_chunks,
    }
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
    if args.command == "plan" and args.mtbf is not None:
        positive("--mtbf", args.mtbf, least=1.0, unit="hours of one GPU")
        cluster = replace(cluster, gpu_hours_between_interruptions=args.mtbf)
    if args.lora is None and (args.lora_on or args.four_bit):
        raise ValueError("--lora-on and --four-bit belong to --lora, which says the adapters' rank, 16 say")
    lora = None
    if args.lora is not None:
        lora = Lora(args.lora, tuple(args.lora_on or MATRICES), args.four_bit)
    return Job(model, cluster, _batch(args), args.seq, framework, args.precision, lora)


def _batch(args) -> int:
    """Sequences of a step. A number of tokens may mean powers of 1000 or, where those leave a part of a
    sequence, of 1024: 4M is 4,194,304 for sequences of 8,192.
    """
    if args.batch_tokens is None:
        return 128 if args.batch is None else args.batch
    if args.batch is not None:
        raise ValueError("give --batch, in sequences, or --batch-tokens, not both")
    whole("seq_len", args.seq)
    for thousand in (1000, 1024):
        tokens = _number(args.batch_tokens, thousand)
        if tokens >= args.seq and tokens % args.seq == 0:
            return int(tokens) // args.seq
    tokens = _number(args.batch_tokens)
    near = max(1, round(tokens / args.seq)) * args.seq
    raise ValueError(
        f"{args.batch_tokens} tokens are no whole number of sequences of {args.seq:,}; take {near:,}"
    )


def _number(text: str, thousand: int = 1000) -> float:
    """'4M' as a number."""
    powers = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}
    digits = text.rstrip("kKmMbBgGtT")
    try:
        number = float(digits.replace(",", "")) * thousand ** powers[text[len(digits) :].lower()]
    except (ValueError, KeyError, OverflowError):
        number = 0.0
    if not 0 < number < 1e18:
        raise ValueError(f"{text!r} is no number of tokens, such as 4M, 15T or 4194304")
    return number


def _inputs(job: Job) -> dict:
    """What went in, for other programs."""
    switches = ("gradient_bytes", "eight_bit", "offload", "loss_chunks")
    lora = job.lora and {"rank": job.lora.rank, "matrices": job.lora.matrices, "four_bit": job.lora.four_bit}
    return {
        "model": job.model.name,
        "parameters": job.model.params,
        "cluster": job.cluster.name,
        "device": job.cluster.device.name,
        "framework": job.framework.name,
        **{name: getattr(job.framework, name) for name in switches},
        "precision": job.precision,
        "lora": lora,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
    }


def _fields(layout: Layout) -> dict:
    """A layout for other programs."""
    names = (*CHOSEN, "sequence_parallel", "order")
    return {**layout.axes._asdict(), **{name: getattr(layout, name) for name in names}}


def _estimated(made: Estimate) -> dict:
    names = ("time", "step_seconds", "memory", "memory_bytes", "stage", "fits", "mfu")
    figures = {name: getattr(made, name) for name in names}
    return {
        "layout": _fields(made.layout),
        **figures,
        "sure": made.sure._asdict(),
        "warnings": made.warnings(),
    }


def run_plan(args) -> tuple[str, dict]:
    """All layouts of a job, ranked. Raises ValueError where none fits."""
    whole("--rows", args.rows)
    tokens = None if args.train_tokens is None else _number(args.train_tokens)
    if args.price is not None:
        positive("--price", args.price, zero=True, most=1e6, unit="money for a GPU-hour")
    only = {axis: getattr(args, axis) for axis in (*Axes._fields, "shard")}
    made = plan(job_of(args), gpus=args.gpus, headroom=args.headroom, **only)
    best, flips = made.estimate(), made.flips()
    priced: dict[str, Any] = {}
    out = [repr(made.table(args.rows)), "", f"best: {best.layout}", best.summary(), best.interval()]
    out += [f"layouts less than {made.sure.apart:.0%} apart are a tie", *best.warnings()]
    if tokens or args.price is not None or args.mtbf is not None:
        from .plan.interruptions import interruptions, what_it_stops
        from .plan.meeting import cost, gpu_hours

        stopped = interruptions(best)
        priced = {"gpu_hours": gpu_hours(best, tokens)} if tokens else {}
        derived = {"every": stopped.every, "goodput": stopped.goodput}
        priced["interruptions"] = asdict(stopped) | derived
        out += [cost(best, made, tokens, args.price), f"what a lost GPU stops: {what_it_stops(best)}"]
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
    if args.flags:
        from .plan.flags import flags

        words = flags(args.flags, made.job, best.layout)
        out += ["", f"in the words of {args.flags}:", *words.split("\n")]
    if args.report:
        from .plan.page import page

        _write(Path(args.report), page(made, tokens, args.price))
        out += ["", f"the page for the meeting: {plain(args.report)}"]
    if not args.explain:
        out += [
            "",
            "--explain says where time and memory go, by which formulas; --why 4,8,2 says why not DP 4,"
            " TP 8, PP 2.",
        ]
    return "\n".join(out), {
        "inputs": _inputs(made.job) | {"gpus": made.gpus, "headroom": args.headroom},
        "layouts": made.looked_at,
        "fit": len(made.ranked),
        "tight": len(made.tight),
        "ranked": [
            {
                "layout": _fields(r.layout),
                "step_seconds": r.seconds,
                "tie": made.ties(r),
                "memory_bytes": r.memory,
            }
            for r in made.by_axes[: args.rows]
        ],
        "best": _estimated(best) | priced,
        "flips": [{"change": w, "factor": f, "winner": _fields(row.layout)} for w, f, row in flips],
        "refused": [{**axes._asdict(), "reason": reason} for axes, reason in made.impossible.items()],
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None


def layout_of(args, job: Job) -> Layout:
    """The layout that the arguments name."""
    chosen = {name: getattr(args, name) for name in (*Axes._fields, *CHOSEN)}
    return job.framework.layout(**chosen, sequence_parallel=not args.no_sp)


def run_memory(args) -> tuple[str, dict]:
    """Time and memory of one layout."""
    job = job_of(args)
    made = estimate(job, layout_of(args, job))
    return made.text(args.explain), {"inputs": _inputs(job), **_estimated(made)}


def run_normal(args) -> tuple[str, dict]:
    """A measured step beside its estimate. dp is what --gpus leaves after tp, pp and cp."""
    from .plan.normal import Normal, read_line, step_seconds

    for name in ("gpus", "tp", "pp", "cp"):
        whole(f"--{name}", getattr(args, name))
    job, split = job_of(args), args.tp * args.pp * args.cp
    if args.gpus % split:
        raise ValueError(f"--gpus {args.gpus} is no multiple of tp · pp · cp = {split}")
    args.dp = args.gpus // split
    layout = layout_of(args, job)
    given = {"seconds": args.step, "tokens": args.tokens, "TFLOP/s": args.tflops}
    unit, value = next(((unit, value) for unit, value in given.items() if value is not None), ("", 0.0))
    if args.log is not None:
        value, unit = read_line(args.log)
    made = Normal(estimate(job, layout), step_seconds(job, layout, value, unit, args.flops))
    return made.text(), {"inputs": _inputs(job), **made.data(), "predicted": _estimated(made.estimate)}


def run_bytes(args) -> tuple[str, dict]:
    """Bytes that each GPU of the first, middle and last stage sends in a step, by axis."""
    from .plan.traffic import sent

    job = job_of(args)
    layout = layout_of(args, job)
    job.check(layout)
    # Of few stages one is all of these.
    stages = {layout.pp // 2: "middle", layout.pp - 1: "last", 0: "first"}
    by_stage = {name: sent(job, layout, k) for k, name in sorted(stages.items())}
    columns = [f"{name} stage" for name in by_stage] if layout.pp > 1 else ["a step"]
    axes = dict.fromkeys(axis for stage in by_stage.values() for axis in stage)
    rows = [
        [NAMED[axis].called, *(human(stage.get(axis, 0.0)) for stage in by_stage.values())] for axis in axes
    ]
    total = ["total", *(human(sum(stage.values())) for stage in by_stage.values())]
    title = f"{job.model.name}, {job.framework.name}: {layout}. Sent by each GPU in a step"
    table = Table(["axis", *columns], rows, total, title)
    return repr(table), {"inputs": _inputs(job), "layout": _fields(layout), "bytes": by_stage}


def run_bubble(args) -> tuple[str, dict]:
    """One schedule on paper: a forward is 1 unit of time, a whole backward 2."""
    from .paper.simulation import paper

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
    line = paper(schedule)
    held = [line.in_flight(r) for r in range(args.pp)]
    text = (
        f"{schedule.name}, p = {args.pp}, m = {args.microbatches}: {line.makespan:g} units (forward 1,"
        f" backward 2), {line.bubble:.2%} of wall time idle\nheld at once, by rank: {held}"
        + (f", each 1/{share} of a rank's layers" if share > 1 else "")
    )
    return text, {"makespan": line.makespan, "bubble": line.bubble, "in_flight": held}
