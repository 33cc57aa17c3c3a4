"""A backward in two parts: I finds the input's gradient, which another stage awaits;

W the weights', which nobody does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import nn

_jobs: list[Callable[[], None]] | None = None  # where W's work is put while an I runs


@contextmanager
def late_weights(jobs: list[Callable[[], None]] | None):
    """While it lasts, what is W's goes into `jobs`, to be called later. With None it is done at once."""
    global _jobs
    before, _jobs = _jobs, jobs
    try:
        yield
    finally:
        _jobs = before


def do_or_put_off(job: Callable[[], None]) -> None:
    """Run W's work now, or leave it to the `late_weights` under way."""
    job() if _jobs is None else _jobs.append(job)


class LateLinear(torch.autograd.Function):
    """x · Wᵀ, whose backward finds dx = dy · W at once, and dW = dyᵀ · x now or later."""

    @staticmethod
    def forward(ctx, x, weight):
        """x (…, i) and weight (o, i) -> (…, o)."""
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        """dy (…, o) -> dx (…, i). None for the weight: `find` adds dW to its gradient itself."""
        (x,), weight = ctx.saved_tensors, ctx.weight

        def find():
            gradient = dy.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

        if weight.requires_grad:
            do_or_put_off(find)
        return dy @ weight, None


def split_backward(module: nn.Module) -> nn.Module:
    """Let every nn.Linear of `module` find its weight's gradient apart, so that B can run as I and W. Returns
    it.

    What is small (norms, embeddings) stays with I.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.forward = lambda x, part=part: LateLinear.apply(x, part.weight)
    return module
