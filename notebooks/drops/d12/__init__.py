"""Drop 12: a bubble of 35 % that more microbatches cannot shrink: the other remedies, and their costs."""

from .cells import *
from .exercises import *
