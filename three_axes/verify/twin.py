"""The twin: the whole model on one device, with which the ranks are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .. import pytorch_private
from .causes import apart
from .record import Step, StepRecorder, Tensors, is_real

TYPES = torch.float32, torch.bfloat16, torch.float16
OTHER_SEED = 271828  # of the twin's second run, so that random numbers in the model are noticed
ROWS = 8  # at most so many parts of the batch are tried separately


@dataclass
class Twin:
    """The whole model on one device.

    steps: its recorded steps. again: the same steps in a second run, in float64, from weights rounded to the
    ranks' type if that is coarser. If an operation has no float64, the second run has the type of the first,
    and weights moved by one unit in the last place. The difference of the two runs is the spread. own:
    the weights that `build` gave the model. aliases: name -> other names of the same tensor. rows: returns
    the gradients of each part of the batch, in order, and the number of rows in a part.
    """

    steps: Sequence[Step]
    again: Sequence[Step]
    own: Tensors
    rows: Callable[[], tuple[Sequence[Tensors], int]]
    aliases: Mapping[str, set[str]]


class Twins:
    """Runs the whole model's steps on one device, from given weights; from the same weights only once."""

    def __init__(self, build, step, batch, steps: int):
        self._build, self._step, self._batch, self._steps = build, step, batch, steps
        self._known: list[tuple[Tensors, float, Twin]] = []
        self._zeroes = True
        recorder = self._build_twin()
        self._own = {name: p.detach().to("cpu", copy=True) for name, p in recorder.parameters().items()}
        self.shapes = {name: p.shape for name, p in self._own.items()}
        same: dict[int, set[str]] = {}
        for name, p in recorder.parameters().items():
            same.setdefault(id(p), set()).add(name)
        self._aliases = {name: names - {name} for names in same.values() if len(names) > 1 for name in names}

    def step_zeroes(self) -> bool:
        """Whether the reader's step sets gradients to zero before its backward: a number that is put there
        beforehand disappears. Then `verify` leaves that to the step, on ranks and in the twin.
        """
        recorder = self._build_twin()
        for p in recorder.parameters().values():
            p.grad = torch.full_like(p, math.nan) if p.requires_grad and is_real(p) else None
        try:
            with torch.random.fork_rng():
                self._step(recorder.model, self._batch, None)
        except Exception:  # it will fail again where the failure is reported
            return False
        gradients = [p.grad for p in recorder.parameters().values() if p.grad is not None]
        self._zeroes = any(bool(g.isnan().any()) for g in gradients)
        return not self._zeroes

    def of(self, weights: Tensors, eps: float) -> Twin:
        """The twin that starts from these weights. eps: of the coarsest type with which the ranks computed.
        Raises ValueError if its loss is not finite, or not the same in two runs.
        """
        for known, coarsest, twin in self._known:
            if eps == coarsest and all(torch.equal(known[name], weights[name]) for name in weights):
                return twin
        steps = self._run(self._build_twin(), weights, self._batch, self._steps)
        rounds = {torch.finfo(t).eps: t for t in TYPES}.get(eps) if eps > steps[0].eps else None
        try:
            again = self._in_float64(weights, rounds)
        except RuntimeError:  # an operation without a float64 kernel
            nudged = {name: _nudged(w) for name, w in weights.items()}
            again = self._run(self._build_twin(), nudged, self._batch, self._steps, others=True)
        exact = rounds is None and steps[0].eps == torch.finfo(torch.float64).eps
        self._check_losses(steps[0], again[0], 1e-9 if exact else 0.05)
        twin = Twin(steps, again, self._own, lambda: self._rows(weights), self._aliases)
        self._known.append((weights, eps, twin))
        return twin

    def _build_twin(self) -> StepRecorder:
        try:
            built = self._build(None)
        except Exception as e:
            raise ValueError(
                f"build(None) failed: {type(e).__name__}: {e}. The twin is the whole model on one device, and"
                " must fit there. Take fewer layers; what is wrong in two is wrong in eighty"
            ) from e
        model = built[0] if isinstance(built, tuple) else built
        if not isinstance(model, nn.Module):
            given = type(model).__name__
            raise ValueError(f"build(None) returned a {given}; return a module, or (module, optimizer)")
        return StepRecorder(built, zeroes=self._zeroes)

    def _run(
        self, recorder: StepRecorder, weights: Tensors, batch, steps: int, others: bool = False
    ) -> list[Step]:
        """The twin's steps from these weights. others: whether to draw random numbers of another seed."""
        recorder.load(weights)
        step = lambda model: self._step(model, batch, None)
        with torch.random.fork_rng():
            if others:
                torch.manual_seed(OTHER_SEED)
            return [recorder.step(step, outputs=number == 0) for number in range(steps)]

    def _in_float64(self, weights: Tensors, rounds: torch.dtype | None) -> list[Step]:
        """The twin's steps in float64. rounds: a type to which the weights are rounded first."""
        double = lambda leaf: leaf.double() if is_real(leaf) else leaf
        with default_type(torch.float64):
            recorder = self._build_twin()
            if any(p.dtype != torch.float64 for p in recorder.parameters().values()):
                recorder.model.double()
            finer = {name: w.to(rounds or w.dtype).double() for name, w in weights.items()}
            batch = pytorch_private.tree_map(double, self._batch)
            return self._run(recorder, finer, batch, self._steps, others=True)

    def _check_losses(self, one: Step, other: Step, bound: float) -> None:
        """Raise ValueError if the losses of two runs differ by more than this relative bound."""
        if one.loss is None or other.loss is None or abs(one.loss - other.loss) <= bound * abs(other.loss):
            return
        if not math.isfinite(one.loss):
            raise ValueError(f"the whole model's own loss is {one.loss}: mend that first")
        off = lambda name: apart(_flat(one.outputs[name]), _flat(other.outputs[name]))
        first = next((f": first in {name}" for name in one.outputs if not off(name) <= bound), "")
        raise ValueError(
            f"the whole model's loss was {one.loss:.6g} and then {other.loss:.6g}, from the same weights and"
            f" batch{first}. Does it draw random numbers (F.dropout, noise)? Switch that off in build"
        )

    def _rows(self, weights: Tensors) -> tuple[list[Tensors], int]:
        """`Twin.rows`: of at most `ROWS` parts, of equal sizes if a number of parts divides the whole. Each
        part is repeated up to the size of the batch, because a step may cut its batch itself. No part if the
        batch has no rows, or if the step fails.
        """
        leaves, structure = pytorch_private.tree_flatten(self._batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        n = len(tensors[0]) if tensors and tensors[0].dim() else 0
        if n < 2 or any(leaf.dim() == 0 or len(leaf) != n for leaf in tensors):
            return [], 1
        each = _size_of_part(n)
        gradients = []
        for at in range(0, n, each):
            repeated = lambda leaf, at=at: torch.cat([leaf[at : at + each]] * -(-n // each))[:n]
            part = [repeated(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            batch = pytorch_private.tree_unflatten(part, structure)
            try:
                gradients.append(self._run(self._build_twin(), weights, batch, 1)[0].gradients)
            except Exception:  # a reader's step may refuse such a batch
                return [], 1
        return gradients, each


def _size_of_part(n: int) -> int:
    """The size of a part of n, for at most `ROWS` parts; parts are equal if a number from 2 to ROWS divides
    n.
    """
    return next((n // k for k in range(min(ROWS, n), 1, -1) if n % k == 0), -(-n // ROWS))


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _nudged(weight: torch.Tensor) -> torch.Tensor:
    """The weight, moved by one unit in the last place."""
    return weight.nextafter(torch.full_like(weight, math.inf)) if weight.is_floating_point() else weight


@contextmanager
def default_type(dtype: torch.dtype | None):
    """A block in which this is PyTorch's default type; None leaves it as it is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
