"""`verify` trains a model for a few steps on one device and on a mesh, from the same weights, on the same
batch, and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import devices, pytorch_private
from ..count.axes import of_meshes
from ..count.interpose import interposer
from .compare import Comparison
from .record import SentListener, Step, StepRecorder
from .report import Report
from .shards import Mesh, Places, Split
from .twin import Twins, default_type


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
    compares. Dropouts (nn.Dropout) are switched off.

    Raises ValueError for layouts that need more ranks, for names that do not match, for splits that are not
    clear, for a build(None) that fails, and for a twin whose loss is not finite or differs in two runs.
    """
    rank, device = dist.get_rank(), _device()
    layouts = [layouts] if isinstance(layouts, str) else layouts
    if not layouts or steps < 1:
        raise ValueError(f"{len(layouts)} layouts and {steps} steps: give 1 or more of both")
    grids = {layout: _mesh_of(layout, dist.get_world_size()) for layout in layouts}
    with default_type(dtype):
        batch = pytorch_private.tree_map(lambda leaf: _placed(leaf, device, dtype), batch)
        twins = Twins(build, step, batch, steps) if rank == 0 else None
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
) -> tuple[list[Step], object]:
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
    recorder = StepRecorder(build(mesh), named, zeroes)
    places = recorder.places()
    share = lambda model: step(model, batch, mesh)
    with interposer.axes.declared(of_meshes([mesh])):
        interposer.add(sent := SentListener())
        try:
            mine = [recorder.step(share, outputs=True, sent=sent)]
        finally:
            interposer.remove(sent)
    mine[0].places = places
    mine += [recorder.step(share) for _ in range(1, steps)]
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


def _comparison(layout: str, grid: Mesh, twins: Twins, seen: list[list[Step]], splits) -> Comparison:
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


def _placed(leaf, device: torch.device, dtype: torch.dtype | None):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.to(device, dtype if dtype is not None and leaf.is_floating_point() else None)
