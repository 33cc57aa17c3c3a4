"""A small model with four experts, split over ep. Wrong programs are made of it by edits.csv.

Each rank has other rows of the batch and, of each layer, some experts. An auxiliary loss keeps the router
even.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.toy import swap
from torch import nn

WORDS, HIDDEN, EXPERTS, ROWS, TOKENS = 32, 16, 4, 4, 8


class Experts(nn.Module):
    """Each token goes to the expert that the router prefers; (tokens, h) -> the same."""

    def __init__(self, size, rank, group):
        super().__init__()
        self.size, self.group = size, group
        self.mine = range(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): nn.Linear(HIDDEN, HIDDEN) for e in self.mine})

    def forward(self, x):
        chances = self.router(x).softmax(-1)
        weight, chosen = chances.max(-1)
        self.uneven = EXPERTS * (share(chosen) * chances.mean(0)).sum()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        rows, theirs = self.to_experts(x[order], counts)
        out = self.from_experts(self.work(rows, theirs), counts, theirs)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return x + weight[:, None] * out[back]

    def to_experts(self, rows, counts):
        """(the rows for this rank's experts; how many rows came from each rank for each of them)."""
        if self.size == 1:
            return rows, counts[None]
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        theirs = theirs.view(self.size, -1)
        return swap(
            rows, counts.view(self.size, -1).sum(1).tolist(), theirs.sum(1).tolist(), self.group
        ), theirs

    def from_experts(self, rows, counts, theirs):
        if self.size == 1:
            return rows
        return swap(rows, theirs.sum(1).tolist(), counts.view(self.size, -1).sum(1).tolist(), self.group)

    def work(self, rows, theirs):
        parts = rows.split(theirs.flatten().tolist())
        names = [str(e) for _ in range(self.size) for e in self.mine]
        return torch.cat([F.gelu(self.experts[name](part)) for name, part in zip(names, parts)])


def share(chosen):
    return torch.bincount(chosen, minlength=EXPERTS) / chosen.numel()


class Model(nn.Module):
    def __init__(self, size, rank, group):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, WORDS)
        self.layers = nn.ModuleList(Experts(size, rank, group) for _ in range(2))

    def forward(self, tokens):
        x = self.words(tokens).flatten(0, -2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(mesh):
    torch.manual_seed(0)
    full = Model(1, 0, None)
    model = full
    if mesh is not None:
        ep = mesh.get_group("ep")
        model = Model(dist.get_world_size(ep), dist.get_rank(ep), ep)
        saved = full.state_dict()
        model.load_state_dict({name: saved[name] for name in model.state_dict()})
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def step(model, batch, mesh):
    """Each rank takes other rows: for all parameters but the experts', edp and ep together are dp."""
    mine, shares = (dist.get_rank(), mesh.size()) if mesh is not None else (0, 1)
    tokens, targets = batch
    loss = torch.zeros(())
    for x, y in zip(tokens.chunk(ROWS)[mine::shares], targets.chunk(ROWS)[mine::shares]):
        part = F.cross_entropy(model(x), y.flatten()) + 0.1 * sum(layer.uneven for layer in model.layers)
        part = part * shares / ROWS
        part.backward()
        loss += part.detach()
    if mesh is not None:
        reduce_gradients(model, mesh, shares)
    return loss


def reduce_gradients(model, mesh, shares):
    for name, p in model.named_parameters():
        if p.grad is None:  # an expert that nobody chose
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, group=mesh.get_group("edp"))
        if ".experts." not in name:
            dist.all_reduce(p.grad, group=mesh.get_group("ep"))
        p.grad /= shares


def batch():
    """(tokens, targets), (4, 8) each."""
    text = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].clone(), text[:, 1:].clone()
