"""Drop 11: throughput lost on a larger cluster: where a step's time goes, by axis, measured and by theory."""

from .cells import *
from .cluster import *
from .exercises import *
