"""Pauses in place of computation. Many ranks cannot compute at once on few cores, but they can all sleep at
once, as if each had a device of its own. Their compute time is emulated; their messages are real.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from .backward import do_or_put_off
from .model import VOCABULARY


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, forward, input, weight):
        ctx.seconds = input, weight
        time.sleep(forward)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        input, weight = ctx.seconds
        time.sleep(input)
        do_or_put_off(lambda: time.sleep(weight))
        return dy, None, None, None


def pace(module: nn.Module, forward: float, backward: float) -> nn.Module:
    """Make forward and backward of `module` take `forward` and `backward` seconds longer, without using a
    core. Returns `module`.

    The pause is at the beginning of forward and of backward, so `module` sends after its pause, as it would
    after computing.
    """
    module.register_forward_pre_hook(lambda _, args: (_Pause.apply(args[0], forward, 0, 0), *args[1:]))
    module.register_forward_hook(lambda _, args, y: _Pause.apply(y, 0, backward, 0))
    return module


class StandIn(nn.Module):
    """A pipeline stage that only takes time: `forward` seconds for F, the forward; `input` for I, the
    gradient of the input; `weight` for W, the gradients of the weights. The whole backward takes I + W.
    """

    hidden, token_parts = VOCABULARY, 1  # with this width the last stage's output has the shape of scores

    def __init__(self, forward: float, input: float, weight: float):
        super().__init__()
        self.seconds = forward, input, weight
        self.scale = nn.Parameter(torch.ones(self.hidden))

    def forward(self, x):
        """(b, s, 256), or on the first stage tokens (b, s) -> (b, s, 256), after the seconds for F."""
        if not x.is_floating_point():
            x = (x / VOCABULARY).unsqueeze(-1).repeat(1, 1, self.hidden)
        return _Pause.apply(x * self.scale, *self.seconds)
