"""Finds the tensors of a script that `verify` watches, among Python's living objects, and gives them names
that are the same on every rank.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from .record import plain_name
from .sketches import BUFFER, FLAT, OF, PARAMETER

BATCH_NORM = nn.modules.batchnorm._BatchNorm
# Reasons not to watch a tensor.
STATISTICS = "statistics of BatchNorm: each rank's own, unless it is SyncBatchNorm"
PASSING = "buffers that no checkpoint keeps"
CUT = "ones and zeros that FSDP cut"  # no values show where this rank's part lies


class Tensors:
    """The watched tensors of this process, by name.

    of: name -> (tensor, `PARAMETER` or `BUFFER`). left: name -> why it is not watched. parameters:
    name -> parameter, of the models in `roots` and of the optimizers. roots: (prefix of names, module), see
    `_roots`.
    """

    def __init__(self) -> None:
        self.of: dict[str, tuple[torch.Tensor, str]] = {}
        self.left: dict[str, str] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        living = _living()
        self.optimizers = [found for found in living if isinstance(found, torch.optim.Optimizer)]
        stepped = [
            p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]
        ]
        self.roots = _roots([found for found in living if isinstance(found, nn.Module)], stepped)
        for prefix, root in self.roots:
            self._module(prefix, root)
        known = {id(tensor) for tensor, _ in self.of.values()}
        rest = (p for p in {id(p): p for p in stepped}.values() if id(p) not in known)
        self.of |= {f"{FLAT}{i}": (p, PARAMETER) for i, p in enumerate(rest)}
        self.parameters = {name: tensor for name, (tensor, part) in self.of.items() if part == PARAMETER}

    def states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizers' states, with names like "exp_avg of norm.weight"."""
        for optimizer in self.optimizers:
            for name, parameter in self.parameters.items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"{key}{OF}{name}", value

    def _module(self, prefix: str, root: nn.Module) -> None:
        """Add a model's parameters and buffers to `of`, or to `left`."""
        flat = {
            id(p)
            for module in root.modules()
            if isinstance(module, FullyShardedDataParallel)
            for p in module.parameters()
        }
        for name, p in root.named_parameters(remove_duplicate=False):
            name = prefix + plain_name(name)
            if id(p) in flat and not (len(p) > 1 and bool((p != p.flatten()[0]).any())):
                self.left[name] = CUT
            else:
                self.of[name] = p, PARAMETER
        for path, module in root.named_modules():
            for key, buffer in module._buffers.items():
                name = prefix + plain_name(f"{path}.{key}".lstrip("."))
                if buffer is None:
                    continue
                if isinstance(module, BATCH_NORM) and not isinstance(module, nn.SyncBatchNorm):
                    self.left[name] = STATISTICS
                elif key in module._non_persistent_buffers_set:
                    self.left[name] = PASSING
                else:
                    self.of[name] = buffer, BUFFER


def _living() -> list:
    """This process's modules and optimizers."""
    kinds: dict[type, bool] = {}  # the answer for each type, because many objects share few types

    def is_wanted(value) -> bool:
        of = type(value)
        if of not in kinds:
            kinds[of] = issubclass(of, (nn.Module, torch.optim.Optimizer))
        return kinds[of]

    gc.collect()  # then `get_objects` lists them in the order in which they were created, on every rank
    return [value for value in gc.get_objects() if is_wanted(value)]


def _roots(modules: list[nn.Module], stepped: list[torch.Tensor]) -> list[tuple[str, nn.Module]]:
    """(prefix of names, module) for each outermost module whose parameters an optimizer changes, in the
    optimizers' order. If there is none, for each outermost module with parameters, because some optimizers
    change a flat copy. The prefix is '' unless two of the modules have a parameter of the same name.
    """
    place = {id(p): i for i, p in reversed(list(enumerate(stepped)))}
    inside = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inside]
    first = lambda root: min((place[id(p)] for p in root.parameters() if id(p) in place), default=len(place))
    owners = sorted((root for root in roots if first(root) < len(place)), key=first)
    owners = owners or [root for root in roots if any(True for _ in root.parameters())]
    names = [plain_name(name) for root in owners for name, _ in root.named_parameters()]
    several = len(set(names)) < len(names)
    return [(f"{type(root).__name__} {i}: " * several, root) for i, root in enumerate(owners, 1)]
