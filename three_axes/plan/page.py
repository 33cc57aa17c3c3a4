"""Writes a plan as one HTML page for a meeting. It is light or dark as the browser is, and prints on A4."""

from __future__ import annotations

from html import escape

from ..table import Table
from .interruptions import what_it_stops
from .meeting import Proposal, close_calls
from .planner import Plan
from .step import Estimate

STYLE = """@page { size: A4; margin: 12mm }
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --bar: #2a6f97 }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #16181a; --bar: #7fb8d8 } }
@media print { :root { color-scheme: light; --ink: #222; --paper: #fff; --bar: #2a6f97 } }
body { font: 10pt/1.35 sans-serif; color: var(--ink); background: var(--paper); max-width: 186mm; margin: auto
} h1 { font-size: 15pt; margin: 0 0 2mm } h2 { font-size: 11pt; margin: 3mm 0 1mm } dt { font-weight: bold }
dd { margin: 0 0 1.2mm 0 } li { margin: 0 0 1mm 0 } figure { display: inline-block; width: 49%; margin: 0;
vertical-align: top } img { width: 100%; height: auto } table { border-collapse: collapse; font-size: 9pt }
td, th { padding: 0 2mm; text-align: left } .bars td:nth-child(3) { width: 80mm } .bars i { display: block;
height: 2.6mm; background: var(--bar); print-color-adjust: exact; -webkit-print-color-adjust: exact }
"""


def document(proposal: Proposal, sections: dict[str, str], tokens: float | None = None) -> str:
    """The page: the job, the recommendation, GPU-hours to train on so many tokens, the sections (title ->
    HTML), and the assumptions.
    """
    mine, job = proposal.mine, proposal.of.job
    switches = "".join(f", {escape(switch)}" for switch in job.switches)
    words = f"<p><b>{escape(proposal.verdict())}</b></p><p>{escape(proposal.cost(tokens))}</p>"
    assumed = "".join(f"<li>{escape(line)}</li>" for line in proposal.assumptions())
    sections = {"Recommendation": words, **sections, "Assumptions": f"<ul>{assumed}</ul>"}
    body = "".join(f"<h2>{escape(title)}</h2>{html}\n" for title, html in sections.items())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(str(mine.layout))}</title>
<style>{STYLE}</style>
<h1>{escape(str(mine.layout))}</h1>
<p>{escape(job.model.name)}, {job.model.params:,} parameters{switches},
on {proposal.of.gpus} × {escape(job.cluster.device.name)} ({escape(job.cluster.name)}),
{job.global_batch} sequences of {job.seq_len:,} tokens in a step, {escape(job.framework.name)}.<br>
{escape(mine.summary())}.<br>
{escape(mine.interval())}.</p>
{body}</html>"""


def waterfall(e: Estimate) -> str:
    """An HTML table of the seconds of a step. Each bar begins where the one above it ends."""
    rows, start, total = [], 0.0, e.step_seconds
    for name, seconds in e.time.items():
        if not seconds:
            continue
        bar = f"margin-left:{100 * start / total:.2f}%;width:{100 * seconds / total:.2f}%"
        rows.append(
            f'<tr><td>{escape(name)}</td><td>{seconds:.3f} s</td><td><i style="{bar}"></i></td>'
            f"<td>{seconds / total:.1%}</td></tr>"
        )
        start += seconds
    return f'<table class="bars">{"".join(rows)}</table>'


def page(of: Plan, tokens: float | None = None) -> str:
    """The page of a plan's best layout. Raises ValueError with a sentence if nothing fits."""
    best, close = of.estimate(), close_calls(of)
    flips = Table(
        ["change", "by", "then the fastest is"],
        [[what, f"× {factor:g}", str(row.layout)] for what, factor, row in of.flips()],
    )
    moved = flips._repr_html_() if flips.rows else "<p>Nothing from half to twice as much.</p>"
    sections = {
        "The fastest of each sizes": f"<p>{escape(close)}</p>" * bool(close) + of.table(6)._repr_html_(),
        "Where a step's seconds go": waterfall(best),
        "Memory by stage": best.by_stage()._repr_html_(),
        "What would change this choice": moved,
        "When a GPU is lost": f"<p>{escape(what_it_stops(best))}</p>",
    }
    return document(Proposal(best, of), sections, tokens)
