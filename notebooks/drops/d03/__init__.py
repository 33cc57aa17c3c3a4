"""Drop 03: the split of the MLP, forward and backward, and what it saves."""

from .cells import *
from .exercises import *
