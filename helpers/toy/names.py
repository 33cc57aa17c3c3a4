"""Names that PyTorch has changed: from 2.13 on reduce_scatter_tensor is called reduce_scatter_single."""

import torch.distributed as dist

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
