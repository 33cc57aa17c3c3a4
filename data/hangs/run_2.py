import torch, torch.distributed as dist
from drops.b4.runs import batches, settings

writer, save_at = settings(seed)
weight, copies = torch.zeros(8), torch.zeros(4, 8)
for step, (x, y) in enumerate(batches(seed, rank)):
    gradient = x.T @ (x @ weight - y)
    dist.all_reduce(gradient)
    weight -= 0.01 * gradient
    if step == save_at and rank == writer:
        dist.all_gather(list(copies), weight)
        torch.save(copies, "weights.pt")
