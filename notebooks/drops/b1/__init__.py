"""Beyond, b1: FSDP in time: when each layer's weights are gathered, used and freed."""

from .exercises import *
from .steps import *
