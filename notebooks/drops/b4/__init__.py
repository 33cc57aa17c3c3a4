"""Beyond, b4: jobs that hang: which rank never called a collective, on which line, and why."""

from .cells import *
from .exercises import *
from .runs import *
