"""Beyond, b1: FSDP in time: when each layer's weights come, are used, and go."""

from .by_hand import fsdp_layer, one_layer
from .meshed import mesh, shard_model
from .shown import (
    BLOCK,
    LAYERS,
    ONE_NODE,
    SECONDS,
    TWO_NODES,
    WEIGHTS,
    between_nodes,
    hybrid,
    order_timeline,
    side_by_side,
    step_by_pytorch,
    step_traffic,
    whole_at_once,
)
from .when import order, step_order
