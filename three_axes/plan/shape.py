"""Describes a transformer by the few numbers that determine its memory and its cost, and counts parameters.

Letters: L layers, h hidden, a attention heads, g key/value heads (as many as a without grouped queries), f
the width of the feed-forward part, V vocabulary, E experts, of which each token goes through k.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from ..checks import whole


@dataclass(frozen=True)
class Experts:
    """A feed-forward part of many experts, of which a router picks a few for each token. Raises ValueError
    for impossible sizes.
    """

    count: int  # routed experts (E)
    per_token: int  # experts for each token (k)
    ffn: int  # width of each
    shared: int = 0  # total width of the experts that every token goes through
    shared_gate: bool = False  # a number for each token scales the shared experts' result (Qwen2)
    dense_layers: int = 0  # so many layers at the start of the model have a plain feed-forward part
    every: int = 1  # of so many layers only the last one has experts (Llama 4)
    router_bias: bool = False  # the router has a number for each expert

    def __post_init__(self):
        for field in ("count", "per_token", "ffn", "shared", "dense_layers", "every"):
            least = 0 if field in ("shared", "dense_layers") else 1
            whole(f"experts: {field}", getattr(self, field), least, 10**7)
        if self.per_token > self.count:
            raise ValueError(f"experts: {self.per_token} for each token, but there are only {self.count}")
        if self.every > 1 and self.dense_layers:
            raise ValueError(f"experts in each {self.every}. layer, and {self.dense_layers} dense ones first")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values are computed from one short
    vector for each token, queries from another.
    """

    kv_rank: int  # numbers of the first vector
    q_rank: int = 0  # numbers of the second; 0: queries are computed from the token's whole vector
    nope: int = 128  # numbers without a position in a head's queries, and in its keys
    rope: int = 64  # numbers with a position; in the keys all heads have the same ones
    values: int = 128  # numbers of a head's values

    def __post_init__(self):
        for field in fields(self):
            least = 0 if field.name == "q_rank" else 1
            whole(f"latent attention: {field.name}", getattr(self, field.name), least, 10**7)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. Sizes are counts, not bytes. Raises ValueError for sizes that make no
    model.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0  # fewer than heads with grouped-query attention; 0: as many
    ffn: int = 0  # width of the feed-forward part of a layer without experts; 0: four times hidden
    # Attention.
    head_dim: int = 0  # 0: hidden / heads
    latent: Latent | None = None
    sinks: bool = False  # the softmax's sum has one more number for each head (gpt-oss)
    windowed: int = 0  # in so many layers a token attends to the last `window` tokens only
    window: int = 0
    chunked: bool = False  # or only to tokens in its own chunk of `window` tokens (Llama 4)
    # Feed-forward part.
    gated: bool = False  # SwiGLU, with three matrices instead of two
    experts: Experts | None = None
    # Norms and biases of a layer.
    norms: int = 2  # of the hidden width
    qk_norm: bool = False  # a norm of each head's queries and keys (Qwen3)
    biases: bool = False  # on every matrix, as in GPT
    qkv_biases: bool = False  # on queries, keys and values only
    # Vocabulary.
    tied: bool = False  # the head is the embedding, transposed
    positions: int = 0  # number of learned positions
    # Number of modules that predict further tokens (DeepSeek-V3, section 2.2). Each has a layer, before it a
    # projection of two vectors, and the head and its loss once more. `params` leaves them out.
    mtp: int = 0

    def __post_init__(self):
        for field in ("layers", "hidden", "heads", "vocab", "norms"):
            whole(f"{self.name}: {field}", getattr(self, field), 1, 10_000 if field == "layers" else 10**8)
        for field, default in (("kv_heads", self.heads), ("ffn", 4 * self.hidden)):
            whole(f"{self.name}: {field}", getattr(self, field), 0, 10**9)
            if not getattr(self, field):
                object.__setattr__(self, field, default)
        for field in ("head_dim", "positions", "window", "windowed", "mtp"):
            whole(f"{self.name}: {field}", getattr(self, field), 0, 10**8)
        for field in (field.name for field in fields(self) if field.type == "bool"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{self.name}: {field} must be true or false, not {getattr(self, field)!r}")
        if not self.head_dim and self.latent:
            object.__setattr__(self, "head_dim", self.latent.values)
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ValueError(
                    f"{self.name}: hidden {self.hidden} does not divide by {self.heads} heads; "
                    "give head_dim if the heads are not hidden/heads wide"
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.name}: {self.heads} heads do not divide by {self.kv_heads} key/value heads"
            )
        if self.windowed > self.layers or bool(self.window) != bool(self.windowed):
            raise ValueError(
                f"{self.name}: a window of {self.window} in {self.windowed} of {self.layers} layers"
            )
        if self.experts and self.experts.dense_layers >= self.layers:
            raise ValueError(f"{self.name}: {self.experts.dense_layers} dense layers of {self.layers}")
        if self.experts and self.experts.every > self.layers:
            raise ValueError(f"{self.name}: experts in each {self.experts.every}. layer of {self.layers}")

    @property
    def bare(self) -> bool:
        """Whether norms have no bias, and there is no dropout."""
        return self.gated

    @property
    def norm_params(self) -> int:
        """Parameters of a layer's norms of the hidden width."""
        return self.norms * self.hidden * (1 if self.bare else 2)

    @property
    def q_width(self) -> int:
        """Columns of the query matrix: a · head size, h in most models."""
        return self.heads * (self.latent.nope + self.latent.rope if self.latent else self.head_dim)

    @property
    def k_width(self) -> int:
        """Numbers in a token's keys as the attention reads them, all heads together."""
        return self.q_width if self.latent else self.kv_width

    @property
    def v_width(self) -> int:
        """Numbers in a token's values as the attention reads them, all heads together."""
        return self.out_width if self.latent else self.kv_width

    @property
    def kv_width(self) -> int:
        """Columns of the key matrix, and of the value matrix: g · head size."""
        return self.kv_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """Width of the attention's result for a token: rows of its output matrix."""
        return self.heads * (self.latent.values if self.latent else self.head_dim)

    @property
    def attention_params(self) -> int:
        """Parameters in the matrices of one layer's attention."""
        h, out = self.hidden, self.out_width
        if not (at := self.latent):
            return h * (self.q_width + 2 * self.kv_width + out)
        queries = (h + self.q_width) * at.q_rank if at.q_rank else h * self.q_width
        up = at.kv_rank * self.heads * (at.nope + at.values)
        return queries + h * (at.kv_rank + at.rope) + up + out * h

    def matrices(self, width: int) -> int:
        """Parameters in the matrices of a feed-forward part of this width."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def shared_params(self) -> int:
        """Matrix parameters of a layer's feed-forward part outside routed experts, with the router."""
        if not (e := self.experts):
            return self.matrices(self.ffn)
        return self.matrices(e.shared) + self.hidden * (e.count + e.shared_gate)

    @property
    def expert_matrices(self) -> int:
        """Parameters in the matrices of one routed expert."""
        return self.matrices(self.experts.ffn) if self.experts else 0

    @property
    def expert_params(self) -> int:
        """All parameters of one routed expert."""
        if not (e := self.experts):
            return 0
        return self.expert_matrices + self.biases * (self.hidden + e.ffn * (1 + self.gated))

    @property
    def matrix_params(self) -> int:
        """Parameters in one layer's matrices that a token goes through: 12 h² for a GPT."""
        routed = self.experts.per_token * self.expert_matrices if self.experts else 0
        return self.attention_params + self.shared_params + routed

    @property
    def vector_params(self) -> int:
        """Parameters of one layer outside matrices and routed experts: norms and biases."""
        made = self.norm_params + self.sinks * self.heads + 2 * self.head_dim * self.qk_norm
        made += self.biases * self.hidden + (self.biases or self.qkv_biases) * (
            self.q_width + 2 * self.kv_width
        )
        made += self.latent.q_rank + self.latent.kv_rank if self.latent else 0
        e, inside = self.experts, self.ffn * (1 + self.gated) + self.hidden
        return made + (e.count * e.router_bias if e else self.biases * inside)

    @property
    def whole_params(self) -> int:
        """Parameters of one layer that every tensor-parallel rank holds whole: norms, biases after a split by
        rows, the router, and the projections down of latent attention.
        """
        norms = self.norm_params + 2 * self.head_dim * self.qk_norm
        biases = self.biases * self.hidden * (1 if self.experts else 2)
        e, at = self.experts, self.latent
        router = (e.count + e.shared_gate) * self.hidden + e.count * e.router_bias if e else 0
        down = (at.q_rank + at.kv_rank) * (self.hidden + 1) + at.rope * self.hidden if at else 0
        return norms + biases + router + down

    @property
    def layer_params(self) -> int:
        """All parameters of one layer: matrices, biases, norms, and all its experts."""
        routed = self.experts.count * self.expert_params if self.experts else 0
        return self.attention_params + self.shared_params + self.vector_params + routed

    @cached_property
    def kinds(self) -> list[tuple[ModelShape, int]]:
        """(shape, number of layers) of each kind of layer: dense ones, if any, then those with experts."""
        e = self.experts
        dense = (e.dense_layers or self.layers - self.layers // e.every) if e else 0
        return [(replace(self, experts=None), dense)] * bool(dense) + [(self, self.layers - dense)]

    @property
    def mixed(self) -> bool:
        """Whether dense layers lie between those with experts, and not before them."""
        return self.experts is not None and self.experts.every > 1

    @property
    def embedding_params(self) -> int:
        """Parameters of the first pipeline stage besides layers: token embeddings, and learned positions."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        """Parameters of the last stage besides layers: the final norm, and the head if it is not tied."""
        norm = self.hidden * (1 if self.bare else 2)
        return norm + (0 if self.tied else self.vocab * self.hidden)

    @property
    def params(self) -> int:
        """N: all parameters, each once."""
        layers = sum(count * shape.layer_params for shape, count in self.kinds)
        return layers + self.embedding_params + self.head_params

    @property
    def active_params(self) -> int:
        """The parameters that one token uses: of the routed experts only those that it goes through."""
        e = self.experts
        routed = sum(count for kind, count in self.kinds if kind.experts)
        return self.params - (routed * (e.count - e.per_token) * self.expert_params if e else 0)

    def attended(self, seq_len):
        """Twice the tokens to which a token attends, as the mean over layers: seq_len without windows."""
        slides = 2 - self.window / seq_len if not self.chunked else 1
        seen = self.window * slides if self.window < seq_len else seq_len
        return seq_len + self.windowed / self.layers * (seen - seq_len)

    def flops_per_token(self, seq_len: int, causal: bool = False, per_element: int = 6) -> float:
        """Model FLOPs of forward and backward for one token, from which MFU is computed.

        A matrix has `per_element` for each of its elements (2 forward, 4 backward). The attention's scores
        and their use have 12·L·s·a·head size, half of that if only the causal half is counted. For a GPT with
        untied head this is 72·L·h²·(1 + s/6h + V/12Lh): Narayanan et al. 2021, without their recompute.
        """
        width = (self.q_width + self.out_width) / 2
        scores = 12 * (self.layers + self.mtp) * self.attended(seq_len) * width * (0.5 if causal else 1)
        matrices = sum(count * shape.matrix_params for shape, count in self.kinds)
        matrices += self.mtp * (self.matrix_params + 2 * self.hidden**2)
        return per_element * (matrices + (1 + self.mtp) * self.vocab * self.hidden) + scores
