"""Drop 12: a bubble of 35 % with the number of microbatches fixed: what is left to do, what each costs, and
an order that fits.
"""

from .cells import *
from .exercises import *
