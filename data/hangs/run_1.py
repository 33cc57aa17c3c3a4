import torch, torch.distributed as dist
from drops.b4.runs import batches

weight, labels = torch.zeros(8), torch.zeros(4, 1)
for x, y in batches(seed, rank):
    gradient = x.T @ (x @ weight - y)
    if (y > 0).any():
        mean = y[y > 0].mean().reshape(1)
        dist.all_gather(list(labels), mean)
        gradient += labels.mean() - mean
    dist.all_reduce(gradient)
    weight -= 0.01 * gradient
