"""Reads a model's shape from JSON: from our own files, and from the config.json of a decoder on Hugging Face.

A key that is neither read nor known to have no effect is refused by name: the model may be a different one.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from ..checks import named, positive, read_object, unknown, whole
from ..foreign import plain
from .config_keys import (
    ABSENT,
    BEGINS,
    ENDS,
    EVERY,
    EXPERTS,
    HARMLESS,
    HARMLESS_OF,
    LATENT,
    NAMES,
    READ,
    READ_OF,
    READ_OF_EXPERTS,
    SHARED,
    asked,
)
from .shape import Experts, Latent, ModelShape

# Fields of `ModelShape` that a file of our own may have, besides those of `NAMES` and the name.
OWN = {field.name for field in fields(ModelShape)} - {*NAMES, "name", "experts", "latent"}
_PLAIN = dict(gated=False, biases=True)  # layers like GPT's
# Hugging Face's model_type -> fields of `ModelShape` that its file does not have. `tied` may be in the file.
_KINDS: dict[str, dict] = {
    "llama": {},
    "mistral": {},
    "phi3": {},
    "qwen2": dict(qkv_biases=True),
    "qwen3": dict(qk_norm=True),
    "smollm3": dict(tied=True),
    "granite": {},
    "granitemoehybrid": {},  # if all of its layers are attention layers
    "gemma": dict(tied=True),
    "gemma2": dict(tied=True, norms=4),
    "gemma3_text": dict(tied=True, norms=4, qk_norm=True),
    "mixtral": {},
    "qwen2_moe": dict(qkv_biases=True),
    "qwen3_moe": dict(qk_norm=True),
    "deepseek_v2": {},
    "deepseek_v3": {},
    "kimi_k2": {},
    "glm4_moe": {},
    "llama4_text": dict(chunked=True),
    "gpt_oss": dict(biases=True, sinks=True),
    "gpt2": dict(tied=True, **_PLAIN),
    "opt": dict(tied=True, **_PLAIN),
    "gpt_neox": _PLAIN,
    "bloom": dict(tied=True, **_PLAIN),
    "gptj": _PLAIN,
    "falcon": dict(tied=True, **_PLAIN),
}
_WITH_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_WITH_EXPERTS = (*_WITH_LATENT, "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe", "llama4_text")
_ROUTER_BIAS = ("deepseek_v3", "kimi_k2", "gpt_oss", "glm4_moe")
# Types with recurrent layers, and the name of these; their files are refused.
_RECURRENT = {
    **dict.fromkeys(("jamba", "mamba"), "Mamba"),
    **dict.fromkeys(("mamba2", "nemotron_h", "falcon_h1", "bamba"), "Mamba-2"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear"), "gated delta networks"),
}
# model_type -> of so many layers one attends to the whole sequence, if the file has no pattern.
_PATTERNS = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "llama4_text": 4}
_ATTENTION = ("full_attention", "attention")  # of `layer_types`
_WINDOWED = ("sliding_attention", "chunked_attention")  # of `layer_types`


def from_config(path: Path) -> ModelShape:
    """Read a shape from a JSON file. If the file has a key "parameters", the number in the model card, the
    shape must have as many.

    DeepSeek-V3 is read without the module that predicts a second token, which its printed size also omits.
    Raises ValueError with a sentence for a file that cannot be read, for layers that the planner does not
    count, for a key that is neither read nor known to have no effect, and for an unknown model_type, unless
    the file has `gated`, `tied` and `parameters`.
    """
    config = read_object(path, "model")
    kind = config.get("model_type", "")
    if not isinstance(kind, str):
        raise ValueError(f'{path.name}: model_type is {kind!r}; it is a name, as "llama"')
    _refuse_kind(path, config, kind)
    _refuse_unread(path, config, kind)
    _refuse_other_layers(path, config, kind)
    config = _with_defaults(path, config, kind)
    known = dict(_KINDS.get(kind, {}))
    if kind == "glm4_moe":  # here attention_bias means queries, keys and values only
        known |= dict(qkv_biases=bool(config.get("attention_bias")), qk_norm=bool(config.get("use_qk_norm")))
    sizes = _sizes(path, config, NAMES, ("layers", "hidden", "heads", "vocab"))
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):  # falcon-7b
        sizes["kv_heads"] = 1
    given = {name: config[name] for name in OWN if name in config}
    if kind == "falcon":
        given["biases"] = config.get("bias", False)
    if "tie_word_embeddings" in config:
        given["tied"] = config["tie_word_embeddings"]
    usual = dict(gated=not (kind and known.get("gated") is False), positions=_positions(config, kind))
    try:
        parts: dict[str, Any] = dict(experts=_experts(path, config, kind), latent=_latent(path, config, kind))
        parts["window"], parts["windowed"] = _window(config, kind, sizes["layers"])
        name = named("name", config.get("name") or config.get("_name_or_path") or path.stem)
        model = ModelShape(name, **sizes | parts | usual | known | given)
        if "parameters" in config:
            check_parameters(model, config["parameters"])
        return model
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def _with_defaults(path: Path, config: dict, kind: str) -> dict:
    """The file's keys, with Transformers' defaults for those that it omits. Raises ValueError for a required
    key that it omits and that has no default.
    """
    if kind not in _KINDS:
        return config
    aliases = [*NAMES.values(), *EXPERTS.values(), *LATENT.values()]
    same = {name: names for names in aliases for name in names}
    # null: as many as heads; no short vector; a token attends to all
    may_be_null = (*NAMES["kv_heads"], *LATENT["q_rank"], "sliding_window")
    has = lambda name: name in config and (name in may_be_null or config[name] is not None)
    has_any = lambda key: any(map(has, same.get(key, (key,))))
    config = config | {key: value for key, value in ABSENT[kind].items() if not has_any(key)}
    if kind == "granitemoehybrid" and "shared_intermediate_size" in config:
        config["intermediate_size"] = config["shared_intermediate_size"]
    for names in asked(kind, kind in _WITH_EXPERTS, kind in _WITH_LATENT):
        if not any(has(name) or ABSENT[kind].get(name, 0) is None for name in names):
            raise ValueError(
                f"{path} does not say {names[0]}, and another model would be read without it: take it from"
                " the model's own config.json"
            )
    return _usual_names(config) if kind == "llama4_text" else config


def _usual_names(config: dict) -> dict:
    """Translate Llama 4's keys. Its `intermediate_size` is the width of an expert, and of the shared expert.
    In a layer without rotary positions a token attends to the whole sequence, else to a part of it.
    """
    width, rotary = config.get("intermediate_size"), config.get("no_rope_layers")
    names = dict(intermediate_size=config.get("intermediate_size_mlp"), moe_intermediate_size=width)
    names |= dict(shared_expert_intermediate_size=width, sliding_window=config.get("attention_chunk_size"))
    if isinstance(rotary, list):
        names["layer_types"] = ["chunked_attention" if has_it else "full_attention" for has_it in rotary]
    return config | names


def _sizes(path: Path, config: dict, names: dict, needed: tuple[str, ...]) -> dict[str, int]:
    """Field -> its size in the file; 0 for a size that the file omits and that is not needed. names: field ->
    the keys that may have it.
    """
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
    sizes = _sizes(path, config, EXPERTS, ("count", "per_token", "ffn"))
    shared = next((config[a] for a in SHARED if config.get(a)), 0)
    shared = shared or (config.get("n_shared_experts") or 0) * sizes["ffn"]
    sizes["every"] = next((config[a] for a in EVERY if config.get(a)), 1)
    gate, bias = kind == "qwen2_moe", kind in _ROUTER_BIAS
    return Experts(**sizes, shared=shared, shared_gate=gate, router_bias=bias)


def _latent(path: Path, config: dict, kind: str) -> Latent | None:
    if kind not in _WITH_LATENT:
        return None
    return Latent(**_sizes(path, config, LATENT, ("kv_rank", "nope", "rope", "values")))


def _window(config: dict, kind: str, layers: int) -> tuple[int, int]:
    """(tokens to which a token attends in a layer with a window, number of such layers)."""
    size = config.get("sliding_window")
    used = config.get("use_sliding_window", not kind.startswith(("qwen2", "qwen3", "smollm3")))
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


def check_parameters(model: ModelShape, card: float) -> None:
    """Raises ValueError if a model's number of parameters differs from its card's by more than 0.1 %."""
    positive("parameters", card, most=1e18, unit="as the model card says")
    if abs(model.params / card - 1) > 0.001:
        raise ValueError(
            f"{model.name} has {model.params:,} parameters as it is read here, and its card says {card:,.0f}:"
            " its layers are others than those that are counted"
        )


def _refuse_kind(path: Path, config: dict, kind: str) -> None:
    """Raises ValueError for a model_type with recurrent layers, and for an unknown one, unless the file has
    `gated`, `tied` and `parameters`.
    """
    if kind in _RECURRENT:
        raise ValueError(
            f"{path}: {kind} has recurrent layers ({_RECURRENT[kind]}), which are not priced here"
        )
    described = config.get("parameters") is not None and {"gated", "tied"} <= set(config)
    if not kind or kind in _KINDS or described:
        return
    sees = " It also sees: give its text_config as a file of its own." * ("text_config" in config)
    raise ValueError(
        f"{path}: unknown model_type {unknown(kind, sorted(_KINDS))}.{sees} If all layers are a usual"
        ' decoder\'s, add "gated" (three matrices in the feed-forward, or two) and "tied" (head and embedding'
        ' one), each true or false, and "parameters", from the model card: the count is held against it'
    )


def _refuse_unread(path: Path, config: dict, kind: str) -> None:
    """Raises ValueError with the names of keys that are neither read nor known to have no effect."""
    read = {alias for aliases in NAMES.values() for alias in aliases} | {*READ, *READ_OF.get(kind, ())}
    read |= {*OWN}
    if kind in _WITH_EXPERTS:
        read |= {alias for aliases in EXPERTS.values() for alias in aliases}
        read |= {*READ_OF_EXPERTS, *SHARED, *EVERY}
    if kind in _WITH_LATENT:
        read |= {alias for aliases in LATENT.values() for alias in aliases}
    begins = (*BEGINS, "mamba_") if kind == "granitemoehybrid" else BEGINS
    harmless = lambda key: key in HARMLESS or key.startswith(begins) or key.endswith(ENDS)
    empty = lambda value: value is None or value is False or value in ([], {})
    of_kind = HARMLESS_OF.get(kind, {})
    idle = lambda key, value: harmless(key) or empty(value) or key in of_kind and of_kind[key] == value
    unread = [plain(key, 40) for key, value in config.items() if key not in read and not idle(key, value)]
    if not unread:
        return
    what = ", ".join(unread[:3])
    if len(unread) > 1:
        what += f" and {len(unread) - 3} more keys are" * (len(unread) > 3) or " are"
    else:
        what += " is"
    raise ValueError(
        f'{path}: {what} not read. Take out what changes no layer, and add "parameters", from the model card:'
        " the count is held against it"
    )


def _refuse_other_layers(path: Path, config: dict, kind: str) -> None:
    """Raises ValueError for a value that would make other layers than those that the planner counts."""
    kinds = config.get("layer_types")
    if kind == "granitemoehybrid":
        if config.get("num_local_experts", 8) or not isinstance(kinds, list) or set(kinds) - set(_ATTENTION):
            raise ValueError(
                f"{path}: {kind} is read where layer_types are all attention and num_local_experts is 0:"
                " its others have recurrent layers (Mamba-2) or experts beside a shared part, which are not"
                " priced here"
            )
    own = ("attention_bias",) if kind in ("gpt_oss", "glm4_moe") else ()
    for name in ("attention_bias", "mlp_bias", "use_bias", "mlp_only_layers"):
        if config.get(name) and name not in own:
            raise ValueError(f"{path}: {name} is {config[name]!r}, which is not priced here")
    if config.get("moe_layer_freq", 1) not in (1, None):
        raise ValueError(f"{path}: moe_layer_freq is {config['moe_layer_freq']!r}, which is not priced here")
    if strange := [k for k in kinds if k not in (*_ATTENTION, *_WINDOWED)] if isinstance(kinds, list) else []:
        raise ValueError(f"{path}: layers of type {strange[0]!r} are not priced here")
    if config.get("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        raise ValueError(
            f"{path}: an embedding of {config['word_embed_proj_dim']!r} beside a hidden size of"
            f" {config.get('hidden_size')!r} is not modelled here"
        )


def _positions(config: dict, kind: str) -> int:
    """The number of learned positions: GPT-2 and OPT have them, models with rotary positions have none."""
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
