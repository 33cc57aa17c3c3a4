"""A layout in front of a reviewer: six hard questions, each answered by figures computed on the spot, and one
page to take along.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path

from ..table import Table, human
from ..theory import Estimate, Job, Plan, estimate, plan
from ..theory.collectives import book
from ..theory.layout import Layout
from ..theory.memory import stage_memory
from ..theory.placement import crosses, groups
from ..theory.traffic import sent
from .draw import memory_by_stage, waterfall
from .picture import Picture

QUESTIONS = (
    "What does the fullest GPU hold?",
    "What crosses the nodes?",
    "How large is the bubble?",
    "What if the batch halves?",
    "What if the network between nodes halves?",
    "Why not pure FSDP?",
)


STYLE = """@page { size: A4; margin: 12mm }
body { font: 10pt/1.35 sans-serif; color: #222; background: #fff; max-width: 186mm; margin: auto }
h1 { font-size: 15pt; margin: 0 0 2mm } h2 { font-size: 11pt; margin: 3mm 0 1mm }
dt { font-weight: bold } dd { margin: 0 0 1.2mm 0 }
figure { display: inline-block; width: 49%; margin: 0; vertical-align: top } img { width: 100%; height: auto }
table { border-collapse: collapse; font-size: 9pt } td, th { padding: 0 2mm; text-align: left }
small { color: #555 }"""


@dataclass(frozen=True)
class Defence:
    """`layout` for what `of` planned: the same model, cluster, GPUs, batch and sequence length.

    Raises ValueError, in a sentence, when the layout cannot be or takes another number of GPUs.
    """

    of: Plan
    layout: Layout

    def __post_init__(self):
        if self.layout.ranks != self.of.gpus:
            raise ValueError(f"{self.layout} takes {self.layout.ranks} GPUs, and there are {self.of.gpus}")
        self.estimate  # refuses what cannot be

    @property
    def job(self) -> Job:
        return self.of.job

    @cached_property
    def estimate(self) -> Estimate:
        return self._with()

    def _with(self, **changed) -> Estimate:
        return estimate(replace(self.job, **changed), self.layout)

    def with_cluster(self, **changed) -> Estimate:
        """The same step on a cluster whose fields are `changed`."""
        return self._with(cluster=replace(self.job.cluster, **changed))

    @property
    def microbatches(self) -> int:
        return self.job.microbatches(self.layout)

    # -- the answers

    @cached_property
    def stages(self) -> list[dict[str, float]]:
        """Bytes on one GPU of each pipeline stage, by what for."""
        return [
            {k: float(v) for k, v in stage_memory(self.job, self.layout, stage).items()}
            for stage in range(self.layout.pp)
        ]

    def memory(self) -> str:
        e, room = self.estimate, self.job.cluster.device.memory - self.estimate.memory_bytes
        most = sorted(e.memory.items(), key=lambda kind: -kind[1])[:2]
        return (
            f"{human(e.memory_bytes)} on a GPU of stage {e.stage}, most of it {most[0][0]}"
            f" ({human(most[0][1])}) and {most[1][0]} ({human(most[1][1])}). A {self.job.cluster.device.name}"
            f" holds {human(self.job.cluster.device.memory)}: {human(abs(room))}"
            f" {'are left' if room >= 0 else 'too much, so it does not run'}."
        )

    def traffic(self) -> dict[str, tuple[float, bool]]:
        """Axis -> (bytes that a GPU sends in a step by the book, whether its groups cross nodes)."""
        sizes, node = self.layout.sizes, self.job.cluster.gpus_per_node
        return {
            axis: (size, any(crosses(g, node) for g in groups(axis, sizes)))
            for axis, size in sent(self.job, self.layout).items()
            if sizes[axis] > 1
        }

    def crossing(self) -> str:
        parts = [
            f"{axis.upper()} sends {human(size)} a GPU and step"
            f" {'between nodes' if far else 'inside the node'}"
            for axis, (size, far) in sorted(
                self.traffic().items(), key=lambda found: "tp pp dp".index(found[0])
            )
        ]
        exposed = self.estimate.time["data parallel"]
        return (
            "; ".join(parts)
            + f". Of the data parallel traffic {exposed:.2f} s of {self.estimate.step_seconds:.2f} s shows;"
            " the rest runs under backward."
        )

    def bubble(self) -> str:
        if self.layout.pp == 1:
            return "None: there is no pipeline."
        p, m, v = self.layout.pp, self.microbatches, self.layout.interleave
        by_hand = (p - 1) / v / (m + (p - 1) / v)
        said = (
            f"(p−1)/v ÷ (m + (p−1)/v) = {(p - 1) / v:.3g}/{m + (p - 1) / v:.4g} = {by_hand:.1%} of the time"
            " that stages compute"
        )
        return (
            f"{said}, with m = {m}"
            + (f" and v = {v}" if v > 1 else "")
            + f": {self.estimate.time['bubble']:.2f} s of {self.estimate.step_seconds:.2f} s."
        )

    def _tokens(self, e: Estimate) -> str:
        return (
            f"{e.tokens_per_second_per_gpu:,.0f} tokens/s a GPU instead of"
            f" {self.estimate.tokens_per_second_per_gpu:,.0f}"
            f" ({e.tokens_per_second_per_gpu / self.estimate.tokens_per_second_per_gpu - 1:+.1%})"
        )

    def half_the_batch(self) -> str:
        batch = self.job.global_batch // 2
        try:
            mine = self._with(global_batch=batch)
        except ValueError as e:
            return f"It cannot be: {e}."
        other = plan(mine.job, gpus=self.of.gpus, **self.of.options)
        return (
            f"{self._tokens(mine)}: the bubble and the gradients are shared by half as many tokens. "
            + self._best(other, mine)
        )

    def half_the_network(self) -> str:
        mine = self.with_cluster(inter_node_bandwidth=self.job.cluster.inter_node_bandwidth / 2)
        other = plan(mine.job, gpus=self.of.gpus, **self.of.options)
        return f"{self._tokens(mine)}. " + self._best(other, mine)

    @staticmethod
    def _best(found: Plan, mine: Estimate) -> str:
        if not found.ranked:
            return "Nothing fits then."
        if found.best.layout == mine.layout:
            return "This one is then still the fastest."
        return (
            f"Then the fastest is {found.best.layout}, {mine.step_seconds / found.best.seconds - 1:.1%} ahead"
            " of this one."
        )

    def pure_fsdp(self) -> str:
        rows = [r for r in self.of.ranked if r.axes.dp == self.of.gpus and r.layout.zero == 3]
        if not rows:
            return "It does not fit, even with everything recomputed."
        them = self.of.estimate(rows[0])
        costs = them.step_seconds / self.estimate.step_seconds - 1
        what = "it recomputes every layer" if them.layout.recompute == "full" else "it need not recompute"
        return (
            f"{them.layout} takes {them.step_seconds:.2f} s, this {self.estimate.step_seconds:.2f} s"
            f" ({costs:+.1%}): {what}, and gathers"
            f" {human(2 * book('all_gather', 2 * self.job.model.params, self.of.gpus))} of weights for each"
            f" microbatch, over all nodes; {them.time['data parallel']:.2f} s of that show. It needs"
            f" {human(them.memory_bytes)} instead of {human(self.estimate.memory_bytes)}, and no surgery on"
            " the model."
        )

    @cached_property
    def answers(self) -> dict[str, str]:
        said = (
            self.memory,
            self.crossing,
            self.bubble,
            self.half_the_batch,
            self.half_the_network,
            self.pure_fsdp,
        )
        return {question: answer() for question, answer in zip(QUESTIONS, said)}

    # -- the page

    def memory_picture(self) -> Picture:
        return memory_by_stage(
            self.stages, self.job.cluster.device.memory, f"What a GPU of each stage holds: {self.layout}"
        )

    def time_picture(self) -> Picture:
        time = dict(self.estimate.time)
        computing = sum(time.pop(k) for k in ("matrices", "attention", "elementwise", "waiting for the host"))
        return waterfall({str(self.layout): {"computing": computing, **time}}, unit="s", last="step")

    def sensitivities(self) -> Table:
        """What changes the winner, and how this layout stands then."""
        rows = [[what, f"× {factor:g}", str(row.layout)] for what, factor, row in self.of.flips()]
        return Table(
            ["change", "by", "then the fastest is"], rows, title=f"now the fastest is {self.of.best.layout}"
        )

    def html(self) -> str:
        """The page, complete in itself: a browser shows it and prints it on one sheet."""
        e, of = self.estimate, self.of
        place = of.why(**self.layout.axes._asdict())
        answers = "".join(f"<dt>{escape(q)}</dt><dd>{escape(a)}</dd>" for q, a in self.answers.items())
        return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>{escape(str(self.layout))}</title>
<style>{STYLE}</style>
<h1>{escape(str(self.layout))}</h1>
<p>{escape(of.job.model.name)}, {of.job.model.params:,} parameters,
on {of.gpus} × {of.job.cluster.device.name} ({escape(of.job.cluster.name)}),
{of.job.global_batch} sequences of {of.job.seq_len:,} tokens in a step.<br>
<b>{escape(e.summary())}</b><br>
Among all layouts of {self.layout.axes}: {escape(place)}.</p>
<h2>Where the time goes, and the memory</h2>
<figure>{self.time_picture().html()}</figure><figure>{self.memory_picture().html()}</figure>
<h2>Six questions</h2><dl>{answers}</dl>
<h2>What would change the choice</h2>{self.sensitivities()._repr_html_()}
<small>Computed by Three Axes' cost model, which misses published runs by 2 to 11 % in most of its tables,
and more in eager PyTorch. Measure the first three before you buy.</small></html>"""

    def save(self, file: str | Path) -> Path:
        """Write the page. To have it as PDF, open it in a browser and print it."""
        path = Path(file)
        if path.suffix not in (".html", ".htm"):
            raise ValueError(
                f"{path.name}: the page is HTML, so give a name that ends in .html; a browser prints it"
                " to PDF"
            )
        path.write_text(self.html(), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        return "\n".join(
            [
                f"{self.job.model.name} on {self.of.gpus} × {self.job.cluster.device.name}: {self.layout}",
                self.estimate.summary(),
                "",
                *(f"{i}. {q}\n   {a}" for i, (q, a) in enumerate(self.answers.items(), 1)),
            ]
        )

    def _repr_html_(self) -> str:
        answers = "".join(
            f"<li style='margin:.3em 0'><b>{escape(q)}</b> {escape(a)}</li>" for q, a in self.answers.items()
        )
        return f"<b>{escape(str(self.layout))}</b>: {escape(self.estimate.summary())}<ol>{answers}</ol>"
