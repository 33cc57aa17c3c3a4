"""`torchrun … -m three_axes verify train.py`: what was equal on some ranks before the first step stays so:
parameters, what the optimizer keeps of them, and buffers. A random state may part; it is told, since it is a
cause of much.

After each step of the optimizer every rank tells the store where the ranks met what stands for its tensors.
Rank 0 looks. Nothing is sent along the script's own groups.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import pytorch_private
from ..count.script import run_script, say
from .causes import classes_text
from .drift import OF, Copies, Drift, Mark, Marks, mark
from .record import plain_name

PATIENCE = timedelta(seconds=120)  # for a rank that has not come to the end of its step
SHOWN = 8  # lines of a step
DRAWS = "the CPU's random state", "the GPU's random state"


def prepare(args) -> Callable[[], int]:
    """Look at the options. What is returned runs `args.script` as Python would, and returns an exit status: 1
    where copies have parted. Raises ValueError for options that will not do.
    """
    if not args.module and not os.path.isfile(args.script):
        raise ValueError(f"there is no script {args.script!r}; options of verify come before it")
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: give 1 or more")
    return lambda: _verified(args)


class Watch:
    """Of this rank's first optimizer. over: called when `steps` of its steps are done."""

    _store: dist.Store  # from the first step on
    _copies: Copies  # on rank 0

    def __init__(self, steps: int, over: Callable[[], None]):
        self.number, self._steps, self._over, self._first = 0, steps, over, None
        self.found: list[Drift] = []
        self._named: dict[str, torch.Tensor] = {}
        self._rank, self._size = 0, 1
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._begins(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer)),
        ]

    def stop(self) -> None:
        """Watch the optimizers no more."""
        for hook in self._hooks:
            hook.remove()

    @property
    def copies(self) -> int:
        """Tensors that several ranks held alike before the first step."""
        return sum(name not in DRAWS for name in self._copies.groups) + len(self.found)

    def _begins(self, optimizer) -> None:
        if self._first is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._first, self._named = optimizer, _tensors(optimizer)
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
            self._store = dist.PrefixStore("three-axes/verify", pytorch_private.default_store())
            if all_marks := self._told():
                self._copies = Copies(all_marks)

    def _stepped(self, optimizer) -> None:
        if optimizer is not self._first:
            return
        self.number += 1
        if all_marks := self._told():
            self._tell(self._copies.look(self.number, all_marks))
        if self.number == self._steps:
            self.stop()
            self._over()

    def _told(self) -> list[Marks] | None:
        """On rank 0, what all ranks have. All wait for rank 0, so that none leaves before it has looked."""
        named = self._named | _kept(self._first, self._named)
        mine = {name: mark(name, *_here(tensor)) for name, tensor in named.items()}
        mine |= {name: mark(name, state) for name, state in _random_states().items()}
        self._store.set(f"{self.number}/{self._rank}", json.dumps({"marks": mine, "groups": _groups()}))
        if self._rank:
            self._store.wait([f"{self.number}/seen"], PATIENCE)
            return None
        keys = [f"{self.number}/{other}" for other in range(self._size)]
        self._store.wait(keys, PATIENCE)
        told = [json.loads(value) for value in self._store.multi_get(keys)]
        self._store.set(f"{self.number}/seen", "")
        self._axes = {tuple(ranks): name for one in told for name, ranks in one["groups"]}
        return [{name: Mark(*one) for name, one in rank["marks"].items()} for rank in told]

    def part(self) -> None:
        """Rank 0 leaves last: it may hold the store."""
        self._store.set(f"left/{self._rank}", "")
        if self._rank == 0:
            with suppress(RuntimeError):  # somebody's own end was quicker
                self._store.wait([f"left/{other}" for other in range(self._size)], PATIENCE)

    def _tell(self, drifts: list[Drift]) -> None:
        drawn = [drift for drift in drifts if drift.name in DRAWS]
        tensors = sorted((d for d in drifts if d.name not in DRAWS), key=lambda drift: -drift.far)
        self.found += tensors
        for drift in tensors[:SHOWN]:
            say(f"{self._where(drift)}, by {drift.far:.1g} of its length")
        if len(tensors) > SHOWN:
            say(f"after step {tensors[0].step}: and {len(tensors) - SHOWN} more")
        for drift in drawn:
            say(f"{self._where(drift)}: a note, for ranks may draw for themselves")

    def _where(self, drift: Drift) -> str:
        ranks = "; ".join(map(classes_text, drift.groups))
        axis = " and ".join(sorted({axis_of(classes, self._axes) for classes in drift.groups}))
        return f"after step {drift.step}: {drift.name} differs along {axis} ({ranks})"


def axis_of(classes: dict[int, str], axes: dict[tuple[int, ...], str]) -> str:
    """The smallest groups whose members have parted, by name."""
    parted = {
        ranks: name for ranks, name in axes.items() if len({classes[r] for r in ranks if r in classes}) > 1
    }
    if not parted:
        return "no group"
    least = min(map(len, parted))
    return " and ".join(sorted({name for ranks, name in parted.items() if len(ranks) == least}))


def _groups() -> list[tuple[str, list[int]]]:
    """The groups of this rank: what each is called, and its ranks."""
    described = ((group.group_desc.removeprefix("mesh_"), group) for group in pytorch_private.groups())
    plain = {"default_pg": "the world", "undefined": "a group", "": "a group"}
    return [(plain.get(name, name), dist.get_process_group_ranks(group)) for name, group in described]


def _tensors(optimizer) -> dict[str, torch.Tensor]:
    """The parameters and buffers of the models that an optimizer changes, by their names there."""
    mine = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    inside = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inside]
    owners = [root for root in roots if any(id(p) in mine for p in root.parameters())]
    named: dict[str, torch.Tensor] = {}
    for root in owners or roots:  # some optimizers change a flat copy
        named |= {plain_name(name): p for name, p in root.named_parameters(remove_duplicate=False)}
        named |= {plain_name(name): buffer for name, buffer in root.named_buffers()}
    known = {id(tensor) for tensor in named.values()}
    rest = (p for p in mine.values() if id(p) not in known)
    return named | {f"the optimizer's parameter {i}": p for i, p in enumerate(rest)}


def _kept(optimizer, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an optimizer has beside its parameters: "exp_avg of norm.weight"."""
    return {
        f"{key}{OF}{name}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _random_states() -> dict[str, torch.Tensor]:
    """Equal on ranks that were seeded alike, as long as they draw alike."""
    gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return dict(zip(DRAWS, [torch.get_rng_state(), *gpu]))


def _here(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """What this rank holds, and, of a DTensor, which shard that is: copies of one have the same."""
    if not isinstance(tensor, DTensor):
        return tensor, ""
    at: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    return tensor.to_local(), str([i for i, place in zip(at, tensor.placements) if place.is_shard()])


def _verified(args) -> int:
    leave, rank = os._exit, int(os.environ.get("RANK", 0))

    def over() -> None:
        """Ranks that have met end here, at once: gloo's groups that a script still holds abort a Python that
        ends in its own time, and its status would be taken for a finding.
        """
        if rank == 0:
            _conclude(watch, args)
        if watch.number:
            sys.stdout.flush()
            watch.part()
            leave(1 if rank == 0 and watch.found else 0)

    watch = Watch(args.steps, over)
    try:
        names = run_script(args)  # noqa: F841 (kept until all is told)
    finally:
        watch.stop()
    over()
    return 0


def _conclude(watch: Watch, args) -> None:
    steps = f"{watch.number} step{'s' * (watch.number > 1)}"
    if not watch.number:
        say(
            f"{args.script}: no optimizer has stepped on several ranks: there is nothing to compare."
            f" Start it so: torchrun --nproc-per-node 4 -m three_axes verify {args.script}"
        )
    elif not watch.copies:
        say(f"{args.script}: no two ranks held the same before the first step: there are no copies")
    elif watch.found:
        say(
            f"{args.script}: of {watch.copies} tensors with copies {len(watch.found)} have parted, in {steps}"
        )
    else:
        say(f"{args.script}: {watch.copies} tensors have copies on several ranks, equal after {steps}")
