"""The one model of this course, and three ways to split it.

A transformer of four blocks, small enough for a laptop and shaped like a large one:
only `hidden`, `heads` and the length of the text are ever changed. `ToyTransformer` run in
one process is the *twin*: a split is right when its loss, gradients and updated weights
are the twin's.

    split            each rank holds             what moves, and when
    data   (DP)      the model, 1/d of the batch  gradients, once a step
    tensor (TP)      1/t of the blocks' matrices  activations and their gradients, four times a block
    pipeline (PP)    1/p of the blocks            activations at the p-1 boundaries

Letters as everywhere in the course: b sequences, s tokens each, h hidden, a heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

VOCABULARY = 256  # a token is a byte


# -- the model -------------------------------------------------------------------------------

class Attention(nn.Module):
    """Causal self-attention. The columns of q, k and v belong to heads: h/a of them each."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x):  # (b, s, h)
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, a, s, h/a)
                   for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # (b, s, h)


class MLP(nn.Module):
    """Widen to 4h, bend, narrow to h."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x):  # (b, s, h)
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.norm2, self.mlp = nn.LayerNorm(hidden), MLP(hidden)

    def forward(self, x):  # (b, s, h)
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Token ids to vectors: what the token is, plus where it stands."""

    def __init__(self, hidden: int, seq_len: int):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, hidden), nn.Embedding(seq_len, hidden)

    def forward(self, tokens):  # (b, s) -> (b, s, h)
        return self.token(tokens) + self.position.weight[:tokens.shape[1]]


class Head(nn.Module):
    """Vectors to a score for each possible next token."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm, self.score = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, x):  # (b, s, h) -> (b, s, 256)
        return self.score(self.norm(x))


class ToyTransformer(nn.Sequential):
    """embedding, four blocks, head: 12h² parameters a block, and some at the ends.

    hidden: a multiple of `heads`. heads: a multiple of 4, so that four ranks can share them.
    seq_len: the longest text it can read. seed: of the weights; equal seeds give equal twins.
    Raises ValueError for sizes that do not fit.
    """

    def __init__(self, hidden: int = 256, heads: int = 4, layers: int = 4, seq_len: int = 64, seed: int = 0):
        if heads % 4 or hidden % heads:
            raise ValueError(f"hidden={hidden}, heads={heads}: heads must be a multiple of 4, "
                             f"and hidden a multiple of heads; try hidden={max(1, hidden // 4) * 4}, heads=4")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(Embedding(hidden, seq_len), *(Block(hidden, heads) for _ in range(layers)), Head(hidden))
        self.hidden, self.heads, self.seq_len = hidden, heads, seq_len

    @property
    def blocks(self) -> list[Block]:
        return list(self)[1:-1]


def make_batch(b: int = 8, s: int = 32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), each (b, s): random bytes, and for each the byte that follows it."""
    text = torch.randint(VOCABULARY, (b, s + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def loss_of(scores, targets):
    """Mean cross-entropy over all tokens. A model that knows nothing of random bytes scores ln 256 = 5.55."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def twin_step(model: nn.Module, tokens, targets) -> float:
    """Forward and backward in one process. Returns the loss; the gradients stay in the model."""
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return loss.item()


def share_weights(model: nn.Module, group=None) -> None:
    """Give every rank rank 0's weights, whatever seed it began with."""
    for p in model.parameters():
        dist.broadcast(p.data, group_src=0, group=group or dist.group.WORLD)


# -- data parallel: split the batch ---------------------------------------------------------

def my_share(tensor, rank: int, size: int):
    """The rows of `tensor` that `rank` of `size` works on; the first ranks take one more where they do not divide."""
    return torch.tensor_split(tensor, size)[rank]


def average_gradients(model: nn.Module, group=None) -> None:
    """One all-reduce over all gradients, laid end to end, then divide: the mean of the ranks' gradients."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat, group=group)
    vector_to_parameters(flat / dist.get_world_size(group), gradients)


def data_parallel_step(model: nn.Module, tokens, targets, group=None) -> float:
    """`twin_step` with the batch split over the ranks of `group`. Returns the loss of this rank's share.

    The mean of the ranks' losses is the twin's. Raises ValueError if the batch does not divide:
    the mean over unequal shares would be another loss.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if len(tokens) % size:
        raise ValueError(f"a batch of {len(tokens)} does not divide by {size} ranks; take a multiple of {size}")
    loss = loss_of(model(my_share(tokens, rank, size)), my_share(targets, rank, size))
    loss.backward()
    average_gradients(model, group)
    return loss.item()


# -- tensor parallel: split the matrices ----------------------------------------------------

class Enter(torch.autograd.Function):
    """f of Megatron-LM (Shoeybi et al. 2019, figure 3): forward the same x everywhere, backward the sum of dx."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dx = dx.contiguous()
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class Leave(torch.autograd.Function):
    """g of Megatron-LM: forward the sum of the ranks' partial y, backward the same dy everywhere."""

    @staticmethod
    def forward(ctx, y, group):
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def split_width(model: ToyTransformer, group=None) -> ToyTransformer:
    """Keep this rank's columns of q, k, v, up and rows of out, down. The model is changed in place and returned.

    A column split makes each rank's output a part of the vector; the row split that
    follows takes just that part in. So a pair needs one sum, at its end, and that sum's
    mirror image in backward, at its start.
    Raises ValueError if the group's size does not divide heads.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if model.heads % size:
        raise ValueError(f"{model.heads} heads do not divide by {size} ranks; "
                         f"use a number of ranks that divides {model.heads}, or more heads")
    for block in model.blocks:
        block.attention.heads //= size
        for part, columns, rows in ((block.attention, ("q", "k", "v"), ("out",)), (block.mlp, ("up",), ("down",))):
            for name in columns:
                _keep(getattr(part, name), rank, size, dim=0)  # nn.Linear stores its matrix transposed
            for name in rows:
                _keep(getattr(part, name), rank, size, dim=1)
            part.register_forward_pre_hook(lambda _, args: (Enter.apply(args[0], group),))
            part.register_forward_hook(lambda _, args, y: Leave.apply(y, group))
    return model


def _keep(linear: nn.Linear, rank: int, size: int, dim: int) -> None:
    linear.weight = nn.Parameter(linear.weight.data.chunk(size, dim)[rank].clone(),
                                 requires_grad=linear.weight.requires_grad)


tensor_parallel_step = twin_step  # every rank sees the whole batch and ends with the whole loss


# -- pipeline parallel: split the layers ----------------------------------------------------

def split_depth(model: ToyTransformer, group=None) -> nn.Sequential:
    """This rank's stage: its share of the blocks, with the embedding on the first and the head on the last.

    Raises ValueError if the group's size does not divide the number of blocks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    blocks = model.blocks
    if len(blocks) % size:
        raise ValueError(f"{len(blocks)} blocks do not divide by {size} stages; "
                         f"use a number of stages that divides {len(blocks)}")
    each = len(blocks) // size
    stage = nn.Sequential(*blocks[rank * each:(rank + 1) * each])
    if rank == 0:
        stage.insert(0, model[0])
    if rank == size - 1:
        stage.append(model[-1])
    stage.hidden = model.hidden
    return stage


def pipeline_step(stage: nn.Sequential, tokens, targets, group=None) -> float | None:
    """`twin_step` with the layers split: activations go down the line, gradients come back up.

    Returns the loss on the last rank, None on the others.
    """
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    if rank == 0:
        x = tokens
    else:
        x = torch.empty(*tokens.shape, stage.hidden, dtype=next(stage.parameters()).dtype)
        dist.recv(x, group_src=rank - 1, group=group)
        x.requires_grad_()  # so that backward leaves us a gradient to send
    y = stage(x)
    if rank == last:
        loss = loss_of(y, targets)
        loss.backward()
    else:
        dist.send(y.detach(), group_dst=rank + 1, group=group)
        dy = torch.empty_like(y)
        dist.recv(dy, group_src=rank + 1, group=group)
        y.backward(dy)
    if rank > 0:
        dist.send(x.grad, group_dst=rank - 1, group=group)
    return loss.item() if rank == last else None
