"""Beyond, b1: FSDP in time: when each layer's weights come, are used, and go."""

from .exercises import *
from .steps import *
