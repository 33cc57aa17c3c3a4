"""Beyond, b4: jobs that stand still. Who never came, on which line, and why."""

from .cells import *
from .exercises import *
from .runs import *
