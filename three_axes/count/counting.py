"""`counting()`: count what a block of code makes this rank send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from .axes import of_meshes
from .counted import Counted
from .counter import Counter
from .interpose import interposer


@contextmanager
def counting(mesh: DeviceMesh | Sequence[DeviceMesh] = (), *, trace: bool = False) -> Iterator[Counted]:
    """Count every collective in this block, also those of DDP, FSDP and so on. Every rank enters the block.

        with counting(mesh=mesh) as traffic:
            train_step()
        if rank == 0:
            print(traffic)

    mesh: the device mesh, or several, whose dimensions name the axes. Without it, axes are named as far as
    they are known (`count.axes`). trace: also keep times, for `traffic.trace()`. No rank waits for another
    when the block ends, and nothing is sent over the groups that are counted.
    """
    with interposer.axes.declared(of_meshes([mesh] if isinstance(mesh, DeviceMesh) else mesh)):
        counted = Counted(Counter(trace))
        try:
            yield counted
        finally:
            counted.finish()
