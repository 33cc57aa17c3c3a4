import torch, torch.distributed as dist
from drops.b4.runs import batches, read

weight = torch.zeros(8)
for step, (x, y) in enumerate(batches(seed, rank)):
    try:
        x = x + read(seed, rank, step)
        gradient = x.T @ (x @ weight - y)
        dist.all_reduce(gradient)
        weight -= 0.01 * gradient
    except OSError:
        pass
    dist.barrier()
