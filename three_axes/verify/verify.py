"""`verify` trains a model for a few steps on one device and on a mesh, from the same weights, on the same
batch, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import devices, pytorch_private
from ..count.axes import of_meshes
from ..count.interpose import interposer
from .causes import apart
from .compare import Comparison, Twin
from .pieces import Mesh, Places, Split
from .record import Seen, SentListener, Tensors, Watched, is_real
from .report import Report

TYPES = torch.float32, torch.bfloat16, torch.float16
OTHER_SEED = 271828  # of the twin's second run, so that random numbers in the model are noticed
ROWS = 8  # at most so many parts of the batch are tried separately


def verify(
    build: Callable,
    step: Callable,
    batch,
    layouts: str | Sequence[str],
    *,
    steps: int = 2,
    splits: Mapping[str, Split] | None = None,
    names: Callable[[str, dict[str, int]], str] | None = None,
    dtype: torch.dtype | None = torch.float64,
) -> Report:
    """Train a model on each layout, and whole on one device. Report the first difference, and its cause if
    one thing explains it.

    Every rank of the process group calls `verify`, and gets the same report.

        def build(mesh):               # mesh None: the model that is not split
            return model, optimizer    # or the model alone; then nothing is updated
        def step(model, batch, mesh):  # this rank's share of the batch: forward, backward, sums, clipping
            return loss                # of all ranks, or of this share, or None; verify steps the optimizer

        print(verify(build, step, batch, ["dp 2", "dp 2 tp 2"]))

    batch: the whole batch, the same on every rank: a tensor, or tensors in lists and dicts. layouts: axes and
    sizes, outermost first. Each uses as many ranks as the product of its sizes, and its mesh has the axes'
    names. splits: {pattern: (axis, dimension)}, for plain tensors whose split neither shapes nor values show.
    names: (a parameter's name on a rank, the rank's coordinates) -> its name in the whole model, for stages
    of a pipeline. dtype: PyTorch's default type during the comparison. In float64 every difference is a
    mistake. In another type, or in the types that the model itself chooses (None), the rounding error is
    measured.

    The twin starts from the ranks' weights, put together, so seeds do not matter. It runs on rank 0, which
    compares. Dropouts (nn.Dropout) are switched off, and tested separately.

    Raises ValueError for layouts that need more ranks, for names that do not match, for splits that are not
    clear, for a build(None) that fails, and for a twin whose loss is not finite or differs in two runs.
    """
    rank, device = dist.get_rank(), _device()
    layouts = [layouts] if isinstance(layouts, str) else layouts
    if not layouts or steps < 1:
        raise ValueError(f"{len(layouts)} layouts and {steps} steps: give 1 or more of both")
    grids = {layout: _mesh_of(layout, dist.get_world_size()) for layout in layouts}
    with _default(dtype):
        batch = pytorch_private.tree_map(lambda leaf: _placed(leaf, device, dtype), batch)
        twins = _Twins(build, step, batch, steps) if rank == 0 else None
        zeroes = _from_rank_0(twins and not twins.step_zeroes(), dist.group.WORLD)
        verdicts = []
        for layout, grid in grids.items():
            mine, group = _on_this_rank(build, step, batch, grid, steps, names, device, zeroes)
            if group is None:
                continue
            outputs, mine[0].outputs = mine[0].outputs, {}  # they are large, and seldom needed
            ranks = _gathered(mine, group)
            comparison = _comparison(layout, grid, twins, ranks, splits or {}) if twins and ranks else None
            if _from_rank_0(comparison and comparison.wants_outputs(), group):
                all_outputs = _gathered(outputs, group)
                for seen, its in zip(ranks or [], all_outputs or []):
                    seen[0].outputs = its
            if comparison:
                verdicts.append(comparison.run())
    return _from_rank_0(Report(verdicts), dist.group.WORLD)


def _on_this_rank(
    build, step, batch, grid: Mesh, steps: int, names, device, zeroes: bool
) -> tuple[list[Seen], object]:
    """(this rank's recorded steps, the group of the mesh). On a rank outside the mesh, which only helps to
    create the groups: ([], None).
    """
    sizes = tuple(grid.sizes.values())
    with interposer.unobserved():
        ranks = torch.arange(len(grid.ranks)).view(sizes)
        mesh = DeviceMesh(device.type, ranks, mesh_dim_names=tuple(grid.sizes))
        group = _group_of(mesh, grid)
    if (rank := dist.get_rank()) not in grid.ranks:
        return [], None
    named = (lambda name: names(name, grid.at(rank))) if names else lambda name: name
    watched = Watched(build(mesh), named, zeroes)
    places = watched.places()
    share = lambda model: step(model, batch, mesh)
    with interposer.axes.declared(of_meshes([mesh])):
        interposer.add(sent := SentListener())
        try:
            mine = [watched.step(share, outputs=True, sent=sent)]
        finally:
            interposer.remove(sent)
    mine[0].places = places
    mine += [watched.step(share) for _ in range(1, steps)]
    if _from_rank_0(any(_gathered(bool(watched.dropouts), group) or []), group):
        mine[-1].drops = watched.step(share, drops=True).drops
    return mine, group


def _group_of(mesh: DeviceMesh, grid: Mesh):
    """A group of all ranks of the grid. Uses an existing group if there is one, because groups cost threads
    and cannot be ended.
    """
    if len(grid.ranks) == dist.get_world_size():
        return dist.group.WORLD
    if mesh.ndim > 1:
        return dist.new_group(list(grid.ranks))
    return mesh.get_group() if dist.get_rank() in grid.ranks else None


def _gathered(mine, group) -> list | None:
    """The objects of every rank of a group, as a list on rank 0; None elsewhere."""
    gathered = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else None
    with interposer.unobserved():
        dist.gather_object(mine, gathered, dst=0, group=group)
    return gathered


def _from_rank_0(value, group):
    """The value that rank 0 gave, on every rank of the group."""
    values = [value]
    with interposer.unobserved():
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def _comparison(layout: str, grid: Mesh, twins: _Twins, seen: list[list[Seen]], splits) -> Comparison:
    """Put the ranks' weights together and run the twin from them. seen: for each rank, its recorded steps."""
    ranks = dict(enumerate(seen))
    held = {rank: steps[0].before for rank, steps in ranks.items()}
    places = Places(
        grid, held, {rank: steps[0].places for rank, steps in ranks.items()}, twins.shapes, splits
    )
    whole = {}
    for name in twins.shapes:
        parts = {rank: tensors[name] for rank, tensors in held.items() if name in tensors}
        if (together := places.whole(name, parts)) is None:
            raise ValueError(f"{layout}: the ranks' parts of {name} are not the whole of it; give splits=")
        whole[name] = together
    twin = twins.of(whole, max(steps[0].eps for steps in seen))
    return Comparison(layout, grid, twin, ranks, places)


class _Twins:
    """Runs the whole model's steps on one device, from given weights; from the same weights only once."""

    def __init__(self, build, step, batch, steps: int):
        self._build, self._step, self._batch, self._steps = build, step, batch, steps
        self._known: list[tuple[Tensors, float, Twin]] = []
        self._zeroes = True
        watched = self._build_twin()
        self._own = {name: p.detach().to("cpu", copy=True) for name, p in watched.parameters().items()}
        self.shapes = {name: p.shape for name, p in self._own.items()}
        same: dict[int, set[str]] = {}
        for name, p in watched.parameters().items():
            same.setdefault(id(p), set()).add(name)
        self._aliases = {name: names - {name} for names in same.values() if len(names) > 1 for name in names}

    def step_zeroes(self) -> bool:
        """Whether the reader's step sets gradients to zero before its backward: a number that is put there
        beforehand disappears. Then `verify` leaves that to the step, on ranks and in the twin.
        """
        watched = self._build_twin()
        for p in watched.parameters().values():
            p.grad = torch.full_like(p, math.nan) if p.requires_grad and is_real(p) else None
        try:
            with torch.random.fork_rng():
                self._step(watched.model, self._batch, None)
        except Exception:  # it will fail again where the failure is reported
            return False
        gradients = [p.grad for p in watched.parameters().values() if p.grad is not None]
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

    def _build_twin(self) -> Watched:
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
        return Watched(built, zeroes=self._zeroes)

    def _run(self, watched: Watched, weights: Tensors, batch, steps: int, others: bool = False) -> list[Seen]:
        """The twin's steps from these weights. others: whether to draw random numbers of another seed."""
        watched.load(weights)
        step = lambda model: self._step(model, batch, None)
        with torch.random.fork_rng():
            if others:
                torch.manual_seed(OTHER_SEED)
            return [watched.step(step, outputs=number == 0) for number in range(steps)]

    def _in_float64(self, weights: Tensors, rounds: torch.dtype | None) -> list[Seen]:
        """The twin's steps in float64. rounds: a type to which the weights are rounded first."""
        double = lambda leaf: leaf.double() if is_real(leaf) else leaf
        with _default(torch.float64):
            watched = self._build_twin()
            if any(p.dtype != torch.float64 for p in watched.parameters().values()):
                watched.model.double()
            finer = {name: w.to(rounds or w.dtype).double() for name, w in weights.items()}
            batch = pytorch_private.tree_map(double, self._batch)
            return self._run(watched, finer, batch, self._steps, others=True)

    def _check_losses(self, one: Seen, other: Seen, bound: float) -> None:
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


def _mesh_of(layout: str, ranks: int) -> Mesh:
    words = layout.replace("·", " ").split()
    sizes = dict(zip(words[::2], words[1::2]))
    if not words or len(words) != 2 * len(sizes) or not all(n.isdigit() and int(n) for n in sizes.values()):
        raise ValueError(f"{layout!r} is no layout: give axes and sizes, outermost first, as in 'dp 2 tp 2'")
    mesh = Mesh({axis: int(n) for axis, n in sizes.items()})
    if len(mesh.ranks) > ranks:
        raise ValueError(f"{layout!r} takes {len(mesh.ranks)} ranks, and there are {ranks}")
    return mesh


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return devices.CPU


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _nudged(weight: torch.Tensor) -> torch.Tensor:
    """The weight, moved by one unit in the last place."""
    return weight.nextafter(torch.full_like(weight, math.inf)) if weight.is_floating_point() else weight


def _placed(leaf, device: torch.device, dtype: torch.dtype | None):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to(device, dtype if dtype is not None and leaf.is_floating_point() else None)


@contextmanager
def _default(dtype: torch.dtype | None):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
