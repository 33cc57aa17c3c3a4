"""Drop 06: tensor parallelism traced, PyTorch's plan with its extra all-reduces, sequence parallelism, and
the cliff between nodes.
"""

from .cells import *
from .exercises import *
