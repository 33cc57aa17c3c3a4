"""A small model under ZeRO-1, written by hand. Wrong programs are made of it by edits.csv.

Gradients are summed over dp in buckets while backward runs. All weights are laid end to end and padded. Each
rank keeps the optimizer states of one piece of them, updates this piece, and gathers the others.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORDS, HIDDEN, ROWS, TOKENS = 32, 15, 8, 8


def model_of():
    return nn.Sequential(
        nn.Embedding(WORDS, HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN),
        nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS),
    )  # fmt: skip


class Sharded:
    """AdamW on this rank's piece of the weights."""

    def __init__(self, model, group):
        self.parameters, self.group = list(model.parameters()), group
        self.size, self.rank = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
        self.length = -(-sum(p.numel() for p in self.parameters) // self.size)
        self.piece = self.flat([p.data for p in self.parameters])[self.rank].clone()
        self.adam = torch.optim.AdamW([self.piece], lr=0.01, weight_decay=0.1)

    def flat(self, tensors):
        """The tensors end to end, as (ranks, length of a piece); the last piece is padded with zeros."""
        line = torch.cat([t.flatten() for t in tensors])
        return F.pad(line, (0, self.size * self.length - len(line))).view(self.size, -1)

    def step(self):
        self.piece.grad = self.flat([p.grad for p in self.parameters])[self.rank].clone()
        self.adam.step()
        pieces = [torch.empty_like(self.piece) for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(pieces, self.piece, group=self.group)
        else:
            pieces = [self.piece]
        line = torch.cat(pieces)
        for p in self.parameters:
            p.data.copy_(line[: p.numel()].view_as(p))
            line = line[p.numel() :]

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class Buckets:
    """Gradients in buckets of at least `most` numbers; the all-reduce of a full bucket begins at once."""

    def __init__(self, model, group, most=1000):
        self.group, self.most, self.ready, self.under_way = group, most, [], []
        self.last = True  # whether this backward is the last of the step
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.there)

    def there(self, p):
        if self.last:
            self.ready.append(p)
            if sum(q.numel() for q in self.ready) >= self.most:
                self.send()

    def send(self):
        flat = torch.cat([p.grad.flatten() for p in self.ready])
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.under_way.append((work, flat, list(self.ready)))
        self.ready.clear()

    def finish(self):
        if self.ready:
            self.send()
        size = dist.get_world_size(self.group)
        for work, flat, parameters in self.under_way:
            work.wait()
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad.copy_(part.view_as(p) / size)
        self.under_way.clear()


def build(mesh):
    torch.manual_seed(0)
    model, group = model_of(), mesh.get_group("dp") if mesh else None
    model.buckets = Buckets(model, group) if mesh else None
    return model, Sharded(model, group)


def step(model, batch, mesh):
    size, rank = (mesh.size(), mesh.get_local_rank("dp")) if mesh else (1, 0)
    tokens, targets = (t.chunk(size)[rank] for t in batch)
    total = torch.zeros(())
    for i, (x, y) in enumerate(zip(tokens.chunk(2), targets.chunk(2))):
        if model.buckets:
            model.buckets.last = i == 1
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
        loss.backward()
        total += loss.detach()
    if model.buckets:
        model.buckets.finish()
    return total


def batch():
    """(tokens, targets), (8, 8) each."""
    text = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].clone(), text[:, 1:].clone()
