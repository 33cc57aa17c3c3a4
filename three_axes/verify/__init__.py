"""Finds out whether a split model computes what the whole model computes.

    torchrun --nproc-per-node 4 -m three_axes verify train.py --its-arguments

checks that the copies of a tensor on several ranks stay equal while the script trains. The function `verify`
compares a split model with its twin, the whole model on one device.
"""

from ..doors import door
from .verify import verify

__getattr__, __dir__ = door(__name__, drift=["Copies"], sketches=["sketch"])
