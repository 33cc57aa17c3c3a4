"""Drop 14: a layout for 70B on 64 GPUs defended, the real model traced, and the real 4-layer model trained on
whatever is there.
"""

from .cells import *
from .exercises import *
from .training import *
