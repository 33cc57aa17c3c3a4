"""Drop 10: runs that ran out of memory, told apart by their traces, and the ladder of remedies under one
budget.
"""

from .cells import *
from .exercises import *
from .runs import *
