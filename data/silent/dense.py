"""A small transformer on three axes. Wrong programs are made of it by edits.csv.

Rows are split over dp, tokens over cp, heads and tokens over tp (with sequence parallelism). Tensors are
plain ones, as in Megatron-LM, so every sum over ranks is in this file.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.toy import (
    conjugate, gather_sequence, gather_tokens, my_tokens, scatter_sequence, whole_sequence, zigzag,
)  # fmt: skip
from torch import nn

WORDS, HIDDEN, HEADS, LAYERS, ROWS, TOKENS, NOTHING = 32, 16, 4, 2, 4, 16, -100


class Axis:
    """The group of an axis, its size, and this rank's number in it. Without a mesh the size is 1."""

    def __init__(self, mesh, name):
        there = mesh is not None and name in mesh.mesh_dim_names
        self.group = mesh.get_group(name) if there else None
        self.size, self.rank = (
            (dist.get_world_size(self.group), dist.get_rank(self.group)) if there else (1, 0)
        )

    def sum(self, tensor):
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def mean(self, tensor):
        return self.sum(tensor).div_(self.size)


def places(cp):
    """The positions of this rank's tokens in the text."""
    return zigzag(TOKENS, cp.size)[cp.rank] if cp.size > 1 else torch.arange(TOKENS)


def turned(x, at):
    """Rotary positions: pairs of features, turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angle = at[:, None] / 100 ** (torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Attention(nn.Module):
    def __init__(self, tp, cp):
        super().__init__()
        self.tp, self.cp = tp, cp
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN // tp.size, bias=False) for _ in range(3))
        self.out = nn.Linear(HIDDEN // tp.size, HIDDEN, bias=False)

    def forward(self, x):
        at = places(self.cp)
        q, k, v = (m(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for m in self.qkv)
        q, k = turned(q, at), turned(k, at)
        every = at
        if self.cp.size > 1:
            k, v = (gather_sequence(y.transpose(1, 2), self.cp.group).transpose(1, 2) for y in (k, v))
            every = torch.cat(zigzag(TOKENS, self.cp.size))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] >= every)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN // tp.size, bias=False)
        self.down = nn.Linear(4 * HIDDEN // tp.size, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, tp, cp):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention(tp, cp)
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN), MLP(tp)
        self.drop = nn.Dropout(0.1)
        self.tp = tp

    def forward(self, x):
        x = x + self.drop(self.whole(self.attention, self.norm1(x)))
        return x + self.drop(self.whole(self.mlp, self.norm2(x)))

    def whole(self, part, x):
        """A part that is split over tp: between the parts each rank has its tokens only."""
        if self.tp.size == 1:
            return part(x)
        return scatter_sequence(part(gather_sequence(x, self.tp.group)), self.tp.group)


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.dp, self.cp, self.tp = (Axis(mesh, name) for name in ("dp", "cp", "tp"))
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block(self.tp, self.cp) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.register_buffer("level", torch.zeros(HIDDEN))  # a running mean of what the head is given
        self.seen = []

    def forward(self, tokens):
        x = self.words(tokens)
        if self.tp.size > 1:
            x = share_sequence(x, self.tp.group)
        for block in self.blocks:
            x = block(x)
        if self.tp.size > 1:
            x = whole_sequence(x, self.tp.group)
        self.seen.append(x.detach().mean((0, 1)))
        return self.norm(x - self.level) @ self.words.weight.T  # the head is the embedding


share_sequence = conjugate(my_tokens, gather_tokens)


def build(mesh):
    torch.manual_seed(0)
    full = Model(None)
    model = Model(mesh)
    split(full, model)
    torch.manual_seed(seed_of(model))
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def split(full, model):
    """Every rank takes its part of the whole model's weights."""
    theirs = dict(full.named_parameters())
    tp = model.tp
    for name, p in model.named_parameters():
        dim = 1 if "out" in name or "down" in name else 0
        part = theirs[name].data
        if part.shape != p.shape:
            part = part.chunk(tp.size, dim)[tp.rank]
        p.data.copy_(part)


def seed_of(model):
    """The seed of dropout: another one for every share of the tokens."""
    return 100 * model.dp.rank + 10 * model.cp.rank + model.tp.rank


def step(model, batch, mesh):
    tokens, targets = batch
    dp, cp, tp = model.dp, model.cp, model.tp
    tokens, targets = (t.chunk(dp.size)[dp.rank][:, places(cp)] for t in (tokens, targets))
    count = cp.sum(dp.sum((targets != NOTHING).sum().to(torch.get_default_dtype())))
    total = torch.zeros(())
    for x, y in zip(tokens.chunk(2), targets.chunk(2)):  # two microbatches
        scores, y = model(x).flatten(0, 1), y.flatten()
        loss = F.cross_entropy(scores, y, reduction="sum", ignore_index=NOTHING) / count
        loss.backward()
        total += loss.detach()
    reduce_gradients(model)
    follow(model)
    clip(model, 0.5)
    return cp.sum(dp.sum(total))


def reduce_gradients(model):
    for name, p in model.named_parameters():
        if model.tp.size > 1 and ".norm" in name:  # they have seen this rank's tokens only
            model.tp.sum(p.grad)
        model.cp.sum(model.dp.sum(p.grad))


def follow(model):
    level = torch.stack(model.seen).mean(0)
    model.level.lerp_(model.cp.mean(model.dp.mean(level)), 0.1)
    model.seen.clear()


def clip(model, most):
    squares = torch.zeros(())
    for name, p in model.named_parameters():
        mine = p.grad.square().sum()
        if model.tp.size > 1 and ("qkv" in name or "out" in name or "mlp" in name):
            mine = model.tp.sum(mine)
        squares += mine
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, squares.sqrt())


def batch():
    """(tokens, targets), (4, 16) each: texts of unequal lengths, padded, and no padding is scored."""
    text = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    tokens, targets = text[:, :-1].clone(), text[:, 1:].clone()
    for row, length in enumerate((16, 12, 5, 9)):
        targets[row, length:] = NOTHING
    return tokens, targets
