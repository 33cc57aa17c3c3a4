"""Drop 05: when data parallelism sends, and how to hide it under backward."""

from .cells import *
from .exercises import *
