"""The model: a transformer, by default of four blocks, small enough for a laptop, shaped like a large one.

Letters in shapes: b sequences of s tokens, hidden size h, a heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # a token is a byte


class Attention(nn.Module):
    """Causal self-attention. Each head has h/a of the columns of q, k and v."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.head_size = hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x):
        """(b, s, h) -> (b, s, h)."""
        q, k, v = (
            matrix(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (b, a, s, h/a)
            for matrix in (self.q, self.k, self.v)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        """Attention to the tokens on this rank. Context parallelism replaces this function by another, which
        also gathers the keys and values of other ranks.
        """
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class MLP(nn.Module):
    """Widen to 4h, apply GELU, narrow to h."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x):
        """(…, h) -> (…, 4h) -> (…, h)."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then MLP: each takes norm(x), and its result is added to x."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.norm2, self.mlp = nn.LayerNorm(hidden), MLP(hidden)

    def forward(self, x):
        """(b, s, h) -> (b, s, h)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Token ids to vectors: the sum of a vector for the token and a vector for its position."""

    places: torch.Tensor | None = None  # (s,), the tokens' positions in the text; None: 0, 1, 2, …

    def __init__(self, hidden: int, seq_len: int, vocabulary: int = VOCABULARY):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(seq_len, hidden)

    def forward(self, tokens):
        """Token ids (b, s) -> (b, s, h)."""
        at = slice(tokens.shape[1]) if self.places is None else self.places
        return self.token(tokens) + self.position.weight[at]


class Head(nn.Module):
    """From each vector the scores of all possible next tokens."""

    def __init__(self, hidden: int, vocabulary: int = VOCABULARY):
        super().__init__()
        self.norm, self.score = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, x):
        """(b, s, h) -> (b, s, vocabulary)."""
        return self.score(self.norm(x))


class ToyTransformer(nn.Sequential):
    """Embedding, blocks, head. A block has 12h² + 4h parameters: its matrices and its norms.

    hidden: h, a multiple of `heads`. heads: a multiple of 4, so that four ranks can share them. layers: the
    number of blocks. seq_len: the most tokens of a text. seed: for the initial weights; equal seeds give
    equal twins. tied: whether the head uses the embedding's matrix. vocabulary: the number of different
    tokens. Raises ValueError for heads or a hidden size that do not fit.
    """

    def __init__(
        self,
        hidden: int = 256,
        heads: int = 4,
        layers: int = 4,
        seq_len: int = 64,
        seed: int = 0,
        tied: bool = False,
        vocabulary: int = VOCABULARY,
    ):
        if heads % 4 or hidden % heads:
            raise ValueError(
                f"hidden={hidden}, heads={heads}: heads must be a multiple of 4, "
                f"and hidden a multiple of heads; try hidden={max(1, hidden // 4) * 4}, heads=4"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            blocks = (Block(hidden, heads) for _ in range(layers))
            super().__init__(Embedding(hidden, seq_len, vocabulary), *blocks, Head(hidden, vocabulary))
        self.hidden, self.heads, self.seq_len, self.tied = hidden, heads, seq_len, tied
        self.token_parts = 1  # number of parts into which sequence parallelism cuts the tokens between blocks
        if tied:
            self[-1].score.weight = self[0].token.weight

    @property
    def blocks(self) -> list[Block]:
        """The parts between embedding and head."""
        return list(self)[1:-1]


def make_batch(b: int = 8, s: int = 32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), each (b, s): random bytes, and for each byte the byte that follows it."""
    text = torch.randint(VOCABULARY, (b, s + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def loss_of(scores, targets):
    """Mean cross-entropy over all tokens. For random bytes, an untrained model's is about ln 256 = 5.55."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def twin_step(model: nn.Module, tokens, targets) -> float:
    """Forward and backward in one process. Returns the loss; the gradients stay in the model."""
    loss = loss_of(model(tokens), targets)
    loss.backward()
    return loss.item()
