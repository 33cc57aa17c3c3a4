"""What one process records of a training step, to compare a rank with the twin, the whole model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .. import pytorch_private
from ..count.interpose import Listener

# Parts of a parameter's name that DDP, FSDP and torch.compile add.
WRAPPERS = re.compile(
    r"(^|(?<=\.))(module|_orig_mod|_forward_module|_original_module"
    r"|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)"
)
DROPOUTS = nn.modules.dropout._DropoutNd

Tensors = dict[str, torch.Tensor]


@dataclass
class Step:
    """A step of one rank, or of the twin. Tensors are what the rank itself holds, on the CPU, under the whole
    model's names.

    loss: what `step` returned; None if only another rank knows it. norm: the gradients' norm that clipping
    used. gradients: before clipping. before, after: the weights, before and after the optimizer's step.
    outputs: module -> the output of each of its calls. places: for DTensors, the indices of a shard's
    elements in the whole. eps: of the coarsest type of weights, outputs and loss. sent: parameter -> (axis,
    collective) for each collective that received its gradient. inputs: the first tensor of each call of the
    model from outside.
    """

    loss: float | None = None
    norm: float | None = None
    gradients: Tensors = field(default_factory=dict)
    before: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    places: Tensors = field(default_factory=dict)
    eps: float = 0.0
    sent: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    inputs: list[torch.Tensor] = field(default_factory=list)


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers such as DDP, FSDP and torch.compile."""
    return WRAPPERS.sub("", name).rstrip(".")


class SentListener(Listener):
    """A listener that keeps the tensors that collectives received in a step. Because it keeps them, no other
    tensor takes their memory.
    """

    def __init__(self):
        self._calls: list[tuple[str, str, torch.Tensor]] = []

    def begins(self, call) -> None:
        """Keep the call's first tensor, if it has one."""
        if call.first is not None:
            self._calls.append((call.axis, call.op, call.first))

    def of(self, gradients: Tensors) -> dict[str, list[tuple[str, str]]]:
        """Name -> the collectives that received the gradient itself, as (axis, collective). A collective that
        received a copy, such as a bucket, is not found.
        """
        by_memory: dict[int, list[tuple[str, str]]] = {}
        for axis, op, tensor in self._calls:
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append((axis, op))
        memory = {name: g.untyped_storage().data_ptr() for name, g in gradients.items()}
        return {name: by_memory[at] for name, at in memory.items() if at in by_memory}


class StepRecorder:
    """Runs and records the steps of a model and its optimizer. built: the result of `build`. names: a local
    name -> the whole model's name. zeroes: whether to set gradients to zero after each step; False if the
    reader's step does so itself.
    """

    def __init__(self, built, names: Callable[[str], str] = lambda name: name, zeroes: bool = True):
        self.zeroes = zeroes
        self.model, self.optimizer = built if isinstance(built, tuple) else (built, None)
        self._named = lambda name: names(plain_name(name))
        self._after: Tensors = {}

    def parameters(self) -> dict[str, nn.Parameter]:
        """The whole model's name -> parameter; a tied parameter is listed under each of its names."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {self._named(name): p for name, p in named}

    def places(self) -> Tensors:
        """For DTensors, the indices of a shard's elements in the whole."""
        return {name: _place(p) for name, p in self.parameters().items() if isinstance(p, DTensor)}

    def step(
        self, step: Callable[[nn.Module], object], *, outputs: bool = False, sent: SentListener | None = None
    ) -> Step:
        """Run and record a step: step(model) computes gradients, and may clip them; then the optimizer steps,
        if there is one. Dropouts are switched off.

        outputs: record the modules' outputs and the model's inputs. sent: a listener, added before the step.
        """
        seen = Step(before=self._after or self._weights())
        with self._without_dropout(), self._clipping(seen):
            with self._outputs(seen.outputs, outputs), self._inputs(seen, outputs):
                loss = step(self.model)
        seen.loss = None if loss is None else float(_whole(torch.as_tensor(loss).detach()))
        typed = [*seen.before.values(), *(t for ts in seen.outputs.values() for t in ts), loss]
        seen.eps = max(torch.finfo(t.dtype).eps for t in typed if is_real(t))
        seen.gradients = seen.gradients or self._gradients()
        if sent is not None:
            named = self.parameters().items()
            seen.sent = sent.of({name: _local(p.grad) for name, p in named if p.grad is not None})
        if self.optimizer is not None:
            self.optimizer.step()
        if self.zeroes:
            (self.optimizer or self.model).zero_grad()
        seen.after = self._after = self._weights()
        floats = ((name, b) for name, b in self.model.named_buffers() if b.is_floating_point())
        seen.buffers = {self._named(name): _held(b) for name, b in floats}
        return seen

    def load(self, weights: Tensors) -> None:
        """Copy whole weights into a model that is not split."""
        with torch.no_grad():
            self._after = {}
            for name, p in self.parameters().items():
                p.copy_(weights[name].view_as(p))

    def _weights(self) -> Tensors:
        return {name: _held(p) for name, p in self.parameters().items()}

    def _gradients(self) -> Tensors:
        named = self.parameters().items()
        return {name: _held(p.grad) for name, p in named if p.grad is not None}

    @contextmanager
    def _clipping(self, seen: Step) -> Iterator[None]:
        """In this block, record the gradients before they are first clipped, and their norm."""

        def clips(total_norm) -> None:
            if not seen.gradients:
                seen.norm, seen.gradients = float(_whole(total_norm)), self._gradients()

        with pytorch_private.before_clipping(clips):
            yield

    @contextmanager
    def _inputs(self, seen: Step, on: bool) -> Iterator[None]:
        """In this block, record the inputs of the model."""
        if not on:
            yield
            return
        depth = [0]

        def enters(_, args, kwargs) -> None:
            depth[0] += 1
            tensors = [value for value in (*args, *kwargs.values()) if type(value) is torch.Tensor]
            if depth[0] == 1 and tensors and pytorch_private.backward_under_way() == -1:
                seen.inputs.append(_held(tensors[0]))

        def leaves(*_) -> None:
            depth[0] -= 1

        modules = list(self.model.modules())
        hooks = [module.register_forward_pre_hook(enters, with_kwargs=True) for module in modules]
        hooks += [module.register_forward_hook(leaves, always_call=True) for module in modules]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    @contextmanager
    def _outputs(self, outputs: dict, on: bool) -> Iterator[None]:
        """In this block, record the first real tensor of each module's output; not in a recomputation."""

        def keeps(name: str) -> Callable:
            def keep(module, args, result) -> None:
                tensor = next(filter(is_real, pytorch_private.tree_flatten(result)[0]), None)
                if tensor is not None and pytorch_private.backward_under_way() == -1:
                    outputs.setdefault(name, []).append(_held(tensor))

            return keep

        modules = [(name, m) for name, m in self.model.named_modules() if on and plain_name(name)]
        hooks = [module.register_forward_hook(keeps(self._named(name))) for name, module in modules]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        before = [(module, module.p) for module in self.model.modules() if isinstance(module, DROPOUTS)]
        try:
            for module, _ in before:
                module.p = 0.0
            yield
        finally:
            for module, p in before:
                module.p = p


def digest(tensor: torch.Tensor) -> bytes:
    """A digest: equal for tensors that are equal bit for bit."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.data, digest_size=16).digest()


def is_real(value) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, on the CPU, of this rank's part of a tensor."""
    return _local(tensor).to("cpu", copy=True)


def _whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def _place(p: DTensor) -> torch.Tensor:
    """The indices, in the whole tensor, of the elements that this rank holds."""
    numbers = torch.arange(p.numel(), device=p.device).view(p.shape)
    return distribute_tensor(numbers, p.device_mesh, p.placements, src_data_rank=None).to_local().cpu()
