"""Drop 10: runs that ran out of memory, distinguished by their traces, and remedies under one budget."""

from .cells import *
from .exercises import *
from .runs import *
