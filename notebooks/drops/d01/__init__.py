"""Drop 01: tell the three schemes apart by the bytes alone."""

from .cells import *
from .exercises import *
