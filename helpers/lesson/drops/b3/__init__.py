"""Beyond, b3: experts shared out over ranks; what an uneven router costs; two meshes over the same ranks."""

from .dispatch import expert_layer, layer
from .folded import fold, groups_of
from .held import HIDDEN, MIXTRAL, parameters, parameters_on_rank
from .shown import FOLDED, POLICIES, layer_traffic, policies, published, timeline_of
