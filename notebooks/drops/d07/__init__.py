"""Drop 07: schedules, simulated and on real ranks; and the order of one stage, as an exercise."""

from .cells import *
from .exercises import *
