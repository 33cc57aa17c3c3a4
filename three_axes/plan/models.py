"""Lists the models that the planner knows by name; any other is read from its config.json (`find_model`)."""

from __future__ import annotations

from pathlib import Path

from ..checks import is_file, unknown
from .shape import Experts, Latent, ModelShape


def gpt(
    name: str, layers: int, hidden: int, heads: int, vocab: int = 51200, positions: int = 2048
) -> ModelShape:
    """A GPT: it has biases, learned positions and one matrix for embedding and head."""
    return ModelShape(name, layers, hidden, heads, vocab, biases=True, tied=True, positions=positions)


def llama(
    name: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, kv_heads: int = 0, **more
) -> ModelShape:
    """A Llama: it has a gated feed-forward part and no biases. more: other fields of a `ModelShape`."""
    return ModelShape(name, layers, hidden, heads, vocab, kv_heads, ffn, gated=True, **more)


def _gpt_oss(name: str, layers: int, experts: int) -> ModelShape:
    routed = Experts(experts, 4, 2880, router_bias=True)
    more = dict(head_dim=64, biases=True, sinks=True, window=128, windowed=layers // 2, experts=routed)
    return llama(name, layers, 2880, 64, 2880, 201088, 8, **more)


def _llama_4(name: str, experts: int, every: int) -> ModelShape:
    """A Llama 4. experts: their number in a layer. Of each `every` layers the last one has experts."""
    routed = Experts(experts, 1, 8192, shared=8192, every=every)
    more = dict(head_dim=128, window=8192, windowed=36, chunked=True, experts=routed)
    return llama(name, 48, 5120, 40, 16384, 202048, 8, **more)


_QWEN3 = dict(head_dim=128, qk_norm=True)
# DeepSeek's experts: number of routed ones, number that a token goes through, width of each.
_V2_EXPERTS = Experts(64, 6, 1408, shared=2 * 1408, dense_layers=1)
_V3_EXPERTS = Experts(256, 8, 2048, shared=2048, dense_layers=3, router_bias=True)

MODELS: dict[str, ModelShape] = {
    m.name: m
    for m in (
        # The course's own, helpers/toy/model.py, with hidden 256. Its matrices have no biases.
        ModelShape("toy", 4, 256, 4, 256, positions=64),
        gpt("gpt2-xl", 48, 1600, 25, 50257, 1024),
        gpt("gpt3-175b", 96, 12288, 96, 50257),
        gpt("opt-30b", 48, 7168, 56, 50272, 2050),
        gpt("mt-nlg-530b", 105, 20480, 128, 51200),
        llama("tinyllama-1.1b", 22, 2048, 32, 5632, 32000, 4),
        llama("qwen3-0.6b", 28, 1024, 16, 3072, 151936, 8, tied=True, **_QWEN3),
        llama("qwen3-1.7b", 28, 2048, 16, 6144, 151936, 8, tied=True, **_QWEN3),
        llama("llama-3.2-1b", 16, 2048, 32, 8192, 128256, 8, tied=True),
        llama("llama-3.2-3b", 28, 3072, 24, 8192, 128256, 8, tied=True),
        llama("llama-2-7b", 32, 4096, 32, 11008, 32000),
        llama("llama-2-13b", 40, 5120, 40, 13824, 32000),
        llama("llama-30b", 60, 6656, 52, 17920, 32000),
        llama("llama-2-70b", 80, 8192, 64, 28672, 32000, 8),
        llama("llama-3-8b", 32, 4096, 32, 14336, 128256, 8),
        llama("llama-3-70b", 80, 8192, 64, 28672, 128256, 8),
        llama("llama-3-405b", 126, 16384, 128, 53248, 128256, 8),
        # From their config.json on Hugging Face; 8x22b is version 0.1, whose vocabulary is 32,000.
        llama("mixtral-8x7b", 32, 4096, 32, 14336, 32000, 8, experts=Experts(8, 2, 14336)),
        llama("mixtral-8x22b", 56, 6144, 48, 16384, 32000, 8, experts=Experts(8, 2, 16384)),
        llama("qwen3-30b-a3b", 48, 2048, 32, 6144, 151936, 4, experts=Experts(128, 8, 768), **_QWEN3),
        llama("qwen3-235b-a22b", 94, 4096, 64, 12288, 151936, 4, experts=Experts(128, 8, 1536), **_QWEN3),
        llama("deepseek-v2-lite", 27, 2048, 16, 10944, 102400, latent=Latent(512), experts=_V2_EXPERTS),
        llama("deepseek-v3", 61, 7168, 128, 18432, 129280, latent=Latent(512, 1536), experts=_V3_EXPERTS),
        _llama_4("llama-4-scout", 16, 1),
        _llama_4("llama-4-maverick", 128, 2),
        _gpt_oss("gpt-oss-20b", 24, 32),
        _gpt_oss("gpt-oss-120b", 36, 128),
    )
}


def find_model(name: str) -> ModelShape:
    """A shape by name, or from a JSON file: Hugging Face's config.json of a decoder (see `configs`), or a
    file with fields of `ModelShape`, without experts and latent attention.

    Raises ValueError with one sentence for an unknown name, an unreadable file, a file without the needed
    numbers, and a model with layers that the planner has no formulas for.
    """
    model = MODELS.get(name.lower())
    if not model and is_file(name):
        from .configs import from_config

        model = from_config(Path(name))
    if model:
        return model
    raise ValueError(f"unknown model {unknown(name, MODELS)}, or give a config.json")
