"""Drop 09: every byte a GPU holds, on paper and on real ranks; what ZeRO divides, and what it sends."""

from .exercises import *
from .measured import *
