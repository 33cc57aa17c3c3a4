"""Parameter counts are exact; configuration files of other projects are read, or refused with a reason."""

import json

import pytest

from helpers import toy
from three_axes.plan.models import MODELS, find_model


@pytest.mark.parametrize(
    "name, params",
    [
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-405b", 405_853_388_800),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("tinyllama-1.1b", 1_100_048_384),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("gpt2-xl", 1_557_611_200),
        ("opt-30b", 29_974_540_288),
    ],
)
def test_counts_are_those_of_the_published_weights(name, params):
    assert find_model(name).params == params


B = 1e9


@pytest.mark.parametrize(
    "name, params, active, without_embedding",
    [
        # Parameters that papers and cards print.
        ("mixtral-8x7b", 46_702_792_704, 12.9, None),
        ("mixtral-8x22b", 140_620_634_112, 39, None),
        ("qwen3-30b-a3b", 30_532_122_624, 3.3, None),  # "30.5B", 29.9B without the embeddings; "3.3B"
        ("qwen3-235b-a22b", 235_093_634_560, 22, None),  # "235B", 234B without the embeddings
        ("deepseek-v2-lite", 15_706_484_224, None, 2.4),  # "15.7B"
        ("deepseek-v3", 671_026_419_200, None, 37),
        ("llama-4-scout", 107_769_861_120, 17, None),  # "109B" with what it sees with
        ("llama-4-maverick", 400_711_848_960, 17, None),  # "400B"
        ("gpt-oss-20b", 20_914_757_184, None, 3.61),  # "20.91B"
        ("gpt-oss-120b", 116_829_156_672, None, 5.13),  # "116.83B"
    ],
)
def test_experts_total_and_active_are_those_printed(name, params, active, without_embedding):
    """The authors of Mixtral and Qwen3 count the embedding, those of gpt-oss and DeepSeek do not."""
    model = find_model(name)
    assert model.params == params
    counted = model.active_params - (0 if active else model.embedding_params)
    printed = active or without_embedding
    digits = len(str(printed).partition(".")[2])
    assert abs(counted / B - printed) < 10**-digits  # some are rounded, some cut off


def test_windows_shorten_what_a_token_sees():
    model = find_model("gpt-oss-20b")
    assert model.attended(64) == 64
    seen = sum(min(i + 1, 128) for i in range(4096)) / 4096  # in a windowed layer
    assert model.attended(4096) == pytest.approx((4096 + 2 * seen) / 2, rel=1e-3)


def test_the_toys_shape_has_the_parameters_of_the_toy():
    assert MODELS["toy"].params == sum(p.numel() for p in toy.ToyTransformer(hidden=256).parameters())


def test_gpt_flops_are_the_papers():
    """Narayanan et al. 2021, equation 3, less the recomputed forward: 72 B L h² (1 + s/6h + V/12Lh)."""
    m = MODELS["gpt3-175b"]
    s, h, L, V = 2048, m.hidden, m.layers, m.vocab
    assert m.flops_per_token(s) == pytest.approx(72 * L * h * h * (1 + s / (6 * h) + V / (12 * L * h)))


@pytest.fixture
def read(tmp_path):
    """The model that is read from a file. The argument is the file's text, or its fields."""

    def model(given: str | dict, name: str = "config.json"):
        (tmp_path / name).write_text(given if isinstance(given, str) else json.dumps(given))
        return find_model(str(tmp_path / name))

    return model


def fields(text: str) -> dict:
    """'a=1 b="x" c=null' -> {'a': 1, 'b': 'x', 'c': None}"""
    return {name: json.loads(value) for name, value in (word.split("=") for word in text.split())}


LLAMA = fields("""
    model_type="llama" num_hidden_layers=32 hidden_size=4096 num_attention_heads=32 vocab_size=32000
    intermediate_size=11008
""")


@pytest.mark.parametrize(
    "given, sentence",
    [
        ("{", "is not a JSON file"),
        ("[]", "holds no JSON object"),
        ('{"num_hidden_layers": "many"}', "layers must be a whole number, not 'many'"),
        ('{"layers": 2, "hidden": 10, "heads": 3, "vocab": 5}', "hidden 10 does not divide by 3 heads"),
        ({"num_hidden_layers": -2}, "layers must be a whole number of at least 1"),
        ({"num_local_experts": 8}, "num_local_experts is not read"),
        ({f"linear_{i}": 1 for i in range(5)}, "linear_0, linear_1, linear_2 and 2 more keys are not read"),
        ({"parameters": 7e9}, "6,738,415,616 parameters as it is read here, and its card says 7,000,000,000"),
        ({"parameters": -1}, "parameters must be a positive number"),
        ({"model_type": "starcoder2"}, "unknown model_type 'starcoder2'.*Known are bloom, "),
        ({"tie_word_embeddings": "false"}, "tied must be true or false, not 'false'"),
        ({"head_dim": -128}, "head_dim must be a whole number of at least 0, not -128"),
        ({"positions": "abc"}, "positions must be a whole number"),
        ({"hidden_size": 10**400}, "holds a whole number of 401 digits: give one of at most 18"),
        (
            dict(model_type="glm4_moe", num_experts=8, num_experts_per_tok=2, decoder_sparse_step=3)
            | dict(moe_intermediate_size=64, head_dim=128),
            "experts in each 3. layer, and 1 dense ones first",
        ),
        ({"model_type": "deepseek_v3", "n_routed_experts": 8, "moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"attention_bias": True}, "attention_bias is True, which is not priced here"),
        ({"mlp_only_layers": [0, 1]}, "mlp_only_layers is"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "of type 'linear_attention' are not"),
        ({"model_type": "mixtral"}, "does not say count: none of num_local_experts"),
        (
            dict(model_type="deepseek_v3", n_routed_experts=8)
            | dict(num_experts_per_tok=2, moe_intermediate_size=64),
            "does not say kv_rank",
        ),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {"a": 1}},
            "unknown model_type 'gemma3'; the nearest is 'gemma'.*It also sees: give its text_config",
        ),
        ({"sliding_window": "wide"}, "sliding_window must be a whole number"),
        ({"window": 5}, "a window of 5 in 0 of 32 layers"),
        ({"experts": {"count": 8}}, "experts is not read"),
        (
            dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=9),
            "9 for each token, but there are only 8",
        ),
        (
            {"model_type": "opt", "word_embed_proj_dim": 512},
            "an embedding of 512 beside a hidden size of 4096 is not modelled here",
        ),
    ],
)
def test_a_configuration_that_is_not_modelled_is_refused(read, given, sentence):
    """given: the file's text, or the fields that replace LLAMA's."""
    with pytest.raises(ValueError, match=sentence):
        read(given if isinstance(given, str) else LLAMA | given)


def test_a_file_may_have_a_byte_order_mark_and_describe_its_layers(read, tmp_path):
    path = tmp_path / "C.JSON"
    path.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert find_model(str(path)).params == MODELS["llama-2-7b"].params
    fewer = MODELS["llama-2-7b"].params - 32000 * 4096
    mine = LLAMA | {"model_type": "mine", "gated": True, "tied": True}
    assert read(mine | {"parameters": 6.61e9}).params == fewer
    with pytest.raises(ValueError, match="its card says 6,738,415,616: its layers are others"):
        read(mine | {"parameters": 6_738_415_616})


CONFIGS = {  # the published fields
    "llama-3-70b": fields("""
        model_type="llama" num_hidden_layers=80 hidden_size=8192 num_attention_heads=64
        num_key_value_heads=8 vocab_size=128256 intermediate_size=28672
    """),
    "mixtral-8x7b": fields("""
        model_type="mixtral" num_hidden_layers=32 hidden_size=4096 num_attention_heads=32
        num_key_value_heads=8 vocab_size=32000 intermediate_size=14336 num_local_experts=8
        num_experts_per_tok=2 sliding_window=null
    """),
    "qwen3-30b-a3b": fields("""
        model_type="qwen3_moe" num_hidden_layers=48 hidden_size=2048 num_attention_heads=32
        num_key_value_heads=4 vocab_size=151936 head_dim=128 intermediate_size=6144 num_experts=128
        num_experts_per_tok=8 moe_intermediate_size=768 decoder_sparse_step=1 mlp_only_layers=[]
        use_sliding_window=false sliding_window=null max_window_layers=48 attention_bias=false
    """),
    "deepseek-v2-lite": fields("""
        model_type="deepseek_v2" num_hidden_layers=27 hidden_size=2048 num_attention_heads=16
        num_key_value_heads=16 vocab_size=102400 intermediate_size=10944 moe_intermediate_size=1408
        n_routed_experts=64 n_shared_experts=2 num_experts_per_tok=6 first_k_dense_replace=1
        moe_layer_freq=1 q_lora_rank=null kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64
        v_head_dim=128 n_group=1
    """),
    "deepseek-v3": fields("""
        model_type="deepseek_v3" num_hidden_layers=61 hidden_size=7168 num_attention_heads=128
        num_key_value_heads=128 vocab_size=129280 intermediate_size=18432 moe_intermediate_size=2048
        n_routed_experts=256 n_shared_experts=1 num_experts_per_tok=8 first_k_dense_replace=3
        moe_layer_freq=1 q_lora_rank=1536 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64
        v_head_dim=128 n_group=8 topk_group=4 num_nextn_predict_layers=1 ep_size=1
    """),
    "llama-4-maverick": fields("""
        model_type="llama4_text" num_hidden_layers=48 hidden_size=5120 num_attention_heads=40
        num_key_value_heads=8 vocab_size=202048 head_dim=128 intermediate_size=8192
        intermediate_size_mlp=16384 num_local_experts=128 num_experts_per_tok=1 interleave_moe_layer_step=2
        attention_chunk_size=8192 use_qk_norm=false attention_bias=false
    """),
    "gpt-oss-20b": fields("""
        model_type="gpt_oss" num_hidden_layers=24 hidden_size=2880 num_attention_heads=64
        num_key_value_heads=8 vocab_size=201088 head_dim=64 intermediate_size=2880 num_local_experts=32
        num_experts_per_tok=4 experts_per_token=4 attention_bias=true sliding_window=128
    """)
    | {"layer_types": ["sliding_attention", "full_attention"] * 12},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configurations_are_the_models_of_that_name(name, read):
    config = CONFIGS[name] | {"tie_word_embeddings": False}
    assert read(config, f"{name}.json") == MODELS[name]


def shape_of(kind: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> dict:
    """The fields of a dense model's configuration file."""
    sizes = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, vocab_size=vocab)
    return sizes | dict(model_type=kind, num_key_value_heads=kv_heads, intermediate_size=ffn)


USUAL = fields("""
    attention_bias=false mlp_bias=false attention_dropout=0.0 hidden_act="silu" rms_norm_eps=1e-05
    rope_theta=1e7 rope_scaling=null use_cache=true torch_dtype="bfloat16" bos_token_id=0 eos_token_id=0
    initializer_range=0.02 max_position_embeddings=131072 transformers_version="4.49.0"
""")
GEMMA_2B = shape_of("gemma", 18, 2048, 8, 1, 16384, 256000) | {"head_dim": 256}
GEMMA3_4B = dict(
    model_type="gemma3_text",
    hidden_size=2560,
    intermediate_size=10240,
    num_hidden_layers=34,
    sliding_window=1024,
)
GPT2_XL = fields("""
    model_type="gpt2" n_embd=1600 n_layer=48 n_head=25 vocab_size=50257 n_positions=1024
""")
KIMI = CONFIGS["deepseek-v3"] | fields("""
    model_type="kimi_k2" num_attention_heads=64 num_key_value_heads=64 n_routed_experts=384 vocab_size=163840
    first_k_dense_replace=1 num_nextn_predict_layers=0 n_group=1 topk_group=1 topk_method="noaux_tc"
    scoring_func="sigmoid" norm_topk_prob=true routed_scaling_factor=2.827 aux_loss_alpha=0.001 seq_aux=true
""")


@pytest.mark.parametrize(
    "config, printed",
    [
        (
            shape_of("smollm3", 36, 2048, 16, 4, 11008, 128256)
            | dict(no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4, max_window_layers=28),
            3_075_098_624,
        ),
        (
            shape_of("granite", 40, 4096, 32, 8, 12800, 49159)
            | dict(attention_multiplier=0.0078125, embedding_multiplier=12.0, logits_scaling=16.0),
            8_170_864_640,
        ),
        (KIMI | dict(tie_word_embeddings=False), 1_026.4e9),
        (GEMMA_2B, 2_506_172_416),
        (GEMMA3_4B, 3.8803e9),
        (GPT2_XL, MODELS["gpt2-xl"].params),
        (
            shape_of("phi3", 32, 3072, 24, 8, 8192, 200064)
            | dict(full_attn_mod=1, interpolate_factor=1, sliding_window=262144),
            3_836_021_760,
        ),
    ],
    ids=lambda given: given["model_type"] if isinstance(given, dict) else "",
)
def test_files_of_usual_decoders_are_read(read, config, printed):
    """The weights of SmolLM3 3B, Granite 3.3 8B, Gemma 2B and Phi-4-mini have these numbers. Kimi K2's "1T"
    is 1,026 billion. The file of Gemma 3 4B's text part omits most keys, and GPT-2's has names of its own.
    """
    read_so = read(USUAL | dict(tie_word_embeddings=True) | config)
    assert read_so.params == pytest.approx(printed, rel=1e-3)


AIR = fields("""
    num_hidden_layers=46 hidden_size=4096 num_attention_heads=96 num_key_value_heads=8 vocab_size=151552
    model_type="glm4_moe" intermediate_size=10944 moe_intermediate_size=1408 n_routed_experts=128
    num_experts_per_tok=8 attention_bias=true head_dim=128
""")
SMALL = dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024)


def test_a_missing_key_has_the_default_of_transformers(read):
    """GLM-4.5-Air has 106 B parameters, and the text part of Gemma 3 4B has 3.88 B."""
    assert read(AIR).params == pytest.approx(106.852e9, rel=1e-5)
    assert read(SMALL | {"model_type": "gemma3_text"}).params == pytest.approx(3.8803e9, rel=1e-5)


# A released file of each kind; the test removes its keys, one at a time.
WHOLE = {
    **{name: config for name, config in CONFIGS.items() if name != "llama-3-70b"},
    "qwen3-8b": shape_of("qwen3", 36, 4096, 32, 8, 12288, 151936) | {"head_dim": 128},
    "glm-4.5-air": AIR,
    "falcon-7b": fields("""
        model_type="falcon" num_hidden_layers=32 hidden_size=4544 num_attention_heads=71 vocab_size=65024
        multi_query=true new_decoder_architecture=false parallel_attn=true bias=false alibi=false
    """),
    "gemma-2-2b": shape_of("gemma2", 26, 2304, 8, 4, 9216, 256000) | dict(head_dim=256, sliding_window=4096),
    "gpt2-xl": GPT2_XL,
    "kimi-k2": KIMI,
}
# Keys whose default in Transformers' class differs from the released file.
OTHERS = {
    ("llama-4-maverick", "interleave_moe_layer_step"),
    ("glm-4.5-air", "attention_bias"),
    ("deepseek-v2-lite", "q_lora_rank"),
    ("deepseek-v2-lite", "first_k_dense_replace"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_key_that_is_left_out_is_refused_or_makes_no_other_model(name, read):
    """A file without one key gives the same model, the model of Transformers' default, or a sentence that
    refuses it. It never gives a guess."""
    config = WHOLE[name]
    whole = read(config)
    for key in config.keys() - {"model_type"}:
        rest = {one: value for one, value in config.items() if one != key}
        try:
            same = read(rest) == whole
        except ValueError as e:
            assert "does not say" in str(e) or (name, key) in OTHERS, key
        else:
            assert same or (name, key) in OTHERS, key


def test_a_missing_key_without_a_default_is_refused_by_its_name(read):
    for name, key in (
        ("qwen3-30b-a3b", "head_dim"),
        ("glm-4.5-air", "head_dim"),
        ("kimi-k2", "q_lora_rank"),
        ("kimi-k2", "n_shared_experts"),
        ("deepseek-v3", "moe_intermediate_size"),
    ):
        for value in ({}, {key: None} if key != "q_lora_rank" else {}):
            with pytest.raises(ValueError, match=f"does not say {key}"):
                read({one: value for one, value in WHOLE[name].items() if one != key} | value)


def test_further_keys_of_granite_4_and_phi_4_mini_are_known(read):
    """Granite 4.0 Micro's card prints 3.4 billion parameters, Phi-4-mini's 3.8."""
    phi = shape_of("phi3", 32, 3072, 24, 8, 8192, 200064)
    phi |= dict(tie_word_embeddings=True, sliding_window=262144)
    assert read(phi | dict(full_attn_mod=1, interpolate_factor=1)).params == 3_836_021_760
    with pytest.raises(ValueError, match="full_attn_mod is not read"):
        read(phi | dict(full_attn_mod=2))
    granite = shape_of("granitemoehybrid", 40, 2560, 40, 8, 8192, 100352) | fields("""
        shared_intermediate_size=8192 num_local_experts=0 num_experts_per_tok=0 mamba_d_state=256
        normalization_function="rmsnorm" position_embedding_type="rope" tie_word_embeddings=true
    """)
    assert read(granite | {"layer_types": ["attention"] * 40}).params == 3_402_836_480
    hybrid = {"layer_types": ["mamba", "attention"] * 20}
    for others in (hybrid, {}, {"layer_types": ["attention"] * 40, "num_local_experts": 8}):
        with pytest.raises(ValueError, match="recurrent layers"):
            read(granite | others)


@pytest.mark.parametrize(
    "kind, nearest", [("deepseek_v32", "deepseek_v3"), ("minimax_m2", ""), ("qwen3_vl_moe", "qwen3_moe")]
)
def test_an_unknown_type_is_refused_by_its_name_before_any_key(kind, nearest, read):
    with pytest.raises(ValueError, match=f"unknown model_type '{kind}'") as refused:
        read(CONFIGS["deepseek-v3"] | {"model_type": kind, "an_unknown_key": 1})
    assert "not read" not in str(refused.value) and "sees" not in str(refused.value)
    assert not nearest or f"the nearest is '{nearest}'" in str(refused.value)


@pytest.mark.parametrize(
    "kind, layers",
    [("jamba", "Mamba"), ("nemotron_h", "Mamba-2"), ("falcon_h1", "Mamba-2"), ("qwen3_next", "gated delta")],
)
def test_recurrent_layers_are_refused_by_name(kind, layers, read):
    """Recurrent layers are refused also if the file has "gated" and "tied"."""
    for said in ({}, {"gated": True, "tied": False}):
        with pytest.raises(ValueError, match=f"{kind} has recurrent layers .{layers}.*not priced here"):
            read(LLAMA | {"model_type": kind} | said)


GEMMA3_1B = fields("""
    num_hidden_layers=26 hidden_size=1152 num_attention_heads=4 num_key_value_heads=1 vocab_size=262144
    model_type="gemma3_text" head_dim=256 intermediate_size=6912 sliding_window=512
    sliding_window_pattern=6
""")


def test_windows_and_norms_of_gemma_are_read(read):
    gemma = read(GEMMA3_1B)
    assert gemma.params == 999_885_952 and (gemma.window, gemma.windowed) == (512, 22)
    qwen = LLAMA | dict(model_type="qwen2", num_key_value_heads=32, use_sliding_window=True)
    assert read(qwen | {"sliding_window": 4096, "max_window_layers": 28}).windowed == 4
    assert (read(qwen).window, read(qwen).windowed) == (4096, 4)  # as Transformers' class has it
    assert read(qwen | {"use_sliding_window": False}).window == 0
    mistral = shape_of("mistral", 32, 4096, 32, 8, 14336, 32000)
    assert read(mistral).window == 4096 and read(mistral | {"sliding_window": None}).window == 0


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="unknown model 'llama3-70b'; the nearest is 'llama-3-70b'"):
        find_model("llama3-70b")
    with pytest.raises(ValueError, match="cannot read nowhere.json"):
        find_model("nowhere.json")
