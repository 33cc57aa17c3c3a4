"""Drop 07: schedules on paper and on real ranks, and an order of the reader's own."""

from .cells import *
from .exercises import *
