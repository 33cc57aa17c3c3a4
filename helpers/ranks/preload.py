"""The fork server imports this module before it forks the first rank. So each rank starts with these imports.

FSDP, DTensor and pipelining are among them: a rank that imported them by itself would take seconds.
"""

import gc
import os
import threading

KERNEL = "THREE_AXES_KERNEL"  # environment variable of a starting process: the pid of its kernel


def _watch(imported: threading.Event, kernel: int) -> None:
    """End this process if its kernel ends during the imports. multiprocessing checks for that only after the
    imports, which take many seconds on a busy machine.
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

# Ranks share these pages of memory until they write to them, and a garbage collector writes to each object
# that it visits. Frozen objects are not visited.
gc.collect()
gc.freeze()
_imported.set()
_watching.join()  # before a rank is forked this process must have a single thread
