"""Names that PyTorch has changed: from 2.13 on reduce_scatter_tensor is called reduce_scatter_single, and
all_gather_into_tensor is called all_gather_single.
"""

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
