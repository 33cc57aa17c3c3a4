"""A reader's own sizes, tokens and tools: config.json, *.bin, safetensors, torch.compile."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_train import SMALL, losses_of, near

from helpers import World, toy
from helpers.train.data import batch_of, read_tokens
from helpers.train.export import export
from helpers.train.launch import sizes_in

LLAMA = dict(model_type="llama", hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=1000)


@pytest.fixture
def tokens(tmp_path):
    some = np.random.default_rng(0).integers(0, 1000, 600)
    for name, part in (("b", some[300:]), ("a", some[:300])):
        part.astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    return tmp_path, torch.from_numpy(some)


def test_tokens_of_a_folder_come_by_name(tokens, tmp_path):
    folder, some = tokens
    assert torch.equal(read_tokens(str(folder), 1000).long(), some)
    config = replace(SMALL, tokens=str(folder), vocabulary=1000)
    x, y = batch_of(read_tokens(str(folder), 1000), 3, config)
    assert x.dtype == torch.long and torch.equal(x[:, 1:], y[:, :-1])
    wide = tmp_path / "wide"
    wide.mkdir()
    np.array([99_999, 5], np.uint32).tofile(wide / "one.bin")
    assert read_tokens(str(wide), 100_000).tolist() == [99_999, 5]
    with pytest.raises(ValueError, match=f"has a token {some.max()}; the model knows 500"):
        read_tokens(str(folder), 500)
    with pytest.raises(ValueError, match="has no \\*.bin with tokens"):
        read_tokens(str(tmp_path / "none"), 500)


def test_what_does_not_go_together_is_refused():
    for config, said in (
        (replace(SMALL, vocabulary=1000), "--tokens for a vocabulary of others"),
        (replace(SMALL, text="a", tokens="b"), "give --text for bytes, or --tokens"),
        (replace(SMALL, compile=True, tp=2), "--compile is for tp 1 and cp 1"),
    ):
        with pytest.raises(ValueError, match=said):
            config.checked(config.tp)


def test_sizes_and_tokens_of_ones_own_train_as_the_twin_does(tokens, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    sizes = sizes_in(str(tmp_path / "config.json"))
    assert sizes == dict(hidden=64, heads=4, layers=2, vocabulary=1000)
    own = replace(SMALL, tokens=str(tokens[0]), **sizes)
    with World(1) as one, World(4) as four:
        twin = one.run(losses_of, replace(own, dp=1), 3)[0]
        for layout in (dict(dp=2, tp=2), dict(dp=2, pp=2, microbatch=2)):
            near(four.run(losses_of, replace(own, **layout), 3)[0], twin, 1e-5)


def test_compiled_blocks_compute_the_same():
    with World(1, timeout=120) as one:
        plain, compiled = (one.run(losses_of, replace(SMALL, dp=1, compile=on), 2)[0] for on in (False, True))
    near(compiled, plain, 1e-5)


def by_gpt2(weights: dict, config: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Radford et al. 2019, under the names and in the shapes that transformers has."""
    get = lambda name: (weights[f"transformer.{name}.weight"], weights[f"transformer.{name}.bias"])
    norm = lambda name, x: F.layer_norm(x, x.shape[-1:], *get(name), config["layer_norm_epsilon"])
    linear = lambda name, x: x @ get(name)[0] + get(name)[1]
    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][: tokens.shape[1]]
    for i in range(config["n_layer"]):
        q, k, v = linear(f"h.{i}.attn.c_attn", norm(f"h.{i}.ln_1", x)).chunk(3, -1)
        heads = (y.unflatten(-1, (config["n_head"], -1)).transpose(1, 2) for y in (q, k, v))
        seen = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(f"h.{i}.attn.c_proj", seen)
        x = x + linear(f"h.{i}.mlp.c_proj", F.gelu(linear(f"h.{i}.mlp.c_fc", norm(f"h.{i}.ln_2", x))))
    return norm("ln_f", x) @ weights["lm_head.weight"].T


def test_what_is_exported_is_a_gpt2(tmp_path):
    model, at = toy.ToyTransformer(hidden=64, seq_len=32, vocabulary=500), torch.randint(500, (2, 32))
    export(model, tmp_path / "made")
    config = json.loads((tmp_path / "made/config.json").read_text())
    weights = load_file(tmp_path / "made/model.safetensors")
    with torch.no_grad():
        assert torch.allclose(by_gpt2(weights, config, at), model(at), atol=1e-5)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        export(model, tmp_path / "file")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    with torch.no_grad():
        assert torch.allclose(theirs(at).logits, model(at), atol=1e-5)
