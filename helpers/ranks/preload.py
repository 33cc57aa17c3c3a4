"""What the fork server imports before the first rank is needed, so that a rank has it as it is born.

FSDP, DTensor and pipelining come along: a rank that imported them by itself would take seconds.
"""

import gc

import cloudpickle  # noqa: F401
import numpy  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401

from . import worker  # noqa: F401

# Ranks share these pages until they write to them, and a garbage collector that looks at an object writes to
# it.
gc.collect()
gc.freeze()
