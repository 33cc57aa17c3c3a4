"""Model shapes from JSON: our own files, and the config.json of a decoder on Hugging Face.

What a file says and is not understood here is refused by name, and not read as something else.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from ..paper.checks import check_fields, named, read_object, whole
from .shape import Experts, Latent, ModelShape

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
_EXPERTS = {
    "count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "per_token": ("num_experts_per_tok", "experts_per_token"),
    "ffn": ("moe_intermediate_size", "intermediate_size"),
    "dense_layers": ("first_k_dense_replace",),
}
_EVERY = ("interleave_moe_layer_step", "decoder_sparse_step")
_LATENT = {
    "kv_rank": ("kv_lora_rank",),
    "q_rank": ("q_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "values": ("v_head_dim",),
}
_PLAIN = dict(gated=False, biases=True)
# Hugging Face's model_type -> what the file does not say of it; tied: where it does not say
_KINDS: dict[str, dict] = {
    "llama": {},
    "mistral": {},
    "phi3": {},
    "qwen2": dict(qkv_biases=True),
    "qwen3": dict(qk_norm=True),
    "gemma": dict(tied=True),
    "gemma2": dict(tied=True, norms=4),
    "gemma3_text": dict(tied=True, norms=4, qk_norm=True),
    "mixtral": {},
    "qwen2_moe": dict(qkv_biases=True),
    "qwen3_moe": dict(qk_norm=True),
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe": {},
    "llama4_text": dict(chunked=True),
    "gpt_oss": dict(biases=True, sinks=True),
    "gpt2": dict(tied=True, **_PLAIN),
    "opt": dict(tied=True, **_PLAIN),
    "gpt_neox": _PLAIN,
    "gpt_neo": dict(tied=True, **_PLAIN),
    "bloom": dict(tied=True, **_PLAIN),
    "gptj": _PLAIN,
    "falcon": dict(tied=True, **_PLAIN),
}
_WITH_EXPERTS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    "llama4_text",
)
# What Transformers (5.24.0) takes where a file does not say; GLM's head_dim is that of its released files
_DEFAULTS = {
    "gemma3_text": dict(
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=4096,
    ),
    "glm4_moe": dict(first_k_dense_replace=1, n_shared_experts=1, head_dim=128),
}
_ROUTER_BIAS = ("deepseek_v3", "gpt_oss", "glm4_moe")
_OTHER = {
    **dict.fromkeys(("jamba", "mamba"), "recurrent layers (Mamba)"),
    **dict.fromkeys(("mamba2", "nemotron_h", "falcon_h1", "bamba"), "recurrent layers (Mamba-2)"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "kimi_linear"), "recurrent layers (gated delta networks)"),
}
# Every so many layers one sees all, where the file does not say.
_PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "llama4_text": 4}
# What is known of experts and changes no size, or is 1 in every model that is priced here
_HARMLESS = ("n_group", "topk_group", "experts_per_token", "num_experts_per_tok")
_ONE = ("moe_layer_freq", *_EVERY)
_SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_WINDOWED = ("sliding_attention", "chunked_attention")  # of `layer_types`


def from_config(path: Path) -> ModelShape:
    """Read a shape from a JSON file. Raises ValueError, in a sentence, for what cannot be read or is not
    priced here. Of a model that sees as well as reads, the text part alone; of DeepSeek-V3, without the
    module that predicts a second token, which its printed size leaves out too.
    """
    config = read_object(path, "model")
    if isinstance(config.get("text_config"), dict):
        tied = {k: v for k, v in config.items() if k == "tie_word_embeddings"}
        config = tied | config["text_config"]
    kind = config.get("model_type", "")
    if not isinstance(kind, str):
        raise ValueError(f'{path.name}: model_type is {kind!r}; it is a name, as "llama"')
    _refuse_other_layers(path, config, kind)
    config = _DEFAULTS.get(kind, {}) | config
    if kind == "llama4_text":
        config = _usual_names(config)
    known = dict(_KINDS.get(kind, {}))
    if kind == "glm4_moe":  # its attention_bias is that of queries, keys and values alone
        known |= dict(qkv_biases=bool(config.get("attention_bias")), qk_norm=bool(config.get("use_qk_norm")))
    sizes = _sizes(path, config, _NAMES, ("layers", "hidden", "heads", "vocab"))
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):  # falcon-7b
        sizes["kv_heads"] = 1
    given = {f.name: config[f.name] for f in fields(ModelShape) if f.name in config and f.name not in _NAMES}
    given.pop("name", None)
    if kind == "falcon":
        given["biases"] = config.get("bias", False)
    if "tie_word_embeddings" in config:
        given["tied"] = config["tie_word_embeddings"]
    usual = dict(gated=not (kind and known.get("gated") is False), positions=_positions(config, kind))
    try:
        parts: dict[str, Any] = dict(experts=_experts(path, config, kind), latent=_latent(path, config, kind))
        parts["window"], parts["windowed"] = _window(config, kind, sizes["layers"])
        name = named("name", config.get("name") or config.get("_name_or_path") or path.stem)
        return ModelShape(name, **sizes | parts | usual | known | _own(given))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def _usual_names(config: dict) -> dict:
    """Llama 4's in the words of others: the plain `intermediate_size` is an expert's, and the shared one's; a
    layer without rotations sees all, the others their part of the sequence.
    """
    width, turned = config.get("intermediate_size"), config.get("no_rope_layers")
    said = dict(intermediate_size=config.get("intermediate_size_mlp"), moe_intermediate_size=width)
    said |= dict(shared_expert_intermediate_size=width, sliding_window=config.get("attention_chunk_size"))
    if isinstance(turned, list):
        said["layer_types"] = ["chunked_attention" if one else "full_attention" for one in turned]
    return config | said


def _own(given: dict) -> dict:
    """Fields of our own files: parts are objects."""
    for field, part in (("experts", Experts), ("latent", Latent)):
        if isinstance(given.get(field), dict):
            names = check_fields(field, given[field], part)
            try:
                given[field] = part(**given[field])
            except TypeError:
                raise ValueError(f"{field} needs some of {', '.join(names)}") from None
        elif given.get(field) is not None:
            raise ValueError(f"{field} is an object, not {given[field]!r}")
    return given


def _sizes(path: Path, config: dict, names: dict, needed: tuple[str, ...]) -> dict[str, int]:
    """What `names` ask for, 0 where the file does not say and need not."""
    sizes = {}
    for field, aliases in names.items():
        value = next((config[a] for a in aliases if config.get(a) is not None), None)
        if value is None and field in needed:
            raise ValueError(f"{path} does not say {field}: none of {', '.join(aliases)} is in it")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{path}: {field} must be a whole number, not {value!r}")
        sizes[field] = value or 0
    return sizes


def _experts(path: Path, config: dict, kind: str) -> Experts | None:
    if kind not in _WITH_EXPERTS:
        return None
    sizes = _sizes(path, config, _EXPERTS, ("count", "per_token", "ffn"))
    shared = next((config[a] for a in _SHARED if config.get(a)), 0)
    shared = shared or (config.get("n_shared_experts") or 0) * sizes["ffn"]
    sizes["every"] = next((config[a] for a in _EVERY if config.get(a)), 1)
    gate, bias = kind == "qwen2_moe", kind in _ROUTER_BIAS
    return Experts(**sizes, shared=shared, shared_gate=gate, router_bias=bias)


def _latent(path: Path, config: dict, kind: str) -> Latent | None:
    if kind not in ("deepseek_v2", "deepseek_v3"):
        return None
    return Latent(**_sizes(path, config, _LATENT, ("kv_rank", "nope", "rope", "values")))


def _window(config: dict, kind: str, layers: int) -> tuple[int, int]:
    """(tokens that a windowed layer sees, how many layers have a window)."""
    size = config.get("sliding_window")
    used = config.get("use_sliding_window", not kind.startswith(("qwen2", "qwen3")))
    if not size or used is False:
        return 0, 0
    whole("sliding_window", size)
    if isinstance(kinds := config.get("layer_types"), list):
        many = sum(kinds.count(one) for one in _WINDOWED)
    elif "max_window_layers" in config:
        whole("max_window_layers", config["max_window_layers"], 0)
        many = max(0, layers - config["max_window_layers"])
    else:
        pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
        pattern = pattern or _PATTERNS.get(kind)
        whole("sliding_window_pattern", pattern or 1)
        many = layers - layers // pattern if pattern else layers
    return (size, many) if many else (0, 0)


def _refuse_other_layers(path: Path, config: dict, kind) -> None:
    if kind in _OTHER:
        raise ValueError(f"{path}: {kind} has {_OTHER[kind]}, which is not priced here")
    if kind and (not isinstance(kind, str) or kind not in _KINDS) and not {"gated", "tied"} <= set(config):
        raise ValueError(
            f"{path}: the layers of model_type {kind!r} are not known here; known are"
            f' {", ".join(sorted(_KINDS))}. If they are a decoder\'s, say so: add "gated" (three'
            ' matrices in the feed-forward, or two) and "tied" (head and embedding one), each true or'
            " false"
        )
    known = {alias for aliases in _EXPERTS.values() for alias in aliases} if kind in _WITH_EXPERTS else set()
    known |= {*_HARMLESS, "n_shared_experts", *_SHARED, *_EVERY} if known else {"experts"}
    for name, value in config.items():
        experts = ("expert" in name or "moe" in name or name in _ONE) and name not in known
        if experts and isinstance(value, int) and value > 1:
            raise ValueError(
                f"{path} has experts ({name} is {value}), which is not priced here for model_type {kind!r}"
            )
        other = (
            name in ("attention_bias", "mlp_bias", "use_bias")
            and value is True
            and kind not in ("gpt_oss", "glm4_moe")
        )
        if other or name == "mlp_only_layers" and value:
            raise ValueError(f"{path}: {name} is {value!r}, which is not priced here")
        if name == "layer_types" and isinstance(value, list):
            if strange := [k for k in value if k not in ("full_attention", "sliding_attention")]:
                raise ValueError(f"{path}: layers of type {strange[0]!r} are not priced here")
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
        names = ("n_positions", "max_position_embeddings")
        name, more = next((k for k in names if config.get(k)), "n_positions"), 0
    else:
        name, more = "positions", 0
    value = config.get(name) or 0
    whole(name, value, 0)
    return value + more
