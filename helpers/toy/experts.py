"""Expert parallelism: a router sends each token to k of E experts, and the experts are shared out over ranks.

    count       all-to-all of numbers: how many of its tokens each rank sends to each expert
    dispatch    all-to-all: every token is sent to the ranks of its experts; in backward, its gradient back
    compute     each rank runs its E/ep experts on the rows that it has received
    combine     all-to-all the other way; then each token sums its k answers, weighted by the router

ep is the size of expert parallelism, T a rank's number of tokens. Dispatch sends T·k rows of h numbers, of
which (ep-1)/ep leave the rank if every expert gets equally many tokens. As in Mixtral (Jiang et al. 2024),
the router computes a softmax over all experts, takes the top k, and divides their weights by their sum. The
bias that balances the experts is DeepSeek-V3's (Wang et al. 2024).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .model import MLP


class Experts(nn.Module):
    """E expert MLPs and a router, in place of one MLP. `expert_parallel` spreads the experts over ranks.

    k: experts of each token. bias: added to the scores to choose experts, but not to weight their answers.
    """

    def __init__(self, hidden: int, experts: int = 4, k: int = 2, seed: int = 0):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__()
            self.router = nn.Linear(hidden, experts, bias=False)
            self.experts = nn.ModuleList(MLP(hidden) for _ in range(experts))
        self.k, self.number = k, experts
        self.register_buffer("bias", torch.zeros(experts))

    def route(self, x):
        """(choice, weight), each (T, k): the experts of each token, and the weights of their answers."""
        scores = self.router(x).softmax(-1)
        choice = (scores + self.bias).topk(self.k).indices
        weight = scores.gather(-1, choice)
        return choice, weight / weight.sum(-1, keepdim=True)

    def forward(self, x):
        """(T, h) -> (T, h): for each token the weighted sum of its k experts' answers."""
        choice, weight = self.route(x)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (choice == number).nonzero(as_tuple=True)
            y = y.index_add(0, token, weight[token, slot, None] * expert(x[token]))
        return y


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, give, take, group):
        ctx.sizes, ctx.group = (give, take), group
        coming = rows.new_empty(sum(take), *rows.shape[1:])
        dist.all_to_all_single(coming, rows.contiguous(), take, give, group=group)
        return coming

    @staticmethod
    def backward(ctx, gradient):
        give, take = ctx.sizes
        return _Swap.apply(gradient, take, give, ctx.group), None, None, None


def swap(rows, give: list[int], take: list[int], group=None):
    """All-to-all of rows: the first give[0] go to rank 0, the next to rank 1; take[r] come from rank r."""
    return _Swap.apply(rows, give, take, group)


def split_experts(layer: Experts, group=None) -> Experts:
    """Keep this rank's E/ep experts. The layer is changed in place and returned.

    Raises ValueError if the ranks do not divide the experts.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if layer.number % size:
        raise ValueError(
            f"{layer.number} experts do not divide by {size} ranks; take a number that divides {layer.number}"
        )
    layer.experts = nn.ModuleList(list(layer.experts)[rank * layer.number // size :][: layer.number // size])
    return layer


def expert_parallel(layer: Experts, x, group=None, capacity: int | None = None, compute=None):
    """`layer` on this rank's tokens x (T, h), its experts split over the ranks: (y, load).

    load: (E,), how many of this rank's tokens chose each expert. capacity: rows that an expert takes from one
    rank; a token beyond that is dropped, and that expert's answer to it is 0. compute(layer, rows, counts):
    runs this rank's experts, each on its part of the rows.
    """
    size = dist.get_world_size(group)
    choice, weight = layer.route(x)
    load = choice.flatten().bincount(minlength=layer.number)
    order = choice.flatten().argsort(stable=True)  # the T·k copies, by expert
    give = load
    if capacity is not None:
        place = torch.arange(len(order)) - (load.cumsum(0) - load).repeat_interleave(load)
        order, give = order[place < capacity], load.clamp(max=capacity)
    take = torch.empty_like(give)
    dist.all_to_all_single(take, give, group=group)  # a row for each rank, a column for each expert of mine
    take = take.view(size, -1)
    sizes = give.view(size, -1).sum(1).tolist(), take.sum(1).tolist()

    rows = swap(x[order // layer.k], *sizes, group)
    expert = torch.arange(take.shape[1]).repeat(size).repeat_interleave(take.flatten())  # of each row
    by_expert = expert.argsort(stable=True)
    answers = (compute or run_experts)(layer, rows[by_expert], take.sum(0).tolist())
    answers = torch.zeros_like(answers).index_copy(0, by_expert, answers)  # in the order of arrival
    back = swap(answers, *reversed(sizes), group)
    copies = x.new_zeros(choice.numel(), x.shape[1]).index_copy(0, order, back)
    return (copies.view(*choice.shape, -1) * weight.unsqueeze(-1)).sum(1), load


def run_experts(layer: Experts, rows, counts: list[int]):
    """Run each expert of this rank on its part of the rows."""
    return torch.cat([expert(part) for expert, part in zip(layer.experts, rows.split(counts))])


def average_expert_gradients(layer: Experts, dp, edp) -> None:
    """Make the twin's gradients. The router's are averaged over dp. An expert's are summed over edp, the
    ranks that hold that expert, and divided by the size of dp: the expert has processed tokens of all ranks
    in dp.
    """
    d = dist.get_world_size(dp)
    for name, p in layer.named_parameters():
        dist.all_reduce(p.grad, group=edp if name.startswith("experts") else dp)
        p.grad /= d


def even_out(layer: Experts, load, rate: float) -> None:
    """Move the bias by `rate`: up for experts with less than the mean load, down for experts with more."""
    layer.bias += rate * torch.sign(load.float().mean() - load)
