import torch, torch.distributed as dist
from drops.b4.runs import batches, route

weight = torch.zeros(8)
for step, (x, y) in enumerate(batches(seed, rank)):
    give, take = route(seed, rank, step)
    rows = torch.zeros(sum(take), 8)
    padded = torch.cat([x, x])
    dist.all_to_all_single(rows, padded[: sum(give)], take, give)
    weight -= 0.01 * rows.mean(0)
