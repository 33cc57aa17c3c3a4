"""Drop 07: schedules, simulated and on real ranks. The reader writes the order of one stage."""

from .cells import *
from .exercises import *
