"""Beyond, b3: experts shared out over ranks; what an uneven router costs; two meshes over the same ranks."""

from .cells import *
from .exercises import *
