"""The page for the meeting: what to do, against what, for how much, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from ..table import Table, human
from ..theory import Estimate, Plan, estimate
from ..theory.estimate import HEADROOM
from ..theory.layout import Layout
from ..theory.planner import CHANGES

ERROR = 0.05  # what the planner cannot tell apart: its mean error in most published tables (README)
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, Table 3, where the reader does not say how many tokens

STYLE = """@page { size: A4; margin: 12mm }
body { font: 10pt/1.35 sans-serif; color: #222; background: #fff; max-width: 186mm; margin: auto }
h1 { font-size: 15pt; margin: 0 0 2mm } h2 { font-size: 11pt; margin: 3mm 0 1mm }
dt { font-weight: bold } dd { margin: 0 0 1.2mm 0 } li { margin: 0 0 1mm 0 }
figure { display: inline-block; width: 49%; margin: 0; vertical-align: top } img { width: 100%; height: auto }
table { border-collapse: collapse; font-size: 9pt } td, th { padding: 0 2mm; text-align: left }"""


def needs(layout: Layout) -> list[str]:
    """What somebody must do to the model or its training for this layout."""
    words = {
        "matrices cut by TP": layout.tp > 1,
        "a pipeline": layout.pp > 1,
        "FSDP": layout.zero == 3,
        "every layer computed twice": layout.recompute == "full",
    }
    return [name for name, true in words.items() if true]


def lost_with_half_the_network(e: Estimate) -> float:
    """Share of its speed that a layout loses when the bandwidth between nodes halves."""
    cluster = e.job.cluster
    slow = replace(e.job, cluster=replace(cluster, inter_node_bandwidth=cluster.inter_node_bandwidth / 2))
    return 1 - e.step_seconds / estimate(slow, e.layout).step_seconds


def verdict(mine: Estimate, of: Plan) -> str:
    """The recommendation, first; then what speaks for this layout and against it, beside the fastest that
    fits.
    """
    if not of.ranked:
        return "No layout fits with room to spare: take more GPUs, a smaller model or shorter sequences."
    best = of.estimate(of.best)
    behind = mine.step_seconds / best.step_seconds - 1
    if not mine.fits:
        return (
            f"Do not take it: it needs {human(-mine.free)} too much. The fastest that fits is {best.layout}."
        )
    if mine.tight:
        head = (
            f"Try it first: what it leaves free is within the error of the prediction. Of those that keep"
            f" {HEADROOM:.0%} free, {best.layout} is the fastest, with {best.step_seconds:.2f} s a step"
            f" and not {mine.step_seconds:.2f}."
        )
    elif mine.layout.axes == best.layout.axes and behind <= ERROR:
        head = "Take it: of those that fit with room to spare, no other sizes are faster."
    elif behind <= ERROR:
        head = (
            f"It may be taken: the fastest, {best.layout}, is {max(0.0, behind):.1%} ahead, and the planner's"
            f" own error is {ERROR:.0%}."
        )
    else:
        head = (
            f"The fastest, {best.layout}, is {behind:.1%} ahead, and the planner's error is {ERROR:.0%}."
            " Take that one, unless what speaks for this one is worth more."
        )
    if mine.layout.axes == best.layout.axes:
        return head
    good, bad = [], []
    (good if mine.free > best.free else bad).append(
        f"{human(mine.free)} of memory free and not {human(best.free)}"
    )
    here, there = lost_with_half_the_network(mine), lost_with_half_the_network(best)
    if abs(here - there) >= 0.001:
        (good if here < there else bad).append(f"half the network costs {here:.1%} and not {there:.1%}")
    good += [f"without {what}" for what in needs(best.layout) if what not in needs(mine.layout)]
    bad += [f"with {what}" for what in needs(mine.layout) if what not in needs(best.layout)]
    return " ".join(
        [
            head,
            *(
                f"{name}: {'; '.join(points)}."
                for name, points in (("For it", good), ("Against it", bad))
                if points
            ),
        ]
    )


def cost(mine: Estimate, of: Plan, tokens: float | None = None) -> str:
    """GPU-hours and days for so many tokens: a layout may fit and never finish."""
    given, count = tokens, tokens or TOKENS_PER_PARAMETER * mine.model.params
    hours = lambda e: count / e.tokens_per_second_per_gpu / 3600
    said = f"{count:.3g} tokens" + ("" if given else f" ({TOKENS_PER_PARAMETER} for each parameter)")
    text = (
        f"{said} take {hours(mine):,.0f} GPU-hours, {hours(mine) / mine.layout.ranks / 24:,.0f} days on"
        f" {mine.layout.ranks} GPUs, without failures, evaluations and checkpoints."
    )
    if of.ranked and of.best.layout != mine.layout:
        text += f" The fastest that fits would take {hours(of.estimate(of.best)):,.0f}."
    return text


def alternatives(mine: Estimate, of: Plan, pure: Estimate | None) -> Table:
    """This layout, the fastest two of other sizes, and pure FSDP."""
    rows = {"this one": mine}
    taken = {mine.layout.axes}
    for name, other in _others(of, pure):
        if other.layout.axes not in taken:
            rows[name] = other
            taken.add(other.layout.axes)
    return Table(
        ["", "sizes", "step", "free on a GPU", "half the network costs", "needs"],
        [
            [
                name,
                str(e.layout.axes),
                f"{e.step_seconds:.2f} s",
                human(e.free) if e.fits else "does not fit",
                f"{lost_with_half_the_network(e):.1%}",
                ", ".join(needs(e.layout)) or "nothing",
            ]
            for name, e in rows.items()
        ],
    )


def _others(of: Plan, pure: Estimate | None) -> Iterator[tuple[str, Estimate]]:
    for name, row in zip(("the fastest", "the second"), of.by_axes):
        yield name, of.estimate(row)
    if pure:
        yield "pure FSDP", pure


def changes(mine: Estimate, of: Plan) -> Table:
    """Half and twice of everything that may turn out otherwise: who wins then, and how far behind this layout
    is.
    """
    rows = []
    for what in CHANGES:
        for factor in (0.5, 2):
            then = of.changed(what, factor)
            if then is None:
                continue
            try:
                here = estimate(then.job, mine.layout)
            except ValueError as e:
                rows.append([what, f"× {factor:g}", "", f"cannot be: {e}"])
                continue
            best = then.best if then.ranked else None
            stands = "does not fit" if not here.fits else "fits"
            if best and here.fits:
                stands = f"{max(0.0, here.step_seconds / best.seconds - 1):.1%} behind"
            rows.append([what, f"× {factor:g}", str(best.layout) if best else "none fits", stands])
    return Table(["change", "by", "then the fastest is", "this one"], rows)


def assumptions(mine: Estimate) -> list[str]:
    """What the figures take for granted."""
    job, framework, device = mine.job, mine.job.framework, mine.job.cluster.device
    per_parameter = framework.weight_bytes + framework.gradient_bytes + framework.optimizer_bytes
    lines = [
        f"Framework {framework.name}: {per_parameter} bytes of weights, gradients and optimizer a parameter"
        " before ZeRO.",
        f"{device.name} reaches {device.achievable / device.flops:.0%} of its printed FLOP/s in large"
        f" products{', which is assumed and not published' if device.assumed else ''}.",
        f"{job.global_batch} sequences of {job.seq_len:,} tokens in every step, none of them padding.",
        f"Memory is predicted within some {HEADROOM:.0%}, time within some {ERROR:.0%} in most published"
        " tables and less well in others. Measure the first three before you buy.",
    ]
    return lines + [f"{warning[0].upper()}{warning[1:]}." for warning in mine.warnings()]


def page(defence, tokens: float | None) -> str:
    """The page, complete in itself: a browser shows it and prints it."""
    e, of = defence.estimate, defence.of
    answers = "".join(f"<dt>{escape(q)}</dt><dd>{escape(a)}</dd>" for q, a in defence.answers.items())
    taken = "".join(f"<li>{escape(line)}</li>" for line in assumptions(e))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>{escape(str(e.layout))}</title>
<style>{STYLE}</style>
<h1>{escape(str(e.layout))}</h1>
<p>{escape(of.job.model.name)}, {of.job.model.params:,} parameters,
on {of.gpus} × {of.job.cluster.device.name} ({escape(of.job.cluster.name)}),
{of.job.global_batch} sequences of {of.job.seq_len:,} tokens in a step.<br>
{escape(e.summary())}</p>
<h2>Recommendation</h2><p><b>{escape(verdict(e, of))}</b></p>
<p>{escape(cost(e, of, tokens))}</p>
<h2>Alternatives</h2>{alternatives(e, of, defence.pure)._repr_html_()}
<h2>What would change this choice</h2>{changes(e, of)._repr_html_()}
<h2>Where the time goes, and the memory</h2>
<figure>{defence.time_picture().html()}</figure><figure>{defence.memory_picture().html()}</figure>
<h2>Six questions</h2><dl>{answers}</dl>
<h2>Assumptions</h2><ul>{taken}</ul></html>"""
