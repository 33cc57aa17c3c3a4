"""Compares the recorded steps of the ranks (`record.Step`) with those of their twin, which is the whole model
on one device. Stops at the first step that differs, and names causes. The twin is run again only to find how
often each row of the batch counts (`Twin.rows`). No other process is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch

from .causes import (
    UNEXPLAINED,
    Cause,
    Parts,
    along,
    apart,
    differing,
    of_norms,
    of_output,
    of_rows,
    size_text,
    times,
)
from .inputs import of_inputs
from .record import Step, Tensors
from .report import EXACT, Found, Verdict
from .shards import Mesh, Places
from .twin import Twin

DOUBLE = torch.finfo(torch.float64).eps
# A spread is the relative difference between the twin's two runs (`Twin.again`).
ROUNDINGS = 4  # the allowed difference, in eps of the type: for types other than float64, and for updates
SPREADS = 16  # the allowed difference, in spreads
FAR = 16  # a spread of more than so many medians of all spreads is ignored, since a few are large by chance
# A gradient below this share of the largest may be only rounding. Also the least tolerance for outputs and
# updates, and the least absolute loss by which a difference is divided.
SMALL = 1e-6
ROW_CAUSES = "rows missing", "rows weighted"
# Elements with a gradient below this share of their tensor's largest, or below 10 times the allowed
# difference, are not compared after the update: Adam's step is as large for any gradient, so rounding in a
# tiny one changes the whole step.
VISIBLE = 1e-4


Wrong = dict[str, tuple[float, Cause]]  # name -> how far off, and why


class Comparison:
    """A comparison of all ranks' steps with their twin's. places: for each rank and parameter, the place of
    the rank's part in the whole tensor.
    """

    def __init__(
        self, layout: str, mesh: Mesh, twin: Twin, ranks: Mapping[int, Sequence[Step]], places: Places
    ):
        self.mesh, self.twin, self.ranks, self.places = mesh, twin, ranks, places
        self._eps = max(steps[0].eps for steps in (twin.steps, *ranks.values()))
        self._usual = [
            _usual([apart(other.gradients[name], g) for name, g in twins.gradients.items()] or [0.0])
            for twins, other in zip(twin.steps, twin.again)
        ]
        self._shares: tuple[str, ...] = ()  # the axes over which losses are summed, not averaged
        self.verdict = Verdict(layout, exact=self._eps == DOUBLE, least=self._allowed(0))

    def run(self) -> Verdict:
        """Compare step by step, and return the verdict. The first step that differs is the last one; if
        weights differ before it, no step is compared. In a step: the loss and the gradients, then clipping,
        the update and buffers, each only if all before it are equal.
        """
        if not self.verdict.add(_by_cause(0, "weights", self._weights()), "weights"):
            any(self._step(number) for number in range(len(self.twin.steps)))
        return self.verdict

    def _allowed(self, number: int, spread: float = 0.0) -> float:
        """The relative difference that is allowed in step `number` (from 0) for a quantity of this spread. At
        least what the usual spread of that step's gradients allows.
        """
        rounding = EXACT if self._eps == DOUBLE else ROUNDINGS * self._eps
        return max(rounding, SPREADS * spread, SPREADS * self._usual[number])

    def wants_outputs(self) -> bool:
        """Whether the first step's loss differs: the modules' outputs are then needed for the cause."""
        self._at(0)
        return bool(self._loss())

    def _at(self, number: int) -> None:
        self._number, self._twin, self._again = number, self.twin.steps[number], self.twin.again[number]
        self._seen = {rank: steps[number] for rank, steps in self.ranks.items()}

    def _step(self, number: int) -> bool:
        """Compare a step with the twin's. Returns True if a part of it differs by more than is allowed."""
        self._at(number)
        add = lambda what, wrong: self.verdict.add(_by_cause(number + 1, what, wrong), what)
        loss, gradients = self._loss(), self._gradients()
        if loss:
            loss = self._loss_by_rows(loss, gradients)
        add("loss", loss)
        if not loss and self._shares:
            self.verdict.cells["loss"] = f"equal, a sum over {along(self._shares)}"
        explained = {name: wrong for name, wrong in gradients.items() if wrong[1] != UNEXPLAINED}
        # After a wrong loss, gradients without a cause of their own are not reported.
        add("gradients", explained if loss else gradients)
        if loss and gradients and not explained:
            self.verdict.cells["gradients"] = "-"
        if loss or gradients:
            return True
        norms = {rank: seen.norm for rank, seen in self._seen.items() if seen.norm is not None}
        if norms and self._twin.norm and add("clip", self._clip(norms, self._twin.norm)):
            return True
        stepped = any(not torch.equal(w, self._twin.before[name]) for name, w in self._twin.after.items())
        return stepped and add("update", self._update()) or add("buffers", self._buffers())

    def _parts(self, whole: torch.Tensor, name: str, of: Callable[[Step], Tensors], allowed: float) -> Parts:
        """The ranks' parts of a tensor, found under this name or under another name of the same tensor."""
        usual = float(whole.double().norm()) / math.sqrt(max(1, whole.numel()))
        parts = Parts(self.mesh, allowed, usual)
        for rank, seen in self._seen.items():
            for alias in (name, *self.twin.aliases.get(name, ())):
                if alias in (held := of(seen)):
                    place = self.places.of[alias][rank]
                    parts.got[rank], parts.wanted[rank] = held[alias].flatten(), whole.flatten()[place]
                    parts.where[rank] = place
                    break
        return parts

    def _weights(self) -> Wrong:
        """Copies of one tensor that differ before the first step. If none do: weights that differ from those
        of `build(None)`, if at least one equals them.
        """
        self._seen, whole = {rank: steps[0] for rank, steps in self.ranks.items()}, self.twin.steps[0].before
        wrong = {}
        for name in whole:
            parts = self._parts(whole[name], name, lambda seen: seen.before, 0.0)
            for classes in parts.copies().values():
                if len(set(classes.values())) > 1:
                    wrong[name] = (
                        parts.off(),
                        differing("copies differ", "its copies differ", classes, self.mesh),
                    )
        own = {name: t.to(whole[name].dtype) for name, t in self.twin.own.items() if t.unique().numel() > 1}
        other = [name for name in own if not torch.equal(own[name], whole[name])]
        if wrong or len(other) in (0, len(own)):  # if all differ, only the seed does: no mistake
            return wrong
        holds = {name: next((n for n in own if torch.equal(own[n], whole[name])), "") for name in other}
        cause = Cause("other weights", text="they differ from build(None)'s, while others equal them")
        if all(holds.values()):
            phrase = "; ".join(f"{name} holds the twin's {held}" for name, held in list(holds.items())[:2])
            cause = Cause("swapped", text=f"other tensors of the twin: {phrase}{'; …' * (len(holds) > 2)}")
        return {name: (apart(whole[name], own[name]), cause) for name in other}

    def _loss(self) -> Wrong:
        """A module's name, or '' -> (difference, cause), if neither the mean of the ranks' losses nor their
        sum over some axes equals the twin's; otherwise {}, also if a loss is not known.
        """
        losses = [seen.loss for seen in self._seen.values() if seen.loss is not None]
        self._shares = ()
        if (twins := self._twin.loss) is None or not losses:
            return {}
        off = lambda value: abs(value - twins) / max(abs(twins), SMALL)
        allowed, mean = self._allowed(self._number, off(self._again.loss)), sum(losses) / len(losses)
        if off(mean) <= allowed or all(off(loss) <= allowed for loss in losses):
            return {}
        self._shares = self._summed_over(off, allowed)
        if self._shares:
            return {}
        far = math.inf if math.isnan(mean) else off(mean)
        if self._number == 0 and (cause := of_inputs(self._seen, self._twin)):
            return {"": (far, cause)}
        if first := self._first_output():
            return {first[0]: (far, first[1])}
        ratio = mean / twins
        text = f"{times(ratio)}{size_text(ratio, self.mesh)[1]}"
        if self._number == 0:
            text += ". No module's output that could be compared differs"
        return {"": (far, Cause("loss", text=text))}

    def _loss_by_rows(self, loss: Wrong, gradients: Wrong) -> Wrong:
        """`loss`. If it has no cause of its own, it gets that of a gradient, in how often rows count."""
        ((far, cause),) = loss.values()
        of_rows = (of_gradient for _, of_gradient in gradients.values() if of_gradient.kind in ROW_CAUSES)
        return {"": (far, next(of_rows, cause))} if cause.kind == "loss" else loss

    def _summed_over(self, off: Callable[[float], float], allowed: float) -> tuple[str, ...]:
        """The axes over which the ranks' unequal losses sum to the twin's loss; () if there are none."""
        losses = {rank: seen.loss for rank, seen in self._seen.items() if seen.loss is not None}
        for axes in self.mesh.sets_of_axes():
            groups = self.mesh.groups(axes, sorted(losses))
            differ = any(len({losses[rank] for rank in group}) > 1 for group in groups)
            if differ and all(off(sum(losses[rank] for rank in group)) <= allowed for group in groups):
                return axes
        return ()

    def _first_output(self) -> tuple[str, Cause] | None:
        """The first module, in the order of the twin's outputs, whose output differs. When a module is right,
        two kinds of wrong modules before it are dropped: those whose output is only not summed, and those
        inside it, because it may complete their output (Megatron's outer module adds the bias).
        """
        wrong: list[tuple[str, Cause]] = []
        for name, whole in self._twin.outputs.items():
            got = {rank: seen.outputs[name] for rank, seen in self._seen.items() if name in seen.outputs}
            if not got:
                continue
            if cause := of_output(got, whole, self.mesh, max(SMALL, self._allowed(self._number))):
                wrong.append((name, cause))
            else:
                stays = lambda output: (
                    output[1].kind != "output not summed" and not output[0].startswith(f"{name}.")
                )
                wrong = list(filter(stays, wrong))
        return next(iter(wrong), None)

    def _least(self) -> float:
        """The norm below which a gradient may be only rounding. (For the keys' bias, 0 is right.)"""
        lengths = (float(g.double().norm()) for g in self._twin.gradients.values())
        return SMALL * max(lengths, default=0.0)

    def _gradients(self) -> Wrong:
        """The gradients that differ from the twin's, before clipping, each with its cause."""
        least = self._least()
        wrong: Wrong = {}
        for name, whole in self._twin.gradients.items():
            allowed = self._allowed(self._number, apart(self._again.gradients[name], whole, least))
            parts = self._parts(whole, name, lambda seen: seen.gradients, max(allowed, 1e-7))
            missing = {rank: rank not in parts.got for rank in self.places.of[name]}
            if any(missing.values()) and whole.norm() > least:
                phrase, on_none = "no gradient on some ranks: differs", all(missing.values())
                cause = differing("no gradient", phrase, missing, self.mesh)
                wrong[name] = 1.0, replace(cause, text="no rank has a gradient") if on_none else cause
            elif parts.off(least) > allowed:
                wrong[name] = parts.off(least), self._beside_calls(name, parts.cause())
        open_ = [name for name, (_, cause) in wrong.items() if cause.kind in ("unexplained", "some ranks")]
        of_all = self._of_batch(open_) if open_ and self._number == 0 else None
        for name in open_:
            wrong[name] = wrong[name][0], of_all or self._of_strangers(name) or wrong[name][1]
        return wrong

    def _of_batch(self, names: list[str]) -> Cause | None:
        """A cause of these gradients in the ranks' inputs, or in how often rows of the batch count."""
        if cause := of_inputs(self._seen, self._twin):
            return cause
        rank = next(
            rank for rank, seen in self._seen.items() if any(name in seen.gradients for name in names)
        )
        mine = [name for name in names if name in self._seen[rank].gradients]
        part = lambda whole: torch.cat([whole[name].flatten()[self.places.of[name][rank]] for name in mine])
        got = torch.cat([self._seen[rank].gradients[name].flatten() for name in mine])
        rows, each = self.twin.rows()
        return of_rows(got, part(self._twin.gradients), [*map(part, rows)], self._allowed(0), each)

    def _beside_calls(self, name: str, cause: Cause) -> Cause:
        """The cause. If a sum or mean is missing in the first step, its text also gets the collectives over
        the cause's axes that received the gradient itself. (A copy of it, as in a bucket, is not found.)
        """
        if self._number or cause.kind not in ("not summed", "not averaged"):
            return cause
        calls = {call for seen in self._seen.values() for call in seen.sent.get(name, [])}
        took = sorted(op for axis, op in calls if axis in cause.axes)
        over = along(cause.axes)
        phrase = f"No collective over {over} received this gradient"
        if took:
            phrase = f"{' and '.join(took)} over {over} received it too late, or nobody waited"
        return replace(cause, text=f"{cause.text}. {phrase}")

    def _of_strangers(self, name: str) -> Cause | None:
        """A cause if a gradient equals that of another parameter, or of another part of this one, on another
        rank: it was reduced over ranks that hold something else.
        """
        family = {name, *self.twin.aliases.get(name, ())}
        for rank, mine in self._seen.items():
            for on, theirs in self._seen.items():
                for other, gradient in (
                    theirs.gradients.items() if on != rank and name in mine.gradients else ()
                ):
                    places = self.places.of[name][rank], self.places.of[other][on]
                    copies = other in family and torch.equal(*places)
                    if not copies and torch.equal(gradient.flatten(), mine.gradients[name].flatten()):
                        axes = self.mesh.between(rank, on)
                        text = f"reduced over {along(axes)}, whose ranks hold other parameters"
                        return Cause("strangers", axes, text)
        return None

    def _clip(self, norms: Mapping[int, float], twins: float) -> Wrong:
        off = max(abs(norm / twins - 1) for norm in norms.values())
        allowed = self._allowed(self._number, abs((self._again.norm or 0.0) / twins - 1))
        if off <= allowed:
            return {}
        squares = {name: float(g.double().square().sum()) for name, g in self._twin.gradients.items()}
        return {"": (off, of_norms(norms, twins, self.mesh, allowed, squares, self._in_parts()))}

    def _in_parts(self) -> dict[tuple[str, ...], set[str]]:
        """Axes -> the names of the gradients that ranks along these axes hold in parts."""
        names: dict[tuple[str, ...], set[str]] = {axes: set() for axes in self.mesh.sets_of_axes()}
        for axes, in_parts in names.items():
            for name in self._twin.gradients:
                places = self.places.of[name]
                groups = self.mesh.groups(axes, sorted(places))
                whole_group = all(len(group) == self.mesh.size(axes) for group in groups)
                if not whole_group or len({places[r].numpy().tobytes() for r in groups[0]}) > 1:
                    in_parts.add(name)
        return names

    def _update(self) -> Wrong:
        """The parameters whose change in the optimizer's step differs from the twin's."""
        wrong, least = {}, self._least()
        for name, gradient in self._twin.gradients.items():
            if gradient.double().norm() <= least:
                continue
            before = self._twin.before[name].double()
            seen = gradient.abs() > max(VISIBLE, 10 * self._allowed(self._number)) * gradient.abs().max()
            change = lambda step: (
                {name: step.after[name].double() - step.before[name].double()} if name in step.after else {}
            )
            whole, again = change(self._twin)[name], change(self._again)[name]
            eps = torch.finfo(self._twin.before[name].dtype).eps
            rounding = ROUNDINGS * eps * float(before.norm() / max(whole.norm(), 1e-300))
            allowed = max(SMALL, self._allowed(self._number, apart(again[seen], whole[seen])), rounding)
            parts = self._parts(whole, name, change, max(allowed, 1e-5))
            for rank, place in parts.where.items():
                keep = seen.flatten()[place]
                parts.got[rank], parts.wanted[rank] = parts.got[rank][keep], parts.wanted[rank][keep]
            off = parts.off(1e-9 * float(before.norm()))
            if off > allowed:
                wrong[name] = off, parts.cause_of_update()
        return wrong

    def _buffers(self) -> Wrong:
        wrong = {}
        for name, whole in self._twin.buffers.items():
            allowed = self._allowed(self._number, apart(self._again.buffers[name], whole))
            parts = Parts(self.mesh, max(allowed, 1e-7))
            for rank, seen in self._seen.items():
                if name in seen.buffers and seen.buffers[name].numel() == whole.numel():
                    parts.got[rank], parts.wanted[rank] = seen.buffers[name].flatten(), whole.flatten()
                    parts.where[rank] = torch.zeros(0)
            if parts.off() > allowed:
                wrong[name] = parts.off(), parts.cause()
        return wrong


def _by_cause(step: int, what: str, wrong: Wrong) -> list[Found]:
    """The differences, grouped by cause, each with the names that share the cause."""
    groups: dict[Cause, list[str]] = {}
    for name, (_, cause) in wrong.items():
        groups.setdefault(cause, []).append(name)
    return [
        Found(step, what, tuple(filter(None, names)), max(wrong[name][0] for name in names), cause)
        for cause, names in groups.items()
    ]


def _usual(spreads: list[float]) -> float:
    """The largest spread that is at most `FAR` medians."""
    return max(spread for spread in spreads if spread <= FAR * median(spreads))
