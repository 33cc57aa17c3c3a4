"""What a rank is seen to do with its stage and its messages while an attempt runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ....runtime import current


@dataclass
class Seen:
    """What one rank was seen to do with its stage and its messages."""

    forwards: int = 0
    backwards: int = 0  # through the stage's output
    asked: bool = True  # whether the stage's input required a gradient
    sent: list[tuple[str, int]] = field(default_factory=list)  # (what, to whom)

    def tells(self, *what: str, to: int) -> bool:
        return any((name, to) in self.sent for name in what)


_seen = Seen()  # of this rank's last attempt: kept here, it can be asked for after a crash


def told() -> Seen:
    """On a rank: what its last attempt did."""
    return _seen


def watch(stage) -> Seen:
    """See what goes through the stage, and which of its tensors are sent."""
    global _seen
    seen = _seen = Seen()
    known: dict[str, torch.Tensor] = {}

    def backward(dy):
        seen.backwards += 1
        known["dy"] = dy.detach().clone()

    def forward(_, args, y):
        seen.forwards += 1
        seen.asked = args[0].requires_grad or not args[0].is_floating_point()
        known.update(x=args[0], y=y.detach().clone())
        if y.requires_grad:
            y.register_hook(backward)

    def message(op, peer, tensor):
        if op == "send":
            x = known.get("x")
            named = {"x.grad": x.grad if x is not None and x.is_leaf else None, **known}
            alike = (
                name
                for name, t in named.items()
                if t is not None and t.shape == tensor.shape and t.equal(tensor)
            )
            seen.sent.append((next(alike, "another tensor"), peer))

    stage.register_forward_hook(forward)
    current.rank.recorder.watch = message
    return seen
