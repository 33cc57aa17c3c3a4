"""Does a split model compute what the whole model computes? Compares ranks with one device, or copies in a
script.

    torchrun --nproc-per-node 4 -m three_axes verify train.py --its-arguments

`from three_axes.verify import verify` compares a model of one's own with its twin.
"""

from ..doors import door
from .verify import verify

__getattr__, __dir__ = door(__name__, drift=["Copies"], marks=["mark"])
