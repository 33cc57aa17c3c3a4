"""Reads a measured time or speed that a user typed or copied from a log, with its layout if it has one, and
compares it with the planner's prediction.

Examples: `dp 8 tp 4 pp 2 = 16.2 s`, `DP 8 · TP 4 · PP 2 · b 1 · ZeRO-1 = 1,100 tokens/s`, `450 TFLOP/s`. In
place of the number there may be a line of a log. A layout may be written as the planner prints it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import Any, NamedTuple

from ..checks import positive
from ..paper.axes import AXES
from ..paper.pipelines import SCHEDULES
from .job import FLOPS, Job, find_precision
from .layout import RECOMPUTE, Axes, Layout
from .planner import plan
from .stages import layers_on_rank
from .step import estimate

# Pattern of a log's line -> unit of the number in it. Megatron-LM prints milliseconds of a step, torchtitan
# tokens a second of one GPU.
LINES = {r"elapsed time per iteration \(ms\): *([\d.,]+[kKM]?)": "ms", r"\btps: *([\d.,]+[kKM]?)": "tokens/s"}
# A number and its unit, such as "1,100 tokens/s".
_AMOUNT = rf"([\d.,]+[kKM]?) *(s|ms|tokens/s|(?:(?:{'|'.join(FLOPS)}) )?TFLOP/s)(?:/GPU)?"
SIZES = tuple(axis.name for axis in AXES)
# Pattern of a layout's words -> the fields that its groups set. The first pattern sets the axis it names.
_WORDS: dict[str, tuple[str, ...]] = {
    rf"({'|'.join(SIZES)})[ -]?(\d+)": (),
    r"b[ -]?(\d+)": ("microbatch",),
    r"v[ -]?(\d+)": ("interleave",),
    r"zero[ -]?([0-3])(?: over (\d+))?": ("zero", "shard"),
    rf"({'|'.join(RECOMPUTE)}) recompute(?: of (\d+) layers)?": ("recompute", "recomputed"),
    rf"({'|'.join(SCHEDULES)})": ("schedule",),
    r"(no )?sp": ("sequence_parallel",),
}


def read(text: str) -> tuple[dict[str, Any], float, str]:
    """(the layout's given fields, value, unit) of a measurement. The unit is s, ms, tokens/s of one GPU, or
    TFLOP/s of one GPU, in front of which there may be a word of `job.FLOPS`. Raises ValueError with a
    sentence if no time or speed is found, or words of the layout are not known.
    """
    layout, equals, amount = text.partition("=")
    a_log = any(re.search(line, text) for line in LINES)  # a log's line may contain an equals sign itself
    if not equals or a_log and not re.match(rf"\s*({'|'.join(SIZES)})[ -]?\d", layout, re.IGNORECASE):
        layout, amount = "", text
    return _layout(layout), *_amount(amount)


def _amount(text: str) -> tuple[float, str]:
    found, unit = re.fullmatch(_AMOUNT, text.strip()), ""
    if found:
        unit = found[2]
    for pattern, of_line in LINES.items():
        if not found and (found := re.search(pattern, text)):
            unit = of_line
    if not found:
        raise ValueError(
            f"no time or speed in {text.strip()[:60]!r}: give 4.1 s, 1,100 tokens/s or 450 TFLOP/s of one"
            " GPU, or a log's line: Megatron-LM's 'elapsed time per iteration (ms): 4123.4', torchtitan's"
            " 'tps: 1,234'"
        )
    number = found[1].replace(",", "")
    try:
        value = float(number.rstrip("kKM")) * {"k": 1e3, "K": 1e3, "M": 1e6}.get(number[-1], 1)
    except ValueError:
        value = 0.0
    positive(f"what was measured, {found[0]!r},", value, most=1e9, unit=unit)
    return value, unit


def _layout(text: str) -> dict[str, Any]:
    """The fields of a layout that the text sets. Raises ValueError for an unknown word."""
    fields: dict[str, Any] = {}
    rest = " ".join(text.replace("·", " ").split())
    while rest:
        for pattern, names in _WORDS.items():
            if found := re.match(rf"{pattern}(?: |$)", rest, re.IGNORECASE):
                break
        else:
            raise ValueError(
                f"{rest[:40]!r} is no part of a layout: write it as in 'dp 8 tp 4 pp 2 b 1 v 4 zero 1 ="
                " 16.2 s'"
            )
        groups = found.groups()
        if fields.keys() & ({groups[0].lower()} if not names else set(names)):
            raise ValueError(f"{found[0].strip()!r} is in a layout twice: {text.strip()[:60]!r}")
        if not names:
            fields[groups[0].lower()] = int(groups[1])
        elif names == ("sequence_parallel",):
            fields["sequence_parallel"] = not groups[0]
        else:
            fields |= {name: _value(word) for name, word in zip(names, groups) if word}
        rest = rest[found.end() :]
    if fields.get("interleave", 1) > 1:
        fields.setdefault("schedule", "interleaved")
    return fields


def _value(word: str) -> int | str:
    known = {name.lower(): name for name in SCHEDULES}
    return int(word) if word.isdecimal() else known.get(word.lower(), word.lower())


class Comparison(NamedTuple):
    """A measured step, compared with the estimate of its layout. ratio: measured seconds over predicted ones.
    mfu: as `Estimate.mfu`, but of the measured step. inside: whether the step lies in the estimate's
    interval, from low to high, in seconds; all three are None if the estimate has no interval.
    """

    step_seconds: float
    ratio: float
    mfu: float
    inside: bool | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        where = "inside" if self.inside else "longer than" if self.ratio > 1 else "shorter than"
        return (
            f"measured: {self.step_seconds:.2f} s, {self.ratio:.2f} times what is predicted, MFU"
            f" {self.mfu:.1%} (attention whole, dense FLOP/s)"
            + f"; {where} the 80% interval"
            * (self.inside is not None)
        )


def of_this_layout(job: Job, layout: Layout, texts: Sequence[str]) -> tuple[Job, Comparison | None]:
    """(the job, corrected by measured steps of other layouts; the measured step of this layout, or None). A
    text that names no layout belongs to this one. Raises ValueError if two texts do, and as `of_your_source`.
    """
    mine = [text for text in texts if not read(text)[0]]
    if len(mine) > 1:
        raise ValueError(f"{mine[0][:40]!r} and {mine[1][:40]!r} are both measured of {layout}: give one")
    job, _ = of_your_source(job, [text for text in texts if text not in mine])
    if not mine:
        return job, None
    seconds = _seconds(job, layout, mine[0], *read(mine[0])[1:])
    made = estimate(job, layout)
    ratio, sure = seconds / made.step_seconds, made.sure
    beside = Comparison(seconds, ratio, made.mfu / ratio)
    if sure.low is None or sure.high is None:
        return job, beside
    low, high = (end * made.step_seconds for end in (sure.low, sure.high))
    return job, beside._replace(inside=low <= seconds <= high, low=low, high=high)


def of_your_source(job: Job, texts: Sequence[str], **sizes: int | None) -> tuple[Job, dict[Layout, float]]:
    """(the job, with these runs in `measured`, so that predictions are corrected for their bias; layout ->
    measured seconds of a step). texts: runs of this job, as `read` takes them. sizes: of the axes, for texts
    that do not give them. The planner chooses the other fields of a layout. Raises ValueError with a sentence
    for a text without sizes and for an impossible layout.
    """
    measured = {}
    given = {axis: size for axis, size in sizes.items() if size is not None}
    for text in texts:
        fields, value, unit = read(text)
        fields = given | fields
        if not set(fields) & set(SIZES):
            raise ValueError(f"{text[:60]!r} does not say its layout: 'dp 8 tp 4 pp 2 = 16.2 s'")
        layout = _filled(job, fields)
        measured[layout] = _seconds(job, layout, text, value, unit)
    errors = (log(s / estimate(job, layout).step_seconds) for layout, s in measured.items())
    return replace(job, measured=tuple(errors)), measured


def _seconds(job: Job, layout: Layout, text: str, value: float, unit: str) -> float:
    """The same as `step_seconds`, but raises ValueError for a step that is faster than the GPUs can be."""
    seconds = step_seconds(job, layout, value, unit)
    if (share := _used(job, layout, seconds)) > 1:
        raise ValueError(
            f"{text[:60]!r} cannot be: it is {share:.3g} times what GPUs can do. Is the number that of one"
            " GPU, and are model, batch and sequence length the run's?"
        )
    return seconds


def _used(job: Job, layout: Layout, seconds: float) -> float:
    """The share of the GPUs' printed FLOP/s that a step uses; of attention the causal half is counted."""
    device, rate = job.cluster.device, find_precision(job.precision).rate
    peak = device.flops if rate == "bf16" else getattr(device, rate)
    tokens = job.global_batch * job.seq_len / seconds / layout.ranks
    return tokens * job.flops_per_token(causal=True) / peak


def _filled(job: Job, fields: dict[str, Any]) -> Layout:
    """The planner's best layout with the given sizes (1 if not given); other given fields replace its own."""
    axes = Axes(**{axis: fields.get(axis, 1) for axis in SIZES})
    made = plan(job, gpus=axes.ranks, **axes._asdict())
    found = next((rows[0].layout for rows in (made.ranked, made.tight, made.too_large) if rows), None)
    layout = replace(found or job.framework.layout(**axes._asdict()), **fields)
    job.check(layout)
    return layout


def step_seconds(job: Job, layout: Layout, value: float, unit: str) -> float:
    """Seconds of a step, from a value and its unit, which `read` returns. TFLOP/s count attention whole by
    default (as Megatron-LM and torchtitan do), `causal` its causal half (Llama 3), `hardware` also the
    second forward of recomputed layers (Narayanan 2021).
    """
    if unit in ("s", "ms"):
        return value / (1000 if unit == "ms" else 1)
    tokens = job.global_batch * job.seq_len / layout.ranks
    if unit == "tokens/s":
        return tokens / value
    counted, again = unit.removesuffix("TFLOP/s").strip(), 0.0
    if counted == "hardware" and layout.recompute == "full":
        layers = layers_on_rank(job.model, layout, min(1, layout.pp - 1))
        again = float(layout.share_recomputed(layers)) / 3  # a forward is a third of a step's FLOPs
    return tokens * job.flops_per_token(counted == "causal") * (1 + again) / (value * 1e12)
