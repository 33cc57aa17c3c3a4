"""Parameter counts, to the last one; configurations from elsewhere; refusals."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import toy
from helpers.theory.models import MODELS, find_model


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
        ("gpt2-xl", 1_557_611_200),
        ("opt-30b", 29_974_540_288),
    ],
)
def test_counts_are_those_of_the_published_weights(name, params):
    assert find_model(name).params == params


def test_the_toy_is_the_toy():
    assert MODELS["toy"].params == sum(p.numel() for p in toy.ToyTransformer(hidden=256).parameters())


def test_gpt_flops_are_the_papers():
    """Narayanan et al. 2021, equation 3, less the recomputed forward: 72 B L h² (1 + s/6h + V/12Lh) for each
    s·B tokens.
    """
    m = MODELS["gpt3-175b"]
    s, h, L, V = 2048, m.hidden, m.layers, m.vocab
    assert m.flops_per_token(s) == pytest.approx(72 * L * h * h * (1 + s / (6 * h) + V / (12 * L * h)))


def test_a_hugging_face_configuration(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 8192,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "intermediate_size": 28672,
                "vocab_size": 128256,
                "tie_word_embeddings": False,
            }
        )
    )
    assert find_model(str(path)).params == 70_553_706_496
    path.write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "n_embd": 1600,
                "n_layer": 48,
                "n_head": 25,
                "vocab_size": 50257,
                "n_positions": 1024,
            }
        )
    )
    assert find_model(str(path)).params == MODELS["gpt2-xl"].params


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "is not a JSON file"),
        ("[]", "holds no JSON object"),
        ("{}", "does not say layers"),
        ('{"num_hidden_layers": "many"}', "layers must be a whole number, not 'many'"),
        ('{"layers": 2, "hidden": 10, "heads": 3, "vocab": 5}', "hidden 10 does not divide by 3 heads"),
        (
            '{"layers": -2, "hidden": 12, "heads": 3, "vocab": 5}',
            "layers must be a whole number of at least 1",
        ),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path, text, said):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        find_model(str(path))


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    "changed, said",
    [
        (
            {"num_local_experts": 8},
            "is a mixture of experts .num_local_experts: 8., which cannot be planned yet; give",
        ),
        (
            {"model_type": "starcoder2"},
            "the layers of model_type 'starcoder2' are not known here; known are bloom",
        ),
        ({"tie_word_embeddings": "false"}, "tied must be true or false, not 'false'"),
        ({"gated": "no"}, "gated must be true or false, not 'no'"),
        ({"head_dim": -128}, "head_dim must be a whole number of at least 0, not -128"),
        ({"positions": "abc"}, "positions must be a whole number"),
        ({"hidden_size": 10**400}, "hidden must be at most 100,000,000; a number of more than 100 digits"),
        (
            {"model_type": "opt", "word_embed_proj_dim": 512},
            "an embedding of 512 beside a hidden size of 4096 is not modelled here",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_and_not_read_as_something_else(tmp_path, changed, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | changed))
    with pytest.raises(ValueError, match=said):
        find_model(str(path))


def test_a_file_may_begin_with_a_mark_and_say_what_its_layers_are(tmp_path):
    path = tmp_path / "C.JSON"
    path.write_text(json.dumps(LLAMA), encoding="utf-8-sig")
    assert find_model(str(path)).params == MODELS["llama-2-7b"].params
    path.write_text(json.dumps(LLAMA | {"model_type": "mine", "gated": True, "tied": True}))
    assert find_model(str(path)).params == MODELS["llama-2-7b"].params - 32000 * 4096
    path.write_text(
        json.dumps(
            {
                "model_type": "gemma",
                "num_hidden_layers": 18,
                "hidden_size": 2048,
                "num_attention_heads": 8,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "intermediate_size": 16384,
                "vocab_size": 256000,
            }
        )
    )
    # Gemma-2b's published weights: its head is its embedding.
    assert find_model(str(path)).params == 2_506_172_416


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="unknown model 'llama3-70b'; the nearest is 'llama-3-70b'"):
        find_model("llama3-70b")
    with pytest.raises(ValueError, match="cannot read nowhere.json"):
        find_model("nowhere.json")


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "hidden_size",
                        "n_layer",
                        "heads",
                        "vocab_size",
                        "n_inner",
                        "model_type",
                        "name",
                        "head_dim",
                        "kv_heads",
                        "positions",
                        "n_positions",
                        "gated",
                    ]
                ),
                inner,
                max_size=8,
            )
        ),
    )
)
def test_any_json_gives_a_shape_or_a_sentence(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_text(json.dumps(config))
    try:
        assert find_model(str(path)).params > 0
    except ValueError as e:
        assert "\n" not in str(e)
