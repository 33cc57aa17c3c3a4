"""Drop 13: the planner, a rule of thumb compared with it, a cost model of one's own, and quick cases."""

from .cells import *
from .exercises import *
