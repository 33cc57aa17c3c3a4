"""Model shapes: the few numbers of a transformer that decide what it weighs and costs.

Letters: L layers, h hidden, a attention heads, g key/value heads (a of them without grouped queries), f the
width of the feed-forward part, V vocabulary; of experts E, of which each token goes through k.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from ..paper.checks import whole


@dataclass(frozen=True)
class Experts:
    """A feed-forward part of many, a few of which a router picks for each token.

    count: how many are routed to (E). per_token: how many each token goes through (k). ffn: the width of
    each. shared: the width of those that every token goes through, together. shared_gate: a number a token
    scales what these give (Qwen2). dense_layers: the first so many layers of the model have a plain
    feed-forward part. router_bias: a number an expert. latent: routed experts see so many numbers of a token,
    which one matrix makes and another takes back (Nemotron 3 Super). Raises ValueError for sizes that cannot
    be.
    """

    count: int
    per_token: int
    ffn: int
    shared: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    router_bias: bool = False
    latent: int = 0

    def __post_init__(self):
        for field in ("count", "per_token", "ffn", "shared", "dense_layers", "latent"):
            least = 0 if field in ("shared", "dense_layers", "latent") else 1
            whole(f"experts: {field}", getattr(self, field), least, 10**7)
        if self.per_token > self.count:
            raise ValueError(f"experts: {self.per_token} for each token, but there are only {self.count}")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values come from one short vector a
    token, of kv_rank numbers, and queries from another, of q_rank (0: from the token itself). A head has
    `nope` numbers without and `rope` with a position, and values of `values`; the rope part of the keys is
    one for all heads.
    """

    kv_rank: int
    q_rank: int = 0
    nope: int = 128
    rope: int = 64
    values: int = 128

    def __post_init__(self):
        for field in fields(self):
            least = 0 if field.name == "q_rank" else 1
            whole(f"latent attention: {field.name}", getattr(self, field.name), least, 10**7)


@dataclass(frozen=True)
class Recurrent:
    """In place of attention: Mamba-2 (Dao and Gu 2024, section 7) or a gated delta network (Yang and others
    2024).

    heads of head_dim numbers each, and `groups` of pairs of `state` numbers (B and C; queries and keys).
    conv: tokens that the convolution over all of these sees. gates: numbers a head and token; Mamba-2 has 1,
    a gated delta network 2. chunk: tokens that are worked out together. Raises ValueError for sizes below 1.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int = 4
    gates: int = 1
    chunk: int = 128

    def __post_init__(self):
        for field in fields(self):
            whole(f"recurrence: {field.name}", getattr(self, field.name), 1, 10**7)

    @property
    def inner(self) -> int:
        """What all heads give for a token."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """What the convolution goes over."""
        return self.inner + 2 * self.groups * self.state

    @property
    def width(self) -> int:
        """Columns of the matrix that everything comes from; as many more as heads give scale the result."""
        return self.inner + self.mixed + self.gates * self.heads

    @property
    def flops(self) -> float:
        """Of a token's forward, without its matrices: within a chunk as an attention, and to and from the
        state of each head.
        """
        within = self.chunk * (self.state * self.groups + self.head_dim * self.heads) * self.gates
        return 2.0 * within + 4.0 * self.state * self.inner * (1 + (self.gates > 1) / 2)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. Sizes are counts, not bytes.

    kv_heads: fewer than heads with grouped-query attention. gated: a SwiGLU feed-forward part, with
    three matrices instead of two. biases: on every matrix of a block, as GPT has. qkv_biases: on
    those three only. tied: the head is the embedding, transposed. positions: learned ones, 0 if none.
    qk_norm: a norm of each head's queries and keys (Qwen3). norms: of the hidden width, in a layer. sinks: a
    number a head in the softmax's sum (gpt-oss). window, windowed: in so many layers a token sees only the
    last `window` tokens; chunked: or those of its part of the sequence, of as many (Llama 4). mtp: modules
    behind the last layer that predict further tokens (DeepSeek-V3, section 2.2), each a layer, the projection
    of two vectors before it, and the head and its loss once more; they are no part of `params`. experts,
    latent: see there; `ffn` is then the width of the dense layers. rms: norms without biases and no dropout,
    as gated models have. output_gate: as many numbers as queries have scale the attention's result
    (Qwen3-Next). recurrent: in place of attention. part: what a layer has, "both" parts or one, "mixer" or
    "feed-forward". others: kinds of layers beside this one, each with how many of the `layers` it takes; they
    lie mixed evenly. Raises ValueError for sizes that make no model.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0  # 0: as many as heads
    ffn: int = 0  # 0: four times hidden
    head_dim: int = 0  # 0: hidden / heads
    gated: bool = False
    biases: bool = False
    qkv_biases: bool = False
    tied: bool = False
    positions: int = 0
    qk_norm: bool = False
    norms: int = 2
    sinks: bool = False
    window: int = 0
    windowed: int = 0
    chunked: bool = False
    mtp: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    rms: bool = False
    output_gate: bool = False
    recurrent: Recurrent | None = None
    part: str = "both"
    others: tuple[tuple[ModelShape, int], ...] = ()

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
        if self.part not in ("both", "mixer", "feed-forward"):
            raise ValueError(
                f"{self.name}: a layer has both parts, a mixer or a feed-forward, not {self.part!r}"
            )
        if sum(count for _, count in self.others) >= self.layers:
            raise ValueError(f"{self.name}: other kinds take all {self.layers} layers")

    @property
    def bare(self) -> bool:
        """Whether norms have no bias, and nothing is dropped."""
        return self.gated or self.rms

    @property
    def attends(self) -> bool:
        """Whether a layer of this kind has an attention."""
        return self.part != "feed-forward" and not self.recurrent

    @property
    def norm_params(self) -> int:
        """Of a layer's norms of the hidden width."""
        of_parts = self.norms if self.part == "both" else self.norms // 2
        return of_parts * self.hidden * (1 if self.bare else 2)

    @property
    def q_width(self) -> int:
        """Columns of the query matrix: a · head size, h in most models."""
        return self.heads * (self.latent.nope + self.latent.rope if self.latent else self.head_dim)

    @property
    def k_width(self) -> int:
        """Keys of a token that the attention reads, all heads together."""
        return self.q_width if self.latent else self.kv_width

    @property
    def v_width(self) -> int:
        """Its values."""
        return self.out_width if self.latent else self.kv_width

    @property
    def kv_width(self) -> int:
        """Columns of the key matrix, and of the value matrix: g · head size."""
        return self.kv_heads * self.head_dim

    @property
    def out_width(self) -> int:
        """What the attention gives for a token: rows of its output matrix."""
        return self.heads * (self.latent.values if self.latent else self.head_dim)

    @property
    def attention_params(self) -> int:
        """In the matrices of one layer's attention, or of what stands in its place."""
        h, out, r = self.hidden, self.out_width, self.recurrent
        if self.part == "feed-forward":
            return 0
        if r:
            return h * (r.width + r.inner)
        if not (at := self.latent):
            return h * (self.q_width * (1 + self.output_gate) + 2 * self.kv_width + out)
        queries = (h + self.q_width) * at.q_rank if at.q_rank else h * self.q_width
        up = at.kv_rank * self.heads * (at.nope + at.values)
        return queries + h * (at.kv_rank + at.rope) + up + out * h

    def matrices(self, width: int, seen: int = 0) -> int:
        """Parameters in the matrices of a feed-forward part. seen: numbers of a token, 0 for all."""
        return (3 if self.gated else 2) * (seen or self.hidden) * width

    @property
    def shared_params(self) -> int:
        """What each token goes through in a layer's feed-forward part, whatever the router says."""
        if self.part == "mixer":
            return 0
        if not (e := self.experts):
            return self.matrices(self.ffn)
        return self.matrices(e.shared) + self.hidden * (e.count + e.shared_gate + 2 * e.latent)

    @property
    def expert_matrices(self) -> int:
        """Parameters in the matrices of one routed expert."""
        return self.matrices(self.experts.ffn, self.experts.latent) if self.experts else 0

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
        """Of one layer, what is no matrix and no routed expert's: norms and biases."""
        made = self.norm_params
        if self.attends:
            made += self.sinks * self.heads + 2 * self.head_dim * self.qk_norm + self.biases * self.hidden
            made += (self.biases or self.qkv_biases) * (self.q_width + 2 * self.kv_width)
            made += self.latent.q_rank + self.latent.kv_rank if self.latent else 0
        if r := self.recurrent:  # Mamba-2's convolution has a bias, and its norm all heads' width
            mamba = r.gates == 1
            made += r.mixed * (r.conv + mamba) + (2 + mamba) * r.heads + (r.inner if mamba else r.head_dim)
        if self.part == "mixer":
            return made
        e, inside = self.experts, self.ffn * (1 + self.gated) + self.hidden
        return made + (e.count * e.router_bias if e else self.biases * inside)

    @property
    def whole_params(self) -> int:
        """Of one layer, what every tensor-parallel rank holds whole: norms, biases behind a split by rows,
        the router, the ways to and from experts' latent numbers, and those down of latent attention.
        """
        norms = self.norm_params + 2 * self.head_dim * self.qk_norm * self.attends
        biases = self.biases * self.hidden * (1 if self.experts else 2)
        e, at = self.experts, self.latent
        router = (e.count + e.shared_gate + 2 * e.latent) * self.hidden + e.count * e.router_bias if e else 0
        down = (at.q_rank + at.kv_rank) * (self.hidden + 1) + at.rope * self.hidden if at else 0
        return norms + biases + router + down

    @property
    def layer_params(self) -> int:
        """All parameters of one layer: matrices, biases, norms, and all its experts."""
        routed = self.experts.count * self.expert_params if self.experts else 0
        return self.attention_params + self.shared_params + self.vector_params + routed

    @cached_property
    def kinds(self) -> list[tuple[ModelShape, int]]:
        """(shape, how many): its kinds of layers, the last of them the usual one. Dense layers before those
        with experts lie at its start.
        """
        first = self.experts.dense_layers if self.experts else 0
        dense = [(replace(self, experts=None), first)] if first else []
        usual = replace(self, others=()) if self.others else self
        return [*dense, *self.others, (usual, self.layers - first - sum(n for _, n in self.others))]

    @property
    def embedding_params(self) -> int:
        """On the first pipeline stage: tokens, and positions where they are learned."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        """On the last stage: the final norm, and the head. A tied one counts as the embedding."""
        norm = self.hidden * (1 if self.bare else 2)
        return norm + (0 if self.tied else self.vocab * self.hidden)

    @property
    def params(self) -> int:
        """N: all parameters, each once."""
        layers = sum(count * shape.layer_params for shape, count in self.kinds)
        return layers + self.embedding_params + self.head_params

    def attended(self, seq_len):
        """Tokens that one looks at, in the mean over layers, in units of a whole sequence's causal half."""
        slides = 2 - self.window / seq_len if not self.chunked else 1
        seen = self.window * slides if self.window < seq_len else seq_len
        return seq_len + self.windowed / self.layers * (seen - seq_len)

    def flops_per_token(self, seq_len: int, causal: bool = False, per_element: int = 6) -> float:
        """Model FLOPs of forward and backward for one token: what MFU divides by.

        `per_element` of a matrix (2 forward, 4 backward), and 12·L·s·a·head size for the attention
        scores and their use; half of that if only the causal half is counted. For a GPT with
        untied head this is 72·L·h²·(1 + s/6h + V/12Lh), Narayanan et al. 2021, without their recompute.
        """
        width = (self.q_width + self.out_width) / 2
        layers = sum(count * shape.attends for shape, count in self.kinds) + self.mtp
        scores = 12 * layers * self.attended(seq_len) * width * (0.5 if causal else 1)
        scores += 3 * sum(count * shape.recurrent.flops for shape, count in self.kinds if shape.recurrent)
        matrices = sum(count * shape.matrix_params for shape, count in self.kinds)
        matrices += self.mtp * (self.matrix_params + 2 * self.hidden**2)
        return per_element * (matrices + (1 + self.mtp) * self.vocab * self.hidden) + scores


def with_experts_each(model: ModelShape, every: int) -> ModelShape:
    """Experts in the last of each `every` layers alone."""
    others = ((replace(model, experts=None), model.layers - model.layers // every),)
    return replace(model, others=others) if every > 1 else model


def with_recurrence(model: ModelShape, count: int, recurrent: Recurrent) -> ModelShape:
    """So many of the layers have a recurrence in place of attention."""
    return replace(model, others=((replace(model, recurrent=recurrent), count),)) if count else model


def of_parts(model: ModelShape, many: dict[str, int], recurrent: Recurrent) -> ModelShape:
    """A layer is one part, as in Nemotron-H: M a recurrence, * attention, - a feed-forward part, E experts.
    many: of each.
    """
    plain = replace(model, experts=None)
    parts = {
        "M": replace(plain, recurrent=recurrent, part="mixer"),
        "*": replace(plain, part="mixer"),
        "-": replace(plain, part="feed-forward"),
        "E": replace(model, part="feed-forward"),
    }
    *others, usual = (kind for kind in parts if many.get(kind))
    return replace(parts[usual], others=tuple((parts[kind], many[kind]) for kind in others))
