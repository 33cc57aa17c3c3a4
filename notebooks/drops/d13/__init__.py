"""Drop 13: the planner in the reader's hands, a rule of thumb held against it, and four quick cases."""

from .cells import *
from .exercises import *
