"""Drop 06: what tensor and sequence parallelism send, by hand and by PyTorch, inside and between nodes."""

from .cells import *
from .exercises import *
