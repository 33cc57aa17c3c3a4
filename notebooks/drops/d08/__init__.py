"""Drop 08: three axes on eight ranks; who shares a group, which groups leave a node, and bytes by axis."""

from .cells import *
from .exercises import *
