"""A small pipeline with plain sends and receives. Wrong programs are made of it by edits.csv.

Layers are split over pp, rows over dp. The head is the embedding: the first and the last stage have a copy of
it each.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORDS, HIDDEN, LAYERS, ROWS, TOKENS, MICROBATCHES = 32, 16, 4, 4, 8, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x):
        y = torch.cummax(x, 1)[0]  # of the tokens before
        return x + self.down(F.gelu(self.up(self.norm(y))))


class Stage(nn.Module):
    """The layers of one pipeline stage; the first and the last stage also have the embedding."""

    def __init__(self, number, stages):
        super().__init__()
        each = LAYERS // stages
        self.number, self.last = number, stages - 1
        if number in (0, stages - 1):
            self.words = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(number * each, (number + 1) * each)})

    def forward(self, x):
        if self.number == 0:
            x = self.words(x)
        for layer in self.layers.values():
            x = layer(x)
        return x @ self.words.weight.T if self.number == self.last else x


def build(mesh):
    torch.manual_seed(0)
    full = Stage(0, 1)
    model = Stage(*((mesh.get_local_rank("pp"), mesh["pp"].size()) if mesh else (0, 1)))
    load(model, full.state_dict())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def load(model, saved):
    model.load_state_dict({name: saved[name] for name in model.state_dict()})


def step(model, batch, mesh):
    if mesh is None:
        return whole(model, batch)
    pp, dp = mesh.get_group("pp"), mesh.get_group("dp")
    tokens, targets = (t.chunk(dist.get_world_size(dp))[dist.get_rank(dp)] for t in batch)
    losses = []
    for x, y in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES)):
        losses.append(microbatch(model, x, y, pp))
    reduce_gradients(model, pp, dp)
    clip(model, pp)
    return torch.stack(losses).sum() if model.number == model.last else None


def microbatch(model, x, y, pp):
    if model.number > 0:
        x = torch.empty(*x.shape, HIDDEN)
        dist.recv(x, group=pp, group_src=model.number - 1)
        x.requires_grad_()
    out = model(x)
    if model.number == model.last:
        loss = F.cross_entropy(out.flatten(0, 1), y.flatten()) / MICROBATCHES
        loss.backward()
    else:
        dist.send(out.detach(), group=pp, group_dst=model.number + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, group=pp, group_src=model.number + 1)
        out.backward(gradient)
    if model.number > 0:
        dist.send(x.grad, group=pp, group_dst=model.number - 1)
    return loss.detach() if model.number == model.last else None


def whole(model, batch):
    loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.detach()


def reduce_gradients(model, pp, dp):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=dp)
        p.grad /= dist.get_world_size(dp)
    if model.last > 0:
        gradient = model.words.weight.grad if hasattr(model, "words") else torch.zeros(WORDS, HIDDEN)
        dist.all_reduce(gradient, group=pp)  # the two copies are one tensor


def clip(model, pp):
    squares = torch.zeros(())
    for name, p in model.named_parameters():
        copies = 2 if name == "words.weight" and model.last > 0 else 1
        squares += p.grad.square().sum() / copies
    dist.all_reduce(squares, group=pp)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, squares.sqrt())


def batch():
    """(tokens, targets), (4, 8) each."""
    text = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].clone(), text[:, 1:].clone()
