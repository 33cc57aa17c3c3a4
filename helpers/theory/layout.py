"""How a model is laid out on ranks: the choices that memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .checks import divisors, whole
from .models import ModelShape

SCHEDULES = ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-H2", "ZB-V")
USUAL = ("1F1B", "interleaved")  # what Megatron-LM runs
# Microbatches for each rank of the pipeline that they need to be full.
ZERO_BUBBLE = {"ZB-H1": 1, "ZB-H2": 2, "ZB-V": 2}
RECOMPUTE = ("none", "selective", "per-op", "full")


@dataclass(frozen=True)
class Layout:
    """dp · tp · pp ranks. The counts may be NumPy arrays of one shape, to look at many layouts at once.

    microbatch: sequences that go through the model together (b). interleave: chunks on each pipeline rank
    (v). zero: 0 to 3, what is split over dp: nothing, optimizer state, gradients too, weights too (3 is what
    FSDP does). recompute: none; selective, the attention scores only; per-op, all but the attention and every
    second matrix product (torchtitan's default); full, all of a layer. sequence_parallel: split what lies
    between the matrices over tp as well. fused_attention: an attention that never stores the scores.
    gradient_bytes: 2 or 4 for each gradient. eager: PyTorch's operations one by one, as written, instead of
    fused kernels (Megatron-LM's, or a compiler's). balanced: the last pipeline stages hold fewer layers, to
    make up for the head's work.
    """

    dp: int | np.ndarray = 1
    tp: int | np.ndarray = 1
    pp: int | np.ndarray = 1
    microbatch: int | np.ndarray = 1
    interleave: int | np.ndarray = 1
    schedule: str = "1F1B"
    zero: int = 0
    recompute: str = "none"
    sequence_parallel: bool = True
    fused_attention: bool = True
    gradient_bytes: int = 2
    eager: bool = False
    balanced: bool = False

    @property
    def chunks(self):
        """Stages on each pipeline rank: v, and 2 for ZB-V, which goes down the ranks and back up."""
        return 2 if self.schedule == "ZB-V" else self.interleave

    @property
    def ranks(self):
        """d · t · p: how many devices it takes."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        parts = [f"DP {self.dp}", f"TP {self.tp}", f"PP {self.pp}", f"b {self.microbatch}"]
        if np.any(np.asarray(self.interleave) > 1):
            parts.append(f"v {self.interleave}")
        if np.any(np.asarray(self.pp) > 1):
            parts.append(self.schedule)
        parts += [f"ZeRO-{self.zero}"] * bool(self.zero) + ["SP"] * bool(
            self.sequence_parallel and np.any(np.asarray(self.tp) > 1)
        )
        parts += (
            [f"{self.recompute} recompute"] * (self.recompute != "none")
            + ["eager"] * self.eager
            + ["balanced"] * bool(self.balanced and np.any(np.asarray(self.pp) > 1))
        )
        return " · ".join(parts)


def check(
    model: ModelShape, layout: Layout, global_batch: int | None = None, gpus: int | None = None
) -> None:
    """Refuse, in one sentence with the nearest valid choice, a layout that cannot be.

    For one layout of plain numbers. Raises ValueError. global_batch: sequences in one step over all ranks.
    """
    d, t, p, b, v = layout.dp, layout.tp, layout.pp, layout.microbatch, layout.interleave
    for name, value in (("dp", d), ("tp", t), ("pp", p), ("microbatch", b), ("interleave", v)):
        whole(name, value, 1, 10**7)
    if layout.schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {layout.schedule!r}; known are {', '.join(SCHEDULES)}")
    if layout.recompute not in RECOMPUTE:
        raise ValueError(f"unknown recompute {layout.recompute!r}; known are {', '.join(RECOMPUTE)}")
    if layout.zero not in (0, 1, 2, 3):
        raise ValueError(f"zero is 0, 1, 2 or 3, not {layout.zero!r}")
    if layout.gradient_bytes not in (2, 4):
        raise ValueError(f"gradient_bytes is 2 or 4, not {layout.gradient_bytes!r}")
    if gpus is not None and layout.ranks != gpus:
        raise ValueError(f"dp·tp·pp = {d}·{t}·{p} = {layout.ranks}, but there are {gpus} GPUs")
    if model.heads % t:
        raise ValueError(f"tp {t} does not divide {model.heads} attention heads; {_divisors(model.heads, t)}")
    if model.kv_heads % t and t % model.kv_heads:
        raise ValueError(
            f"tp {t} neither divides nor is a multiple of {model.kv_heads} key/value heads;"
            f" {_divisors(model.heads, t)}"
        )
    if model.ffn % t:
        raise ValueError(
            f"tp {t} does not divide the feed-forward width {model.ffn}; {_divisors(model.ffn, t)}"
        )
    if layout.balanced and layout.chunks > 1:
        raise ValueError(
            f"balanced stages are worked out for one chunk on each pipeline rank, not {layout.chunks}; take"
            " 1F1B"
        )
    if layout.balanced and p > model.layers:
        raise ValueError(
            f"{model.layers} layers do not give each of {p} stages one; take pp {model.layers}, or less"
        )
    if not layout.balanced and layers_on_stage(model.layers, p * v, 0) is None:
        raise ValueError(
            f"{model.layers} layers do not divide over {p * v} stages (pp·interleave), nor do "
            f"{model.layers} + 2 with the embedding and the head counted; {_divisors(model.layers, p * v)}"
        )
    if layout.schedule == "interleaved" and (p == 1 or v == 1):
        raise ValueError("interleaving needs pp and interleave of at least 2; use 1F1B otherwise")
    if layout.schedule != "interleaved" and v > 1:
        raise ValueError(f"interleave {v} needs the schedule 'interleaved', not {layout.schedule!r}")
    if layout.schedule in ZERO_BUBBLE:
        if p == 1:
            raise ValueError(f"{layout.schedule} needs pp of at least 2; use 1F1B otherwise")
        if layout.recompute in ("per-op", "full"):
            raise ValueError(
                f"{layout.schedule} lets weight gradients wait, and they need what {layout.recompute}"
                " recompute drops; take recompute 'none', or 1F1B"
            )
        if layout.schedule == "ZB-V" and model.layers % (2 * p):
            raise ValueError(
                f"ZB-V has two stages on each of {p} ranks, and {model.layers} layers do not divide over"
                f" {2 * p}; take ZB-H1, or another pp"
            )
    if global_batch is not None:
        whole("global_batch", global_batch)
        if global_batch % (d * b):
            raise ValueError(
                f"a batch of {global_batch} does not divide by dp·microbatch = {d}·{b} = {d * b}; "
                f"take {max(1, global_batch // (d * b)) * d * b}, or another microbatch"
            )
        m = global_batch // (d * b)
        if layout.schedule == "interleaved" and m % p:
            raise ValueError(f"interleaving needs microbatches in groups of pp: {m} is no multiple of {p}")
        if m < (needed := p * ZERO_BUBBLE.get(layout.schedule, 0)):
            raise ValueError(
                f"{layout.schedule} fills {p} stages with {needed} microbatches, and there are {m}; take a"
                " smaller microbatch, or 1F1B"
            )


def _divisors(n: int, near: int) -> str:
    fits = divisors(n)
    below, above = max(k for k in fits if k <= near), min((k for k in fits if k >= near), default=n)
    return f"take {below}" + (f" or {above}" if above != below else "")


def layers_on_stage(layers: int, stages: int, stage: int) -> int | None:
    """Layers that `stage` of `stages` holds; None where they cannot be spread.

    Evenly, or with one less on the first and last stage, where the embedding and the head
    stand for a layer (as Llama 3 405B: 126 layers on 16 stages).
    """
    if layers % stages == 0:
        return layers // stages
    if stages > 1 and (layers + 2) % stages == 0:
        return (layers + 2) // stages - (stage in (0, stages - 1))
    return None


def layers_on_rank(model: ModelShape, layout: Layout, rank):
    """Layers in all the chunks of a pipeline rank, for a layout that `check` admits. Takes arrays.

    Balanced: each rank in turn takes its share, rounded up, of the layers and the head, which counts for as
    many layers as have its parameters; what is left lies before the head (so Hugging Face's nanotron splits,
    also where a share rounded up leaves the last stages none).
    """
    p, stages, layers = layout.pp, layout.pp * layout.interleave, model.layers
    if layout.balanced:
        share = np.ceil((layers + (np.asarray(p) > 1) * model.vocab * model.hidden / model.layer_params) / p)
        return np.clip(layers - share * rank, 0, share)
    one_less = (rank == 0) * 1 + (rank == p - 1) * 1
    return np.where(layers % stages == 0, layers // p, (layers + 2) // p - one_less)
