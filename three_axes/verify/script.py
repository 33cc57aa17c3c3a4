"""`torchrun … -m three_axes verify train.py` checks that tensors that were equal on some ranks before the
first step stay equal: parameters, the optimizer's states, and buffers.

Before each step of the optimizer, and when the script ends, every rank writes the sketches of its tensors to
the store with which the ranks formed their group. (The result of a step is written only before the next one,
because sharded weights may be gathered in between.) Rank 0 compares a step when all ranks have written it;
until the last step no rank waits. Nothing is sent over the script's own groups.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import pytorch_private
from ..count.axes import of_meshes
from ..count.script import run_script, say
from ..count.steps import Stepping
from .drift import Copies
from .findings import Findings
from .observer import Observer
from .record import digest
from .sketches import STATE, Sketch, sketch
from .tensors import Tensors

PATIENCE = 120.0  # seconds to wait for a rank that has not reached the end of the last step
BRIEF = 20.0  # the same if copies differ already: the rank may have left out a step, and never reach the end
_numbers = itertools.count()  # each check writes into the store under a number of its own
UNREAD = "numbers that cannot be read"  # a reason not to watch a tensor
# PyTorch's description of a group without a name -> how it is printed.
PLAIN = {"default_pg": "the world", "undefined": "a group", "": "a group"}


def prepare(args) -> Callable[[], int]:
    """Check the options. Returns a function that runs `args.script` as Python would and then ends the
    process, on rank 0 with exit status 1 if copies differ, otherwise 0. It returns 0 only if no step was
    watched. Raises ValueError for options that cannot be used.
    """
    if not args.module and not os.path.isfile(args.script):
        raise ValueError(f"there is no script {args.script!r}; options of verify come before it")
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps}: give 1 or more")
    return lambda: _verified(args)


class WatchedScript:
    """Watches this rank's tensors from the first step of an optimizer on. over: is called after the last
    watched step.

    number: steps of this rank that have ended. If copies differ after `steps` steps, as many further steps
    are watched, because copies that are averaged now and then become equal again.
    """

    _store: dist.Store  # from the first step on
    _tensors: Tensors

    def __init__(self, steps: int, over: Callable[[], None]):
        self.number, self._last, self._over = 0, steps, over
        self._more = 2 * steps
        self._rank, self._size = 0, 1
        self._started = False
        self._just_stepped: dict[str, str] = {}
        self._observer = Observer()
        self._stepping = Stepping(self._begins, self._stepped)
        self.compared = ComparedSteps()  # used on rank 0

    def stop(self) -> None:
        """Stop watching the optimizers."""
        self._stepping.stop()
        with suppress(ValueError):  # it was stopped before
            self._observer.stop()

    def end(self) -> None:
        """Write the last step; rank 0 waits for the other ranks' and compares the steps that remain."""
        if not self._started:
            return
        self._write(ends=True)
        if self._rank == 0:
            keys = {rank: f"end/{rank}" for rank in range(self._size)}
            self._wait_for(list(keys.values()))
            self._compare()
            ended = {rank: key for rank, key in keys.items() if self._store.check([key])}
            self.compared.made = {rank: int(self._store.get(key)) for rank, key in ended.items()}

    def leave_last(self) -> None:
        """On rank 0, wait until the other ranks have left: its process may hold the store."""
        if self._started:
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                self._wait_for([f"left/{other}" for other in range(self._size)])

    def _begins(self, ends: bool) -> None:
        """Called before an optimizer steps. ends: whether this optimizer ends the step (`Stepping`)."""
        if not ends or not dist.is_initialized() or dist.get_world_size() < 2:
            return
        if not self._started:
            self._started = True
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
            prefix = f"three-axes/verify/{next(_numbers)}"
            self._store = dist.PrefixStore(prefix, pytorch_private.default_store())
            self._tensors = Tensors()
        self._write()
        if self._rank == 0:
            self._compare()
        if self.number == self._last and not self._decide_to_go_on():
            self.stop()
            self._over()

    def _stepped(self, ends: bool) -> None:
        if ends and self._started:
            self.number += 1
            self._just_stepped = {
                name: digest(_here(t)[0]).hex() for name, (t, _) in self._tensors.of.items()
            }

    def _write(self, ends: bool = False) -> None:
        """Write this rank's record to the store. ends: whether it is the last one."""
        of = self._tensors.of | {name: (state, STATE) for name, state in self._tensors.states()}
        written: dict[str, object] = {"sketches": self._sketches(of)}
        written["inputs"] = self._observer.inputs()
        if self.number == 0:
            written |= {"groups": _groups(), "left": self._tensors.left}
            written |= self._observer.of_groups(self._tensors.parameters, self._tensors.roots)
        if ends:
            written["stepped"] = self._just_stepped
        self._store.set(f"{self.number}/{self._rank}", json.dumps(written))
        if ends:
            self._store.set(f"end/{self._rank}", str(self.number))

    def _sketches(self, of: dict[str, tuple[torch.Tensor, str]]) -> dict[str, Sketch]:
        """Name -> sketch, of these tensors. Tensors that cannot be read as numbers are added to `left`."""
        sketches = {}
        for name, (tensor, part) in of.items():
            try:
                sketches[name] = sketch(name, *_here(tensor), part)
            except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantised, or another library's
                self._tensors.left[name] = UNREAD
                self._tensors.of.pop(name, None)
        return sketches

    def _compare(self) -> None:
        """Compare each step that all ranks have written and rank 0 has not compared yet."""
        while self.compared.number <= self.number:
            keys = [f"{self.compared.number}/{rank}" for rank in range(self._size)]
            if not self._store.check(keys):
                return
            self.compared.add([json.loads(value) for value in self._store.multi_get(keys)])

    def _decide_to_go_on(self) -> bool:
        """Whether more steps are watched. Rank 0 decides it, when it has all ranks' records."""
        key = f"{self.number}/on"
        if self._rank == 0:
            self._wait_for([f"{self.number}/{rank}" for rank in range(self._size)])
            self._compare()
            on = self.number < self._more and self.compared.parted
            self._store.set(key, "on" if on else "")
        else:
            self._store.wait([key], timedelta(seconds=2 * PATIENCE))
        if self._store.get(key) != b"on":
            return False
        self._last = self._more
        return True

    def _wait_for(self, keys: list[str]) -> None:
        """Wait, comparing steps meanwhile, until all keys are in the store, or until the patience ends."""
        began = time.monotonic()
        while not self._store.check(keys):
            self._compare()
            if time.monotonic() - began > (BRIEF if self.compared.parted else PATIENCE):
                return
            time.sleep(0.01)


class ComparedSteps:
    """Compares, on rank 0, the steps that all ranks have written, and prints each finding at once."""

    def __init__(self) -> None:
        self.number = 0  # of the next step to compare
        self.copies: Copies | None = None
        self.made: dict[int, int] = {}  # rank -> steps that it has made, of those that have ended
        self._axes: dict[tuple[int, ...], str] = {}
        self._inputs: list[list] = []

    @property
    def parted(self) -> bool:
        """Whether something differs that should be equal."""
        return self.copies is not None and bool(self.copies.wrong)

    def add(self, written: Sequence[dict]) -> None:
        """Compare a step. written: each rank's record of it."""
        sketches = [{name: Sketch(*fields) for name, fields in rank["sketches"].items()} for rank in written]
        if self.copies is None:
            self._axes = {tuple(ranks): name for record in written for name, ranks in record["groups"]}
            self.copies = Copies(sketches, written)
            for record in written:
                self.copies.left |= record["left"]
            self._inputs = [[] for _ in written]
            self.findings = Findings(self.copies, self._axes)
            self.findings.strangers()
        else:
            stepped = [record["stepped"] for record in written if "stepped" in record]
            drifts = self.copies.look(self.number, sketches, stepped if len(stepped) == len(written) else ())
            if self.number == 1:
                self.findings.watched()
            self.findings.found(drifts)
        for rank, record in enumerate(written):
            self._inputs[rank].append(record["inputs"])
        self.number += 1

    def conclude(self, script: str) -> None:
        """Print the findings on all steps together, and the conclusion."""
        steps = max(1, self.number - 1)  # the last record's inputs belong to no compared step
        self.findings.ended(self.number - 1)
        if not self.findings.unequal(self.made):  # otherwise steps of one number have other data
            self.findings.equal_inputs([of_rank[:steps] for of_rank in self._inputs])
        self.findings.conclusion(script, self.number - 1)


def _groups() -> list[tuple[str, list[int]]]:
    """The groups of this rank, as (name, ranks). A group without a name of its own, such as the world, has
    the name of a mesh's dimension if it has the same ranks.
    """
    meshes = [
        mesh for mesh in gc.get_objects() if type(mesh) is DeviceMesh and mesh.get_coordinate() is not None
    ]
    dimensions: dict[tuple[int, ...], set[str]] = {}
    for name, ranks in of_meshes(meshes):
        dimensions.setdefault(tuple(ranks), set()).add(name)
    groups = []
    for group in pytorch_private.groups():
        name, ranks = group.group_desc.removeprefix("mesh_"), dist.get_process_group_ranks(group)
        if name in PLAIN:
            name = " or ".join(sorted(dimensions.get(tuple(ranks), ()))) or PLAIN[name]
        groups.append((name, ranks))
    return groups


def _here(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """(the part that this rank holds; for a DTensor, a key that is equal on ranks with the same shard)."""
    if not isinstance(tensor, DTensor):
        return tensor, ""
    at: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    return tensor.to_local(), str([i for i, place in zip(at, tensor.placements) if place.is_shard()])


def _verified(args) -> int:
    """Run the script under the watch. Ends the process if a step was watched; otherwise returns 0."""
    leave, rank = os._exit, int(os.environ.get("RANK", 0))

    def over() -> None:
        """Write the last step and print the conclusion. If steps were watched, end this process at once:
        while a script still holds gloo's groups, a normal end of Python may abort, and its exit status would
        look like a finding.
        """
        watch.end()
        if rank == 0:
            _conclude(watch, args)
        if watch.number:
            sys.stdout.flush()
            watch.leave_last()
            leave(1 if rank == 0 and watch.compared.parted else 0)

    watch = WatchedScript(args.steps, over)
    try:
        run_script(args)
    finally:
        watch.stop()
    over()
    return 0


def _conclude(watch: WatchedScript, args) -> None:
    if watch.compared.copies is None:
        say(
            f"{args.script}: no optimizer has stepped on several ranks: there is nothing to compare."
            f" Start it so: torchrun --nproc-per-node 4 -m three_axes verify {args.script}"
        )
    else:
        watch.compared.conclude(args.script)
