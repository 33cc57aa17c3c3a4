"""What the fork server imports before the first rank is needed, so that a rank has it as it is born.

FSDP, DTensor and pipelining come along: a rank that imported them by itself would take seconds.
"""

import gc
import os
import threading

KERNEL = "THREE_AXES_KERNEL"  # in the environment of a process that starts: who starts it


def _watch(imported: threading.Event, kernel: int) -> None:
    """End this process where its kernel ends while it imports. multiprocessing looks for that later on, which
    on a busy machine is after many seconds.
    """
    while os.getppid() == kernel:
        if imported.wait(0.5):
            return
    os._exit(1)


_imported = threading.Event()
_watching = threading.Thread(
    target=_watch, args=(_imported, int(os.environ.pop(KERNEL, os.getppid()))), daemon=True
)
_watching.start()

import cloudpickle  # noqa: E402, F401
import numpy  # noqa: E402, F401
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.pipelining  # noqa: E402
import torch.distributed.tensor.parallel  # noqa: E402
import torch.nn.parallel  # noqa: E402, F401

from . import worker  # noqa: E402, F401

# Ranks share these pages until they write to them, and a garbage collector that looks at an object writes to
# it.
gc.collect()
gc.freeze()
_imported.set()
_watching.join()  # at once: what is forked from here shall have one thread
