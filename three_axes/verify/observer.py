"""Records over which groups a rank's gradients are summed, and the inputs of its models. The groups show
which ranks must hold equal copies.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from .. import pytorch_private
from ..count.axes import FRAMES
from ..count.interpose import Call, Listener, interposer
from ..lines import callers
from .record import digest, plain_name

# PyTorch's modules that send parameters and statistics during a forward; these are no activations.
WRAPPERS = "distributed/fsdp", "distributed/_composable", "nn/parallel/", "nn/modules/_functions"
REDUCING = "all_reduce", "reduce_scatter", "all_gather"
SUMS = "sum", "avg"
LAYERS = 8  # the inputs of so many first layers of a forward are recorded as well
PADDED = 1024  # a flat copy of all gradients may be longer than they are, by so many numbers for each rank


class Observer(Listener):
    """Listens from the start of the script to the interposer, and to every forward of a module.

    A group is recorded under what is sent over it: `_inside`, activations in a forward; `_wrapped`, what
    FSDP, DDP or SyncBatchNorm sends; `_sums`, other collectives outside a forward; `_swaps`, all-to-alls,
    with this rank's position; `_messages`, sends and receives between stages.
    """

    def __init__(self) -> None:
        self._depth = 0  # how many forwards are running, each inside the one before
        self._before = b""  # the random state when the outermost forward began
        self._layers = 0  # modules with parameters of their own that the outermost forward has called
        self._first_step = True  # until `of_groups`
        # Sums before the first step: (ranks, tensor, by DDP, in backward, whether the tensor is sent alone).
        self._calls: list[tuple[tuple[int, ...], torch.Tensor, bool, bool, bool]] = []
        self._sums: set[tuple[int, ...]] = set()
        self._wrapped: set[tuple[int, ...]] = set()
        self._inside: set[tuple[int, ...]] = set()
        self._swaps: dict[tuple[int, ...], int] = {}
        self._messages: set[tuple[int, ...]] = set()
        self._inputs: list[str] = []
        self._inputs_known = True  # False once an input has an object that may contain tensors
        self._hooks = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]
        interposer.add(self)

    def stop(self) -> None:
        """Stop listening."""
        for hook in self._hooks:
            hook.remove()
        interposer.remove(self)

    def begins(self, call: Call) -> None:
        """Record the call's group under what the call sends; before the first step also its tensor."""
        tensor, members = call.first, tuple(call.members)
        if tensor is None or len(members) < 2 or not tensor.is_floating_point():
            return
        if call.op in ("send", "recv"):
            # A send inside a forward, such as ring attention's, is not one from stage to stage.
            pairs = self._inside if self._depth or self._in_backward else self._messages
            pairs.add(tuple(sorted((members[call.me], members[call.root or 0]))))
        elif call.op == "all_to_all":
            self._swaps[members] = call.me
        elif call.op in REDUCING and call.payload > tensor.element_size():
            wrapped = call.by_ddp or _by_wrapper()
            if wrapped:
                self._wrapped.add(members)
            elif self._depth:
                self._inside.add(members)
            else:
                self._sums.add(members)
            if call.reduces in SUMS and not self._depth and self._first_step:
                self._calls.append((members, tensor, call.by_ddp, self._in_backward, call.alone))

    def of_groups(self, parameters: Mapping[str, torch.Tensor], roots) -> dict:
        """The groups recorded so far, by what was sent over them; "summed" has (parameter, ranks) for each
        gradient that was summed before the first step. roots: (prefix of names, module), as in `Tensors`.
        """
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        memory: dict[int, str] = {}
        for name, p in trained.items():
            if p.grad is not None and not hasattr(p.grad, "placements"):
                memory[p.grad.untyped_storage().data_ptr()] = name
        total, summed = sum(p.numel() for p in trained.values()), []
        for members, tensor, by_ddp, in_backward, alone in self._calls:
            if by_ddp:
                summed += [(name, members) for name in _of_ddp(roots) if name in trained]
            elif (parameter := memory.get(tensor.untyped_storage().data_ptr())) and alone:
                summed.append((parameter, members))
            elif not in_backward and total <= tensor.numel() <= total + PADDED * len(members):
                summed += [(name, members) for name in trained]
        self._first_step, self._calls = False, []
        return {
            "summed": list(dict.fromkeys(summed)),
            "sums": sorted(self._sums),
            "wrapped": sorted(self._wrapped),
            "inside": sorted(self._inside),
            "swaps": sorted(self._swaps.items()),
            "messages": sorted(self._messages),
        }

    def inputs(self) -> list[str]:
        """Digests of the models' inputs since the last call; [] if any of them has an object that may contain
        tensors.
        """
        inputs = self._inputs if self._inputs_known else []
        self._inputs, self._inputs_known = [], True
        return inputs

    @property
    def _in_backward(self) -> bool:
        return pytorch_private.backward_under_way() != -1

    def _before_forward(self, module: nn.Module, args) -> None:
        self._depth += 1
        if not torch.is_grad_enabled() or not module.training or self._in_backward:
            return
        if self._depth == 1:
            self._before, self._layers = _random_state(), 0
        if any(p is not None for p in module._parameters.values()) and self._layers < LAYERS:
            self._layers += 1
            if _random_state() == self._before:  # an input after a dropout does not identify the data
                self._record_input(args)

    def _after_forward(self, module: nn.Module, args, *rest) -> None:
        """rest: (kwargs, result); only the result if the forward has raised."""
        self._depth -= 1
        if self._depth == 0 and self._before:
            self._before = b""
            self._record_input((args, *rest[:-1]))

    def _record_input(self, given) -> None:
        """Record a digest of an input: of the outermost module's, and of the first layers'. The latter are
        needed because a model may cut its batch itself, and may look up positions before words.
        """
        leaves = pytorch_private.tree_flatten(given)[0]
        tensors = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
        rest = [leaf for leaf in leaves if type(leaf) is not torch.Tensor]
        self._inputs_known &= all(leaf is None or isinstance(leaf, (bool, int, float, str)) for leaf in rest)
        if tensors:
            self._inputs.append("".join(digest(tensor).hex() for tensor in tensors))


def _random_state() -> bytes:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return digest(torch.cat(states))


def _of_ddp(roots) -> list[str]:
    """Names of the parameters whose gradients DDP sums."""
    return [
        prefix + plain_name(name)
        for prefix, root in roots
        if isinstance(root, DistributedDataParallel)
        for name, _ in root.named_parameters()
        if name.removeprefix("module.") not in root.parameters_to_ignore
    ]


def _by_wrapper() -> bool:
    """Whether FSDP, DDP or SyncBatchNorm issues the collective."""
    files = (frame.f_code.co_filename for frame in callers(sys._getframe(2), most=FRAMES))
    return any(part in file for file in files for part in WRAPPERS)
