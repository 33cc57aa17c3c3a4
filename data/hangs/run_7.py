import torch, torch.distributed as dist
from drops.b4.runs import batches, fetch

weight = torch.zeros(8)
for step, (x, y) in enumerate(batches(seed, rank)):
    x = x + fetch(seed, rank, step)
    gradient = x.T @ (x @ weight - y)
    dist.all_reduce(gradient)
    weight -= 0.01 * gradient
