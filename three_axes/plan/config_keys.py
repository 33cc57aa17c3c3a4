"""Keys of Hugging Face's config.json: those that give a model's shape, and those that have no effect on it.

`configs` refuses any other key, because the model may be a different one.
"""

from __future__ import annotations

from typing import Any

# Field of `ModelShape` -> the keys that may have it, in Hugging Face's files and in our own.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "heads"),
    "vocab": ("vocab_size", "vocab"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "ffn"),
    "head_dim": ("head_dim",),
}
# The same for `Experts`, whose fields `every` and `shared` are in EVERY and SHARED; LATENT for `Latent`.
EXPERTS = {
    "count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "per_token": ("num_experts_per_tok", "experts_per_token"),
    "ffn": ("moe_intermediate_size", "intermediate_size"),
    "dense_layers": ("first_k_dense_replace",),
}
EVERY = ("interleave_moe_layer_step", "decoder_sparse_step")
SHARED = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
LATENT = {
    "kv_rank": ("kv_lora_rank",),
    "q_rank": ("q_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "values": ("v_head_dim",),
}
# Further keys that are read: for all models, for those with experts, for one model_type.
READ = """
    model_type name _name_or_path parameters tie_word_embeddings attention_bias mlp_bias use_bias bias
    sliding_window use_sliding_window layer_types max_window_layers sliding_window_pattern
    _sliding_window_pattern word_embed_proj_dim
""".split()
READ_OF_EXPERTS = """
    n_shared_experts moe_layer_freq mlp_only_layers n_group topk_group topk_method scoring_func norm_topk_prob
    routed_scaling_factor router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux output_router_logits
    ep_size num_nextn_predict_layers
""".split()
READ_OF = {
    "falcon": ("multi_query", "new_decoder_architecture", "parallel_attn", "alibi"),
    "glm4_moe": ("use_qk_norm",),
    "gpt2": ("n_positions", "max_position_embeddings"),
    "granitemoehybrid": ("shared_intermediate_size", "num_local_experts", "num_experts_per_tok"),
    "llama4_text": "intermediate_size_mlp no_rope_layers attention_chunk_size use_qk_norm moe_layers".split(),
}
# model_type -> keys that a file may omit, with their default in its configuration class (Transformers 5.24.0,
# models/*/configuration_*.py). None: the class computes it from hidden size and heads. A file without a
# required key (`asked`) that is not in this table is refused.
_OF_HEADS: dict[str, Any] = dict(num_key_value_heads=None, head_dim=None)
_OF_HIDDEN: dict[str, Any] = dict(_OF_HEADS, intermediate_size=None)
_QWEN: dict[str, Any] = dict(sliding_window=4096, max_window_layers=28)
_DEEPSEEK: dict[str, Any] = dict(_OF_HEADS, q_lora_rank=1536)
ABSENT: dict[str, dict[str, Any]] = {
    "llama": _OF_HEADS,
    "mistral": dict(num_key_value_heads=8, head_dim=None, sliding_window=4096),
    "phi3": _OF_HEADS,
    "qwen2": dict(_QWEN, head_dim=None),
    "qwen3": dict(_QWEN, head_dim=128),
    "smollm3": dict(num_key_value_heads=4, head_dim=None),
    "granite": _OF_HEADS,
    "granitemoehybrid": _OF_HEADS,
    "gemma": dict(num_key_value_heads=16, head_dim=256),
    "gemma2": dict(num_key_value_heads=4, head_dim=256, sliding_window=4096),
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
    "mixtral": dict(num_key_value_heads=8, head_dim=None),
    "qwen2_moe": dict(_QWEN, head_dim=None),
    "qwen3_moe": dict(num_key_value_heads=4, sliding_window=4096),
    "deepseek_v2": dict(_DEEPSEEK, n_shared_experts=2, first_k_dense_replace=0),
    "deepseek_v3": dict(_DEEPSEEK, n_shared_experts=1, first_k_dense_replace=3),
    "kimi_k2": _OF_HEADS,  # its class is not in Transformers, but beside the model's files
    "glm4_moe": dict(num_key_value_heads=8, first_k_dense_replace=1, n_shared_experts=1),
    "llama4_text": dict(
        num_key_value_heads=8, head_dim=128, intermediate_size_mlp=16384, attention_chunk_size=8192
    ),
    "gpt_oss": dict(num_key_value_heads=8, head_dim=64, sliding_window=128),
    "gpt2": dict(_OF_HIDDEN, n_positions=1024),
    "opt": dict(_OF_HEADS, max_position_embeddings=2048),
    "gpt_neox": _OF_HEADS,
    "bloom": _OF_HIDDEN,
    "gptj": _OF_HIDDEN,
    "falcon": dict(_OF_HIDDEN, multi_query=True),
}


def asked(kind: str, experts: bool, latent: bool) -> list[tuple[str, ...]]:
    """Keys that a file of this model_type needs, because another model would be read without them: of each
    tuple at least one.
    """
    names = [NAMES["kv_heads"], NAMES["ffn"], *[NAMES["head_dim"]] * (not latent)]
    if experts:
        apart = kind not in ("mixtral", "gpt_oss", "llama4_text")  # their intermediate_size is an expert's
        names += [EXPERTS["ffn"][:1]] * apart
        names += [SHARED] * (kind == "qwen2_moe")
        names += [("n_shared_experts",), EXPERTS["dense_layers"]] * (latent or kind == "glm4_moe")
    return names + [LATENT["q_rank"]] * latent


# Keys that change neither bytes nor seconds: whole names, names with one value, beginnings and ends of names.
HARMLESS = set(
    """
    architectures auto_map torch_dtype dtype use_cache quantization_config quantization pretraining_tp
    hidden_act hidden_activation activation_function initializer_range initializer_factor init_std
    max_position_embeddings n_positions n_ctx seq_length model_max_length partial_rotary_factor
    original_max_position_embeddings initial_context_length no_rope_layers no_rope_layer_interval
    query_pre_attn_scalar attention_multiplier embedding_multiplier residual_multiplier logits_scaling
    cache_implementation swiglu_limit qk_head_dim sliding_window_size attention_softmax_in_fp32
    masked_softmax_fusion bias_dropout_fusion offset_alibi skip_bias_add skip_bias_add_qkv slow_but_exact
    apply_residual_connection_post_layernorm do_layer_norm_before enable_bias use_parallel_residual
    layer_norm_elementwise_affine reorder_and_upcast_attn scale_attn_weights use_mrope for_llm_compressor
    scale_attn_by_inverse_layer_idx attn_temperature_tuning floor_scale attn_scale gradient_checkpointing
    torchscript is_decoder is_encoder_decoder id2label label2id num_labels problem_type tokenizer_class prefix
    task_specific_params unsloth_fixed unsloth_version pad_token tf_legacy_loss return_dict max_length
    min_length temperature top_k top_p typical_p num_beams num_beam_groups num_return_sequences length_penalty
    repetition_penalty diversity_penalty chunk_size_feed_forward
    """.split()
)
HARMLESS_OF: dict[str, dict[str, Any]] = {
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1},  # in Phi-4-mini's file; its class ignores both
    "granitemoehybrid": {"normalization_function": "rmsnorm", "position_embedding_type": "rope"},
}
BEGINS = tuple("rope_ rotary summary_ output_ attn_implementation _attn_ transformers_ use_flash".split())
ENDS = ("_token_id", "_eps", "_epsilon", "dropout", "_pdrop", "_dropout_prob", "_token_index", "softcapping")
