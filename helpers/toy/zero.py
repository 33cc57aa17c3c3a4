"""ZeRO by hand (Rajbhandari et al. 2020): data parallelism in which each rank keeps a shard of the states.

A *unit* is a module whose parameters are laid end to end, padded to a multiple of d, and cut into d shards.
Rank r owns shard r: only rank r keeps that part's optimizer state, and updates that part.

              kept whole               kept as a shard              moved, in elements, times (d-1)/d
    Zero1     weights, gradients       optimizer state              N gradients, N weights
    Zero2     weights                  gradients, optimizer state   the same
    Zero3     nothing                  all                          N gradients, 2·N weights

(Gradients are reduce-scattered, weights all-gathered; each of these moves N·(d-1)/d elements.)

In mixed precision (`model.bfloat16()`) weights and gradients have two bytes, and the shard stays float32: the
shard is the master copy that the optimizer updates.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from .names import reduce_scatter


class Unit:
    """The trainable parameters of one module, and this rank's shard of them."""

    def __init__(self, parameters: list[nn.Parameter], group=None):
        self.parameters, self.group, self.size = parameters, group, dist.get_world_size(group)
        self.n = sum(p.numel() for p in parameters)
        self.shard_size = -(-self.n // self.size)  # elements of a shard: n/d, rounded up
        whole = self._fill(parameters_to_vector(parameters).detach())
        precise = torch.promote_types(whole.dtype, torch.float32)
        self.shard = nn.Parameter(whole.chunk(self.size)[dist.get_rank(group)].to(precise, copy=True))

    def _fill(self, flat: torch.Tensor) -> torch.Tensor:
        """Pad with zeros to a multiple of the number of ranks."""
        return torch.cat([flat, flat.new_zeros(self.shard_size * self.size - self.n)])

    def reduce_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Add this rank's shard of the ranks' mean gradient to shard.grad. gradients: one for each parameter;
        they are sent in their own precision.
        """
        whole = self._fill(parameters_to_vector(gradients))
        mine = whole.new_empty(self.shard_size)
        reduce_scatter(mine, whole, group=self.group)
        mine = mine.to(self.shard.dtype) / self.size
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine

    def gather_weights(self) -> None:
        """Gather the shards of all ranks in the parameters' precision, and copy them into the parameters."""
        mine = self.shard.data.to(self.parameters[0].dtype)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        pieces = torch.cat(parts)[: self.n].split([p.numel() for p in self.parameters])
        for p, piece in zip(self.parameters, pieces):
            p.data.copy_(piece.view_as(p))


def trainable(model: nn.Sequential) -> list[list[nn.Parameter]]:
    """The trainable parameters of each part of the model. Raises ValueError if two parts share one."""
    parts = [[p for p in part.parameters() if p.requires_grad] for part in model]
    if len({id(p) for part in parts for p in part}) < sum(map(len, parts)):
        raise ValueError(
            "two parts of the model share a parameter; ZeRO cuts each part alone, so give it an untied model"
        )
    return parts


class _Zero:
    """What the three stages have in common. `model` is an nn.Sequential; each of its parts is a unit.

    Call `step()` after backward. Raises ValueError for a model whose parts share parameters.
    """

    def __init__(self, model: nn.Sequential, group=None):
        cut = [(part, Unit(held, group)) for part, held in zip(model, trainable(model)) if held]
        self.parts, self.units = zip(*cut)
        self.optimizer = torch.optim.AdamW([unit.shard for unit in self.units], lr=1e-3)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            unit.gather_weights()


class Zero1(_Zero):
    """Optimizer state in shards. Gradients are whole until the step.

    precise_sums: add up gradients in the shard's precision, in `main_grad` beside each parameter, as
    Megatron-LM does for half-precision weights (`accumulate_allreduce_grads_in_fp32`).
    """

    def __init__(self, model: nn.Sequential, group=None, precise_sums: bool = False):
        super().__init__(model, group)
        self.precise_sums = precise_sums
        for unit in self.units if precise_sums else ():
            for p in unit.parameters:
                p.main_grad = torch.zeros_like(p, dtype=unit.shard.dtype)
                p.register_post_accumulate_grad_hook(self._add_up)

    @staticmethod
    def _add_up(p: nn.Parameter) -> None:
        p.main_grad += p.grad
        p.grad = None

    def step(self) -> None:
        """Reduce the gradients into shards, free them, update the shards, and gather the weights."""
        for unit in self.units:
            unit.reduce_gradients([p.main_grad if self.precise_sums else p.grad for p in unit.parameters])
            for p in unit.parameters:
                p.grad = None
                if self.precise_sums:
                    p.main_grad.zero_()
        super().step()


class Zero2(_Zero):
    """Gradients in shards too: a unit's gradients are reduced as soon as backward has computed all of them,
    and the whole gradients are freed.
    """

    def __init__(self, model: nn.Sequential, group=None):
        super().__init__(model, group)
        for unit in self.units:
            self._watch(unit)

    def _watch(self, unit: Unit) -> None:
        missing = set(unit.parameters)

        def on_gradient(p: nn.Parameter) -> None:
            missing.discard(p)
            if not missing:
                unit.reduce_gradients([p.grad for p in unit.parameters])
                self._release(unit)
                missing.update(unit.parameters)

        for p in unit.parameters:
            p.register_post_accumulate_grad_hook(on_gradient)

    def _release(self, unit: Unit) -> None:
        for p in unit.parameters:
            p.grad = None


class Zero3(Zero2):
    """Weights in shards too: a unit's weights are gathered before its forward and again before its backward,
    and freed after each.

    PyTorch calls this fully sharded data parallelism, FSDP.
    """

    def __init__(self, model: nn.Sequential, group=None):
        super().__init__(model, group)
        for part, unit in zip(self.parts, self.units):
            part.register_forward_pre_hook(lambda _, args, unit=unit: self.fill(unit))
            part.register_forward_hook(lambda _, args, y, unit=unit: self._after_forward(unit, y))
            self.empty(unit)

    def _after_forward(self, unit: Unit, y: torch.Tensor) -> None:
        self.empty(unit)
        if y.requires_grad:
            y.register_hook(lambda dy: self.fill(unit))  # runs at the start of this unit's backward

    def fill(self, unit: Unit) -> None:
        """Allocate memory for a unit's weights and gather them."""
        for p in unit.parameters:
            p.untyped_storage().resize_(p.numel() * p.element_size())
        unit.gather_weights()

    def empty(self, unit: Unit) -> None:
        """Free the memory of the weights.

        Tensors that autograd saved share this memory: `fill` makes them valid again.
        """
        for p in unit.parameters:
            p.untyped_storage().resize_(0)

    def _release(self, unit: Unit) -> None:
        super()._release(unit)
        self.empty(unit)

    def step(self) -> None:
        """Update the shards. The next forward gathers the new weights."""
        self.optimizer.step()
        self.optimizer.zero_grad()
