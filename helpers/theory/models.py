"""Model shapes: the few numbers of a transformer that decide what it weighs and costs.

Letters: L layers, h hidden, a attention heads, g key/value heads (a of them without
grouped queries), f the width of the feed-forward part, V vocabulary.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from .checks import is_file, read_object, whole


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer. Sizes are counts, not bytes.

    kv_heads: fewer than heads with grouped-query attention. gated: a SwiGLU feed-forward part, with
    three matrices instead of two. biases: on every matrix of a block, as GPT has. qkv_biases: on
    those three only. tied: the head is the embedding, transposed. positions: learned ones, 0 if none.
    Raises ValueError for sizes that make no model.
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

    def __post_init__(self):
        for field in ("layers", "hidden", "heads", "vocab"):
            whole(f"{self.name}: {field}", getattr(self, field), 1, 10_000 if field == "layers" else 10**8)
        for field, default in (("kv_heads", self.heads), ("ffn", 4 * self.hidden)):
            whole(f"{self.name}: {field}", getattr(self, field), 0, 10**9)
            if not getattr(self, field):
                object.__setattr__(self, field, default)
        for field in ("head_dim", "positions"):
            whole(f"{self.name}: {field}", getattr(self, field), 0, 10**8)
        for field in ("gated", "biases", "qkv_biases", "tied"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{self.name}: {field} must be true or false, not {getattr(self, field)!r}")
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

    @property
    def q_width(self) -> int:
        """Columns of the query matrix: a · head size, h in most models."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the key matrix, and of the value matrix: g · head size."""
        return self.kv_heads * self.head_dim

    @property
    def matrix_params(self) -> int:
        """Parameters in one layer's matrices: 12 h² for a GPT."""
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_params(self) -> int:
        """All parameters of one layer: matrices, biases, two norms."""
        norms = 2 * self.hidden * (1 if self.gated else 2)  # a gated model uses RMSNorm, which has no bias
        attention_biases = (self.biases or self.qkv_biases) * (self.q_width + 2 * self.kv_width)
        other_biases = self.biases * (self.hidden + self.ffn * (2 if self.gated else 1) + self.hidden)
        return self.matrix_params + norms + attention_biases + other_biases

    @property
    def embedding_params(self) -> int:
        """On the first pipeline stage: tokens, and positions where they are learned."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_params(self) -> int:
        """On the last stage: the final norm and the head.

        A tied head is the embedding again, and is counted there.
        """
        norm = self.hidden * (1 if self.gated else 2)
        return norm + (0 if self.tied else self.vocab * self.hidden)

    @property
    def params(self) -> int:
        """N: all parameters, each once."""
        return self.layers * self.layer_params + self.embedding_params + self.head_params

    def flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """Model FLOPs of forward and backward for one token: what MFU divides by.

        6 for each matrix element (2 forward, 4 backward), and 12·L·s·a·head size for the attention
        scores and their use; half of that if only the causal half is counted. For a GPT with
        untied head this is 72·L·h²·(1 + s/6h + V/12Lh), Narayanan et al. 2021, without their recompute.
        """
        scores = 12 * self.layers * seq_len * self.q_width * (0.5 if causal else 1)
        return 6 * (self.layers * self.matrix_params + self.vocab * self.hidden) + scores


def _gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048
) -> ModelShape:
    return ModelShape(name, layers, hidden, heads, vocab, biases=True, tied=True, positions=positions)


def _llama(
    name: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, kv_heads: int = 0
) -> ModelShape:
    return ModelShape(name, layers, hidden, heads, vocab, kv_heads, ffn, gated=True)


MODELS: dict[str, ModelShape] = {
    m.name: m
    for m in (
        # The course's own: helpers/toy.py at hidden 256, whose matrices have no biases.
        ModelShape("toy", 4, 256, 4, 256, positions=64),
        _gpt("gpt2-xl", 48, 1600, 25, 50257, 1024),
        _gpt("gpt3-175b", 96, 12288, 96, 50257),
        _gpt("opt-30b", 48, 7168, 56, 50272, 2050),
        _gpt("mt-nlg-530b", 105, 20480, 128, 51200),
        ModelShape("llama-3.2-1b", 16, 2048, 32, 128256, 8, 8192, gated=True, tied=True),
        _llama("llama-2-7b", 32, 4096, 32, 11008, 32000),
        _llama("llama-2-13b", 40, 5120, 40, 13824, 32000),
        _llama("llama-30b", 60, 6656, 52, 17920, 32000),
        _llama("llama-2-70b", 80, 8192, 64, 28672, 32000, 8),
        _llama("llama-3-8b", 32, 4096, 32, 14336, 128256, 8),
        _llama("llama-3-70b", 80, 8192, 64, 28672, 128256, 8),
        _llama("llama-3-405b", 126, 16384, 128, 53248, 128256, 8),
    )
}


def find_model(name: str) -> ModelShape:
    """A shape by name, or from a JSON file: ours, or a Hugging Face config.json of a dense decoder (see
    `_GATED` and `_PLAIN`).

    Raises ValueError in one sentence for an unknown name (with the nearest), an unreadable file, a file
    without the numbers that are needed, and a model whose layers are others than those priced here: experts,
    or a type not known.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    if is_file(name):
        return from_config(Path(name))
    near = difflib.get_close_matches(name.lower(), MODELS, 1, cutoff=0.3)
    hint = f"; the nearest is {near[0]!r}" if near else ""
    raise ValueError(f"unknown model {name!r}{hint}. Known are {', '.join(MODELS)}, or give a config.json")


# our name -> what it is called in Hugging Face's configurations, and in our own files
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "heads"),
    "vocab": ("vocab_size", "vocab"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn"),
    "head_dim": ("head_dim",),
}
# Hugging Face's model_type -> whether its head is the embedding again where the file does not say
_GATED = {
    "llama": False,
    "mistral": False,
    "qwen2": False,
    "qwen3": False,
    "phi3": False,
    "gemma": True,
    "gemma2": True,
}
_PLAIN = {
    "gpt2": True,
    "opt": True,
    "gpt_neox": False,
    "gpt_neo": True,
    "bloom": True,
    "gptj": False,
    "falcon": True,
}


def from_config(path: Path) -> ModelShape:
    """Read a shape from a JSON file. See `find_model` for what it refuses."""
    config = read_object(path, "model")
    sizes = {}
    for field, aliases in _NAMES.items():
        value = next((config[a] for a in aliases if config.get(a) is not None), None)
        if value is None and field in ("layers", "hidden", "heads", "vocab"):
            raise ValueError(f"{path} does not say {field}: none of {', '.join(aliases)} is in it")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{path}: {field} must be a whole number, not {value!r}")
        sizes[field] = value or 0
    kind = config.get("model_type", "")
    _refuse_other_layers(path, config, kind)
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):  # falcon-7b
        sizes["kv_heads"] = 1
    plain = kind in _PLAIN
    tied = next(
        (config[k] for k in ("tie_word_embeddings", "tied") if k in config),
        (_GATED | _PLAIN).get(kind, False),
    )
    try:
        return ModelShape(
            str(config.get("name") or config.get("_name_or_path") or path.stem),
            **sizes,
            gated=config.get("gated", not plain),
            biases=config.get("bias", False) if kind == "falcon" else config.get("biases", plain),
            qkv_biases=kind == "qwen2",
            tied=tied,
            positions=_positions(config, kind),
        )
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def _refuse_other_layers(path: Path, config: dict, kind) -> None:
    experts = {
        k: v for k, v in config.items() if ("expert" in k or "moe" in k) and isinstance(v, int) and v > 1
    }
    if experts:
        name, value = next(iter(experts.items()))
        raise ValueError(
            f"{path} is a mixture of experts ({name}: {value}), which cannot be planned yet; give a model"
            f" without experts, the config.json of one or a name: {', '.join(MODELS)}"
        )
    if (
        kind
        and (not isinstance(kind, str) or kind not in _GATED | _PLAIN)
        and not {"gated", "tied"} <= set(config)
    ):
        raise ValueError(
            f"{path}: the layers of model_type {kind!r} are not known here; known are"
            f' {", ".join(sorted(_GATED | _PLAIN))}. If they are a decoder\'s, say so: add "gated" (three'
            ' matrices in the feed-forward, or two) and "tied" (head and embedding one), each true or'
            " false"
        )
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise ValueError(
            f"{path}: an embedding of {config['word_embed_proj_dim']!r} beside a hidden size of"
            f" {config.get('hidden_size')!r} is not modelled here"
        )


def _positions(config: dict, kind: str) -> int:
    """Learned positions: GPT-2 and OPT have them, rotary models have none."""
    if kind == "opt":
        name, more = "max_position_embeddings", 2
    elif kind == "gpt2":
        name, more = (
            next((k for k in ("n_positions", "max_position_embeddings") if config.get(k)), "n_positions"),
            0,
        )
    else:
        name, more = "positions", 0
    value = config.get(name) or 0
    whole(name, value, 0)
    return value + more
