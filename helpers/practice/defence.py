"""Defends a layout before a reviewer: seven hard questions, each answered with computed figures, and one page
of HTML for a meeting.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path

from three_axes.paper import algorithmic_bytes, by_hand
from three_axes.plan import (
    Axes,
    Estimate,
    Job,
    Layout,
    Plan,
    Proposal,
    document,
    estimate,
    plan,
    sent,
    what_it_stops,
)
from three_axes.table import human

from ..draw import Picture, memory_by_stage, waterfall

QUESTIONS = (
    "What does the fullest GPU hold?",
    "What crosses the nodes?",
    "How large is the bubble?",
    "What if the batch halves?",
    "What if the network between nodes halves?",
    "Why not pure FSDP?",
    "What does a lost GPU stop?",
)


@dataclass(frozen=True)
class Defence:
    """Defends `layout` for the job that `of` planned: the same model, cluster, GPUs, batch and sequence
    length.

    Raises ValueError, with the reason, if the layout is impossible or needs another number of GPUs.
    """

    of: Plan
    layout: Layout

    def __post_init__(self):
        if self.layout.ranks != self.of.gpus:
            raise ValueError(f"{self.layout} takes {self.layout.ranks} GPUs, and there are {self.of.gpus}")
        self.estimate  # raises for an impossible layout

    @property
    def job(self) -> Job:
        """Model, cluster, global batch and sequence length: the plan's own."""
        return self.of.job

    @cached_property
    def estimate(self) -> Estimate:
        """The step of `layout`, in seconds and bytes. Raises ValueError for an impossible layout."""
        return estimate(self.job, self.layout)

    @property
    def proposal(self) -> Proposal:
        """The layout, as a proposal for a meeting."""
        return Proposal(self.estimate, self.of)

    # -- the answers

    def memory(self) -> str:
        """A sentence on the fullest GPU: its bytes, the two largest parts, and what is left or missing."""
        e, device = self.estimate, self.job.cluster.device
        most = sorted(e.memory.items(), key=lambda kind: -kind[1])[:2]
        stage = f" of stage {e.stage}" if self.layout.pp > 1 else ""
        left = f"{human(e.free)} are left" if e.free >= 0 else f"{human(-e.free)} too much"
        close = ", and the allocator may reserve more than that besides" if e.tight else ""
        close += ", so it does not run" * (not e.fits and not e.tight)
        return (
            f"{human(e.memory_bytes)} on a GPU{stage}, most of it {most[0][0]} ({human(most[0][1])}) and"
            f" {most[1][0]} ({human(most[1][1])}). The GPU ({device.name})"
            f" holds {human(device.memory)}: {left}{close}."
        )

    def traffic(self) -> dict[str, tuple[float, bool]]:
        """Axis with several ranks -> (bytes that a GPU sends in a step by the formulas, whether its groups
        cross nodes).
        """
        layout, node = self.layout, self.job.cluster.gpus_per_node
        return {
            axis: (size, bool(layout.reach(axis, node)[1] > 1))
            for axis, size in sent(self.job, layout).items()
            if layout.members(axis) > 1
        }

    def crossing(self) -> str:
        """A sentence on the bytes that a GPU sends in a step, by axis, and which of them leave the node."""
        traffic = self.traffic()
        if not traffic:
            return "Nothing: there is one GPU."
        again = self.layout.sequence_parallel and self.job.framework.sends.regathers
        more = {"tp": ", with inputs that are gathered again in backward" * again}
        parts = [
            f"{axis.upper()} sends {human(traffic[axis][0])} a GPU in each step"
            f" {'between nodes' if traffic[axis][1] else 'inside the node'}{more.get(axis, '')}"
            for axis in sorted(traffic, key=traffic.get, reverse=True)
        ]
        sentence = "; ".join(parts) + "."
        if not any(far for _, far in traffic.values()):
            sentence = f"Nothing. {sentence}"
        if "dp" in traffic:
            shown = f"{self.estimate.time['data parallel']:.2f} s of the {self.estimate.step_seconds:.2f} s"
            sentence += f" Data parallelism takes {shown}; the rest of its traffic runs under computation."
        return sentence

    def bubble(self) -> str:
        """A sentence on the bubble's seconds and, unless the schedule splits backward, on its share by the
        formula.
        """
        if self.layout.pp == 1:
            return "None: there is no pipeline."
        p, m, v = self.layout.pp, self.job.microbatches(self.layout), self.layout.interleave
        seconds = f"{self.estimate.time['bubble']:.2f} s of {self.estimate.step_seconds:.2f} s"
        if self.layout.pipeline.splits:
            return f"{seconds}, with m = {m}: {self.layout.schedule} fills most of it with weight gradients."
        share = f"{(p - 1) / v:.3g}/{m + (p - 1) / v:.4g} = {by_hand.bubble(p, m, v):.1%}"
        return (
            f"(p−1)/v ÷ (m + (p−1)/v) = {share} of the time"
            f" that stages compute or wait, with m = {m}{f' and v = {v}' if v > 1 else ''}: {seconds}."
        )

    def _tokens(self, e: Estimate) -> str:
        now, then = self.estimate.tokens_per_second_per_gpu, e.tokens_per_second_per_gpu
        return f"{then:,.0f} tokens/s a GPU instead of {now:,.0f} ({then / now - 1:+.1%})"

    def half_the_batch(self) -> str:
        """Tokens/s a GPU with half the global batch, and the layout that is then the fastest; or why this
        batch is impossible.
        """
        try:
            mine = estimate(replace(self.job, global_batch=self.job.global_batch // 2), self.layout)
        except ValueError as e:
            return f"It cannot be: {e}."
        costs = ["the bubble"] * (self.layout.pp > 1) + ["the gradients"] * (self.layout.dp > 1)
        why = " and ".join(costs or ["the optimizer"])
        are = "are" if len(costs) > 1 or costs == ["the gradients"] else "is"
        return f"{self._tokens(mine)}: {why} {are} shared by half as many tokens. {self._best(mine)}"

    def half_the_network(self) -> str:
        """Tokens/s a GPU with half the bandwidth between nodes, and the layout that is then the fastest."""
        if not any(far for _, far in self.traffic().values()):
            return "Nothing changes: no group of this layout leaves its node."
        mine = estimate(self.job.changed("speed between nodes", 0.5), self.layout)
        return f"{self._tokens(mine)}. {self._best(mine)}"

    def _best(self, mine: Estimate) -> str:
        """A sentence that compares this layout with the fastest one, for the job of the estimate `mine`."""
        then = plan(mine.job, gpus=self.of.gpus, **self.of.options)
        if not then.ranked:
            return "No layout fits then."
        best, ahead = then.best, mine.step_seconds / then.best.seconds - 1
        if best.layout == mine.layout:
            was_first = mine.layout in [row.layout for row in self.of.ranked[:1]]
            return f"It is then{' still' * was_first} the fastest."
        if not mine.fits and not mine.tight:
            return (
                f"It does not fit; the fastest that does is {best.layout}, with {best.seconds:.2f} s a step."
            )
        if ahead <= 0:
            return f"It is then as fast as {best.layout}, the planner's first, or faster."
        return f"Then the fastest is {best.layout}, {ahead:.1%} ahead of this one."

    @cached_property
    def pure(self) -> Estimate | None:
        """The fastest layout of FSDP alone that fits; if none fits, the fastest tight one, or None. If the
        plan has no ZeRO-3, it is planned for this.
        """
        of = self.of
        if 3 not in self.job.framework.offers.zeros:
            framework = self.job.framework.but(zeros=(3,), zeros_in_pipeline=())
            of = plan(replace(self.job, framework=framework), gpus=of.gpus, dp=of.gpus)
        for rows in (of.ranked, of.tight):
            for row in rows:
                if row.axes.dp == of.gpus and row.layout.zero == 3:
                    return of.estimate(row)
        return None

    def pure_fsdp(self) -> str:
        """Sentences that compare the fastest layout of FSDP alone with this one; or why there is none."""
        gpus, zeros = self.of.gpus, self.job.framework.offers.zeros
        if gpus == 1:
            return "There is one GPU, and nothing to share out."
        if self.layout.dp == gpus and self.layout.zero == 3:
            return "This is pure FSDP."
        them = self.pure
        if them is None:
            reason = self.of.impossible.get(Axes(dp=gpus))
            return f"It cannot be: {reason}." if reason else "It does not fit, whatever is recomputed."
        costs = them.step_seconds / self.estimate.step_seconds - 1
        layers = self.job.model.layers
        again = (them.layout.recomputed or layers) if them.layout.recompute == "full" else 0
        what = f"recomputes {again} of {layers} layers" if again else "recomputes no whole layer"
        where = "over all nodes" if gpus > self.job.cluster.gpus_per_node else "inside the node"
        gathered = 2 * algorithmic_bytes("all_gather", 2 * self.job.model.params, gpus)
        unasked = f"The plan has ZeRO up to stage {max(zeros)}. Asked for stage 3, " * (3 not in zeros)
        return (
            f"{unasked}{them.layout} takes {them.step_seconds:.2f} s a step, {abs(costs):.1%}"
            f" {'more' if costs > 0 else 'less'} than this layout's {self.estimate.step_seconds:.2f} s. It"
            f" {what}, and gathers {human(gathered)} of weights for each"
            f" microbatch, {where}; {them.time['data parallel']:.2f} s of data parallelism show. It needs"
            f" {human(them.memory_bytes)}{', which is tight,' * them.tight} instead of"
            f" {human(self.estimate.memory_bytes)}, and"
            " leaves the model's code as it is."
        )

    @cached_property
    def answers(self) -> dict[str, str]:
        """Question -> answer, in the order of QUESTIONS."""
        on_memory = self.memory(), self.crossing(), self.bubble()
        on_change = self.half_the_batch(), self.half_the_network(), self.pure_fsdp()
        return dict(zip(QUESTIONS, on_memory + on_change + (what_it_stops(self.estimate),)))

    # -- the page

    def memory_picture(self) -> Picture:
        """Bars: bytes by kind on a GPU of each stage, and the memory of the GPU."""
        capacity = self.job.cluster.device.memory
        return memory_by_stage(
            self.estimate.stages, capacity, f"What a GPU of each stage holds: {self.layout}"
        )

    def time_picture(self) -> Picture:
        """Bars that add up to the step, in seconds: computing, then all other parts."""
        time = dict(self.estimate.time)
        computing = sum(time.pop(k) for k in ("matrices", "attention", "elementwise", "waiting for the host"))
        return waterfall({str(self.layout): {"computing": computing, **time}}, unit="s", last="step")

    def _page(self, tokens: float | None) -> str:
        """The planner's page, with this layout, its pictures and the seven answers."""
        proposal = self.proposal
        answers = "".join(f"<dt>{escape(q)}</dt><dd>{escape(a)}</dd>" for q, a in self.answers.items())
        both = self.time_picture(), self.memory_picture()
        pictures = "".join(f"<figure>{picture.html()}</figure>" for picture in both)
        sections = {
            "Alternatives": proposal.alternatives(self.pure)._repr_html_(),
            "What would change this choice": proposal.changes()._repr_html_(),
            "Where the time goes, and the memory": pictures,
            "Seven questions": f"<dl>{answers}</dl>",
        }
        return document(proposal, sections, tokens)

    def report(self, file: str | Path = "defence.html", tokens: float | None = None) -> None:
        """Write the page for the meeting, and print its recommendation, its price, and the file's name.

        tokens: to train on; by default 20 for each parameter. For a PDF, open the page in a browser and print
        it. Raises ValueError for a name that does not end in .html or .htm.
        """
        path = Path(file)
        if path.suffix not in (".html", ".htm"):
            raise ValueError(
                f"{path.name}: the page is HTML, so give a name that ends in .html; a browser prints it"
                " to PDF"
            )
        path.write_text(self._page(tokens), encoding="utf-8")
        for text in (self.proposal.verdict(), self.proposal.cost(tokens)):
            print(textwrap.fill(text, 110, break_on_hyphens=False))  # a notebook would break words
        print(f"The page for the meeting is {path}. A browser shows it, and prints it to PDF.")

    def __repr__(self) -> str:
        job, answers = self.job, enumerate(self.answers.items(), 1)
        return (
            f"{job.model.name} on {self.of.gpus} × {job.cluster.device.name}: {self.layout}\n"
            f"{self.estimate.summary()}\n\n" + "\n".join(f"{i}. {q}\n   {a}" for i, (q, a) in answers)
        )

    def _repr_html_(self) -> str:
        pairs = self.answers.items()
        answers = "".join(f"<li style='margin:.3em 0'><b>{escape(q)}</b> {escape(a)}</li>" for q, a in pairs)
        return f"<b>{escape(str(self.layout))}</b>: {escape(self.estimate.summary())}<ol>{answers}</ol>"
