"""Runs the commands `plan` and `estimate`: `run_plan`, `run_estimate` return (text, same results for --json).

A module that only one command needs is imported inside it, so that each command starts quickly.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from .checks import whole
from .foreign import plain
from .paper.axes import ALWAYS, NAMED
from .paper.hardware import find_cluster
from .plan.frameworks import find_framework
from .plan.job import Job, Lora
from .plan.layout import Axes, Layout
from .plan.models import find_model
from .plan.planner import plan
from .plan.step import Estimate, estimate
from .table import Table, human

# Fields of a layout, besides its axes, that have the value of an option of `estimate`.
CHOSEN = ("microbatch", "interleave", "schedule", "zero", "shard")
# Switch -> the fields of the framework that it changes: see `Framework.but`.
SWITCHES: dict[str, dict[str, Any]] = {
    "compiled": {"compiled": True, "fused": True, "norm_bytes": 2},
    "8-bit-adam": {"eight_bit": True},
    "offload": {"offload": True},
    "sync-each-batch": {"reduces_each": True},
    "4-bit": {},  # changes no framework's record: it belongs to LoRA, whose frozen weights have 4 bits
}


def job_of(args) -> Job:
    """The job that the arguments describe. Raises ValueError with a sentence if they make no sense."""
    changed = {name: value for switch in args.switches for name, value in SWITCHES[switch].items()}
    unchanged = find_framework(args.framework)
    if "compiled" in args.switches and unchanged.runs.fused:
        raise ValueError(f"{unchanged.name}'s layers are fused already: leave compiled out of --with")
    if "sync-each-batch" in args.switches and unchanged.name != "transformers":
        raise ValueError(f"sync-each-batch is a switch of transformers, and --framework is {unchanged.name}")
    if args.command == "plan":
        piped = [zero for zero in args.zero or () if zero in unchanged.offers.zeros_in_pipeline]
        asked = {"schedules": args.schedule, "recomputes": args.recompute, "zeros": args.zero}
        changed |= {name: tuple(values) for name, values in asked.items() if values}
        changed |= {"zeros_in_pipeline": tuple(piped)} if args.zero else {}
    framework = unchanged.but(**changed)
    model, cluster = find_model(args.model), find_cluster(args.cluster)
    four_bit = "4-bit" in args.switches
    if args.lora is None and four_bit:
        raise ValueError("4-bit weights are frozen ones: give --lora too, the adapters' rank, 16 say")
    lora = None if args.lora is None else Lora(args.lora, four_bit=four_bit)
    return Job(model, cluster, _batch(args), args.seq, framework, args.precision, lora)


def _batch(args) -> int:
    """Sequences of a step. A number with a letter counts tokens: in powers of 1000 or, if that is not a whole
    number of sequences, of 1024, so that 4M is 4,194,304 for sequences of 8,192.
    """
    text = str(args.batch)
    if not text[-1:].isalpha():
        try:
            return int(text)
        except ValueError:
            wrong = f"--batch is a number of sequences, 128, or of tokens, 4M; not {plain(text)!r}"
            raise ValueError(wrong) from None
    whole("seq_len", args.seq)
    for thousand in (1000, 1024):
        tokens = _number(text, thousand)
        if tokens >= args.seq and tokens % args.seq == 0:
            return int(tokens) // args.seq
    near = max(1, round(_number(text) / args.seq))
    raise ValueError(
        f"{plain(text)} tokens are no whole number of sequences of {args.seq:,}; take --batch {near}"
    )


def _number(text: str, thousand: int = 1000) -> float:
    """'4M' -> 4e6. Raises ValueError for a text that is no such number."""
    powers = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}
    digits = text.rstrip("kKmMbBgGtT")
    try:
        number = float(digits.replace(",", "")) * thousand ** powers[text[len(digits) :].lower()]
    except (ValueError, KeyError, OverflowError):
        number = 0.0
    if not 0 < number < 1e18:
        raise ValueError(f"{plain(text)!r} is no number of tokens, such as 4M, 15T or 4194304")
    return number


def _inputs(job: Job) -> dict:
    """The inputs of an estimate, for --json."""
    holds, runs = job.framework.holds, job.framework.runs
    lora = job.lora and asdict(job.lora)
    return {
        "model": job.model.name,
        "parameters": job.model.params,
        "active_parameters": job.model.active_params,
        "cluster": job.cluster.name,
        "device": job.cluster.device.name,
        "framework": job.framework.name,
        "gradient_bytes": holds.gradient_bytes,
        "compiled": runs.compiled,
        "eight_bit": holds.eight_bit,
        "offload": holds.offload,
        "reduces_each": job.framework.sends.reduces_each,
        "precision": job.precision,
        "lora": lora,
        "global_batch": job.global_batch,
        "seq_len": job.seq_len,
    }


def _parameters(job: Job) -> str:
    """A line with the model's parameters, and with experts those that a token uses."""
    active = f", {job.model.active_params:,} of them active for a token" * bool(job.model.experts)
    return f"{job.model.name}: {job.model.params:,} parameters{active}"


def _fields(layout: Layout) -> dict:
    """A layout, for --json."""
    names = (*CHOSEN, "recompute", "recomputed", "sequence_parallel", "order")
    return {**layout.axes._asdict(), **{name: getattr(layout, name) for name in names}}


def _estimated(result: Estimate) -> dict:
    """An estimate, for --json."""
    names = ("time", "step_seconds", "memory", "memory_bytes", "stage", "fits", "tight", "mfu")
    figures = {name: getattr(result, name) for name in names}
    return {
        "layout": _fields(result.layout),
        **figures,
        "sure": result.sure._asdict(),
        "warnings": result.warnings(),
    }


def run_plan(args) -> tuple[str, dict]:
    """All layouts of a job, ranked. Raises ValueError if none fits."""
    tokens = None if args.train_tokens is None else _number(args.train_tokens)
    job = job_of(args)
    only = {axis: getattr(args, axis) for axis in Axes._fields}
    result = plan(job, gpus=args.gpus, **only)
    best, flips = result.estimate(), result.flips()
    beside = _beside(best, args.measured)
    of_training: dict[str, Any] = {}
    out = [
        _parameters(job),
        repr(result.table()),
        "",
        f"best: {best.layout}",
        best.summary(),
        best.interval(),
        *([str(beside)] if beside else []),
    ]
    out += [f"layouts less than {result.sure.apart:.0%} apart are a tie", *best.warnings()]
    if tokens:
        from .plan.interruptions import interruptions, what_it_stops
        from .plan.meeting import Proposal

        stopped = interruptions(best)
        derived = {"every": stopped.every, "goodput": stopped.goodput}
        of_training = {"gpu_hours": best.gpu_hours(tokens), "interruptions": asdict(stopped) | derived}
        out += [Proposal(best, result).cost(tokens), f"what a lost GPU stops: {what_it_stops(best)}"]
    if args.why:
        out += ["", f"{args.why}: {result.why(**args.why._asdict())}"]
    if flips:
        out += ["", "what would change the winner:"]
        out += [f"  {what} × {factor:g}: {row.layout}" for what, factor, row in flips]
    if args.flags:
        from .plan.flags import flags

        words = flags(args.flags, result.job, best.layout)
        out += ["", f"in the words of {args.flags}:", *words.split("\n")]
    if args.report:
        from .plan.page import page

        _write(Path(args.report), page(result, tokens))
        out += ["", f"the page for the meeting: {plain(args.report)}"]
    refused = f"; {len(result.impossible)} sizes cannot be, and --json has the reason of each"
    if others := [row.axes for row in result.by_axes[1:]] + list(result.impossible):
        sizes = list(others[0])
        while len(sizes) > len(ALWAYS) and sizes[-1] == 1:
            del sizes[-1]
        which = ",".join(map(str, sizes))
        out += ["", f"--why {which} says why not {others[0]}{refused * bool(result.impossible)}."]
    return "\n".join(out), {
        "inputs": _inputs(result.job) | {"gpus": result.gpus},
        "layouts": result.looked_at,
        "fit": len(result.ranked),
        "tight": len(result.tight),
        "ranked": [
            {
                "layout": _fields(r.layout),
                "step_seconds": r.seconds,
                "tie": result.ties(r),
                "memory_bytes": r.memory,
            }
            for r in result.by_axes
        ],
        "best": _estimated(best) | of_training,
        "flips": [{"change": w, "factor": f, "winner": _fields(row.layout)} for w, f, row in flips],
        "refused": [{**axes._asdict(), "reason": reason} for axes, reason in result.impossible.items()],
        "measured": beside and beside._asdict(),
    }


def _beside(made: Estimate, measured: str | None):
    """The comparison of a measured step, if there is one, with the estimate of its layout."""
    if measured is None:
        return None
    from .plan.measured import compared

    return compared(made, measured)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ValueError(f"cannot write {path}: {e.strerror}") from None


def layout_of(args, job: Job) -> Layout:
    """The layout that the arguments name. Without --dp, dp is the number of GPUs / (tp · pp · cp), rounded
    down, and ValueError is raised for a tp, pp or cp below 1.
    """
    chosen = {name: getattr(args, name) for name in (*Axes._fields, *CHOSEN)}
    if chosen["dp"] is None:
        for name in ("tp", "pp", "cp"):
            whole(f"--{name}", chosen[name])
        chosen["dp"] = max(1, (args.gpus or 1) // (args.tp * args.pp * args.cp))
    recompute, _, some = args.recompute.partition(":")
    return job.framework.layout(
        **chosen, recompute=recompute, recomputed=int(some or 0), sequence_parallel=not args.no_sp
    )


def run_estimate(args) -> tuple[str, dict]:
    """Seconds, memory and bytes of one layout."""
    job = job_of(args)
    layout = layout_of(args, job)
    job.check(layout, args.gpus)
    result = estimate(job, layout)
    beside = _beside(result, args.measured)
    by_stage, bytes_ = _sent(result)
    more = {"memory_by_stage": result.stages, "bubble": result.time["bubble"] / result.step_seconds}
    tables = [repr(result.by_stage())] * (result.layout.pp > 1) + [repr(by_stage)]
    text = "\n".join(
        [_parameters(job), result.text(args.explain, tables), *([str(beside)] if beside else [])]
    )
    more |= {"bytes": bytes_, "measured": beside and beside._asdict()}
    return text, {"inputs": _inputs(job), **_estimated(result), **more}


def _sent(e: Estimate) -> tuple[Table, dict]:
    """Bytes that each GPU of the first, middle and last stage sends in a step, by axis."""
    from .plan.traffic import sent

    pp = e.layout.pp
    stages = {pp // 2: "middle", pp - 1: "last", 0: "first"}  # with few stages a later name replaces another
    by_stage = {name: sent(e.job, e.layout, k) for k, name in sorted(stages.items())}
    columns = [f"{name} stage" for name in by_stage] if pp > 1 else ["a step"]
    axes = dict.fromkeys(axis for stage in by_stage.values() for axis in stage)
    rows = [
        [NAMED[axis].called, *(human(stage.get(axis, 0.0)) for stage in by_stage.values())] for axis in axes
    ]
    total = ["total", *(human(sum(stage.values())) for stage in by_stage.values())]
    return Table(["sent by each GPU", *columns], rows, total), by_stage
