"""Beyond, b2: one sequence over four ranks, three ways; who waits for whom."""

from .attention import *
from .exercises import *
