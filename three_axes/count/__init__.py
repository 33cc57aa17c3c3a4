"""Counts what each rank of a training job sends, along which axis, and how long it waits.

    torchrun --nproc-per-node 4 -m three_axes count train.py --its-arguments

`from three_axes import counting` does the same for a block of code. `helpers.World`, which runs functions on
ranks in a notebook, does it for each function.
"""

from ..doors import door

# module -> its public names. A module is loaded when one of its names is first used.
__getattr__, __dir__ = door(
    __name__,
    clock=["Span", "Timeline", "shortest"],
    deadlock=["Deadlock", "Stillness"],
    interpose=["interposer"],
    meter=["Recorder"],
    moves=["OwnThread"],
    report=["CollectiveCount", "Report"],
    traffic=["Traffic", "side_by_side"],
    wire=["cut"],
)
