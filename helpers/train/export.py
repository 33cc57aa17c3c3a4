"""The trained model for others: under GPT-2's names, whose blocks are the toy's, as transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .. import toy


def export(model: toy.ToyTransformer, folder: Path) -> None:
    """Write model.safetensors and config.json. GPT-2 has biases where the toy has none: zeros. Raises
    ValueError where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights_of(model), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config_of(model), indent=1), encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{folder} cannot be written: {e.strerror or e}") from None


def config_of(model: toy.ToyTransformer) -> dict:
    """What config.json says: a GPT-2 of the model's sizes, without dropout."""
    sizes = dict(
        n_embd=model.hidden, n_head=model.heads, n_layer=len(model.blocks), n_positions=model.seq_len
    )
    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return (
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": model[-1].score.out_features,
            "activation_function": "gelu",
            "layer_norm_epsilon": model[-1].norm.eps,
            "tie_word_embeddings": False,
        }
        | sizes
        | dropped
    )


def weights_of(model: toy.ToyTransformer) -> dict[str, torch.Tensor]:
    """Its matrices are stored as (inputs, outputs)."""
    first, last = model[0], model[-1]
    made = {"transformer.wte": (first.token.weight, None), "transformer.wpe": (first.position.weight, None)}
    made |= {"transformer.ln_f": (last.norm.weight, last.norm.bias), "lm_head": (last.score.weight, None)}
    for i, block in enumerate(model.blocks):
        at, mlp = block.attention, block.mlp
        made[f"transformer.h.{i}.ln_1"] = block.norm1.weight, block.norm1.bias
        made[f"transformer.h.{i}.ln_2"] = block.norm2.weight, block.norm2.bias
        for name, matrix in {
            "attn.c_attn": torch.cat([at.q.weight, at.k.weight, at.v.weight]),
            "attn.c_proj": at.out.weight,
            "mlp.c_fc": mlp.up.weight,
            "mlp.c_proj": mlp.down.weight,
        }.items():
            made[f"transformer.h.{i}.{name}"] = matrix.T, torch.zeros(len(matrix))
    parts = {f"{name}.{part}": x for name, pair in made.items() for part, x in zip(("weight", "bias"), pair)}
    return {name: x.detach().contiguous() for name, x in parts.items() if x is not None}
