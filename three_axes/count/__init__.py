"""Count a reader's own job: what each rank sends, along which axis, and how long it waits.

    torchrun --nproc-per-node 4 -m three_axes count train.py --its-arguments

`from three_axes import counting` does the same for a block of code.
"""

from ..doors import door

__getattr__, __dir__ = door(
    __name__,
    clock=["Span", "Timeline", "shortest"],
    deadlock=["Deadlock"],
    interpose=["interposer"],
    meter=["Recorder"],
    report=["CollectiveCount", "Report"],
    standstill=["Reading", "Standstill"],
    threads=["OwnThread"],
    traffic=["Traffic", "side_by_side"],
    wire=["cut"],
)
