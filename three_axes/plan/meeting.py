"""Writes the sentences and tables with which a layout is proposed in a meeting: the recommendation, its cost,
the alternatives, and what would change the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..table import Table, human
from .interruptions import RESTART, in_words, interruptions
from .job import CHANGES
from .layout import Layout
from .planner import Plan
from .step import Estimate, estimate

TOKENS_PER_PARAMETER = 20  # to train on, if no number is given: Hoffmann et al. 2022, Table 3


def needs(layout: Layout) -> list[str]:
    """Phrases for what must be changed in a model or its training before this layout can be used."""
    words = {
        "matrices cut by TP": layout.tp > 1,
        "a pipeline": layout.pp > 1,
        "FSDP": layout.zero == 3,
        f"{layout.recomputed or 'all'} layers of a stage computed twice": layout.recompute == "full",
    }
    return [name for name, true in words.items() if true]


def lost_with_half_the_network(e: Estimate) -> float:
    """The share of its speed that a layout loses if the bandwidth between nodes is halved."""
    return 1 - e.step_seconds / estimate(e.job.changed("speed between nodes", 0.5), e.layout).step_seconds


def close_calls(of: Plan) -> str:
    """A sentence with the layouts that tie with the best; "" if there are none."""
    best, *others = of.by_axes
    near = [row for row in others if of.ties(row)]
    if not near:
        return ""
    named = "; ".join(f"{row.layout}, {row.seconds / best.seconds - 1:.1%} behind" for row in near[:3])
    return f"Less than {of.sure.apart:.0%} behind, which is a tie, so measure them too: {named}."


@dataclass(frozen=True)
class Proposal:
    """One layout, `mine`, as a proposal for the job that `of` planned."""

    mine: Estimate
    of: Plan

    def verdict(self) -> str:
        """The recommendation. If the fastest layout that fits has other sizes, also what is better and what
        is worse than with that one.
        """
        mine, of = self.mine, self.of
        if not of.ranked:
            return "No layout fits: take more GPUs, a smaller model or shorter sequences."
        best, apart = of.estimate(of.best), of.sure.apart
        behind = mine.step_seconds / best.step_seconds - 1
        if not (mine.fits or mine.tight):
            return (
                f"Do not take it: it needs {human(-mine.free)} too much."
                f" The fastest that fits is {best.layout}."
            )
        if mine.tight:
            head = (
                "Try it first: it fits only if PyTorch's allocator reserves less than usual. Of those that"
                f" fit, {best.layout} is the fastest, with {best.step_seconds:.2f} s a step and not"
                f" {mine.step_seconds:.2f}."
            )
        elif mine.layout.axes == best.layout.axes and behind <= apart:
            head = (
                f"Take it: of the layouts that fit under {of.job.framework.name}, no other sizes are faster."
            )
        elif behind <= apart:
            head = (
                f"It may be taken: the fastest, {best.layout}, is {max(0.0, behind):.1%} ahead."
                f" Under {apart:.0%} that is a tie."
            )
        else:
            head = (
                f"The fastest, {best.layout}, is {behind:.1%} ahead, and up to {apart:.0%} would be a tie."
                " Take that one, unless what speaks for this one is worth more."
            )
        if mine.layout.axes == best.layout.axes:
            return head
        good: list[str] = []
        bad: list[str] = []
        free = f"{human(mine.free)} of memory free and not {human(best.free)}"
        (good if mine.free > best.free else bad).append(free)
        here, there = lost_with_half_the_network(mine), lost_with_half_the_network(best)
        if abs(here - there) >= 0.001:
            (good if here < there else bad).append(f"half the network costs {here:.1%} and not {there:.1%}")
        good += [f"without {what}" for what in needs(best.layout) if what not in needs(mine.layout)]
        bad += [f"with {what}" for what in needs(mine.layout) if what not in needs(best.layout)]
        points = {"For it": good, "Against it": bad}
        return " ".join([head, *(f"{name}: {'; '.join(texts)}." for name, texts in points.items() if texts)])

    def cost(self, tokens: float | None = None) -> str:
        """GPU-hours for so many tokens (by default 20 a parameter), without and with interruptions."""
        mine, of = self.mine, self.of
        count, goodput = tokens or TOKENS_PER_PARAMETER * mine.model.params, interruptions(mine).goodput
        hours = lambda e: e.gpu_hours(count)
        trained = f"{count:.3g} tokens" + ("" if tokens else f" ({TOKENS_PER_PARAMETER} for each parameter)")
        text = (
            f"{trained} take {hours(mine):,.0f} GPU-hours, {hours(mine) / mine.layout.ranks / 24:,.0f} days"
            f" on {mine.layout.ranks} GPUs, without evaluations. With interruptions and checkpoints"
        )
        if not goodput:
            return f"{text} they never end: interruptions come far sooner than it can start again."
        text += f" they take {hours(mine) / goodput:,.0f}"
        if of.ranked and of.best.layout != mine.layout:
            best = of.estimate(of.best)
            text += f", and in the fastest that fits {hours(best) / goodput:,.0f}"
        return f"{text}: {goodput:.1%} of the time trains."

    def alternatives(self, pure: Estimate | None) -> Table:
        """This layout, the fastest two of other sizes, and pure FSDP."""
        rows = {"this one": self.mine}
        fastest = zip(("the fastest", "the second"), map(self.of.estimate, self.of.by_axes[:2]))
        for name, other in [*fastest, *([("pure FSDP", pure)] if pure else [])]:
            if all(other.layout.axes != taken.layout.axes for taken in rows.values()):
                rows[name] = other
        listed = []
        for name, e in rows.items():
            free, lost = (
                human(e.free) if e.free >= 0 else "does not fit",
                f"{lost_with_half_the_network(e):.1%}",
            )
            took, needed = f"{e.step_seconds:.2f} s", ", ".join(needs(e.layout)) or "nothing"
            listed.append([name, str(e.layout.axes), took, free, lost, needed])
        return Table(["", "sizes", "step", "free on a GPU", "half the network costs", "needs"], listed)

    def changes(self) -> Table:
        """A table: for half and twice each uncertain quantity the fastest layout, and how far this one is
        behind it.
        """
        rows = []
        for what in CHANGES:
            for factor in (0.5, 2):
                then = self.of.changed(what, factor)
                if then is None:
                    continue
                try:
                    here = estimate(then.job, self.mine.layout)
                except ValueError as e:
                    rows.append([what, f"× {factor:g}", "", f"cannot be: {e}"])
                    continue
                best = then.best if then.ranked else None
                outcome = "fits" if here.fits else "tight" if here.tight else "does not fit"
                if best and here.fits:
                    outcome = f"{max(0.0, here.step_seconds / best.seconds - 1):.1%} behind"
                rows.append([what, f"× {factor:g}", str(best.layout) if best else "none fits", outcome])
        return Table(["change", "by", "then the fastest is", "this one"], rows)

    def assumptions(self) -> list[str]:
        """The assumptions behind the figures."""
        mine = self.mine
        job, holds, device = mine.job, mine.job.framework.holds, mine.job.cluster.device
        per_parameter = holds.weight_bytes + holds.gradient_bytes + holds.state_bytes
        lines = [
            f"Framework {job.framework.name}: {per_parameter:g} bytes of weights, gradients and optimizer a"
            " parameter before ZeRO.",
            f"{device.name} reaches {device.achievable / device.flops:.0%} of its printed FLOP/s in large"
            f" products{', which is assumed and not published' if device.assumed else ''}.",
            f"{job.global_batch} sequences of {job.seq_len:,} tokens in every step, none of them padding.",
            f"An interruption in {job.cluster.gpu_hours_between_interruptions:,.0f} GPU-hours,"
            f" {in_words(RESTART)} to start again, and {human(job.cluster.storage_bandwidth)}/s a GPU to"
            " write a checkpoint.",
            f"{mine.interval()}. Layouts less than {mine.sure.apart:.0%} apart are a tie: measure the"
            " first three before you buy.",
        ]
        return lines + [f"{warning[0].upper()}{warning[1:]}." for warning in mine.warnings()]
