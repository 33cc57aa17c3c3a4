"""Drop 14: a layout for 70B on 64 GPUs defended, the real model traced, and a 4-layer model trained."""

from .cells import *
from .exercises import *
from .training import *
