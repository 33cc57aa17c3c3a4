"""How a model is laid out on ranks: the choices that memory and time depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .checks import divisors, whole
from .models import ModelShape
from .pipelines import SCHEDULES, Pipeline

RECOMPUTE = ("none", "selective", "per-op", "full")
# Of Megatron-LM, torchtitan and DeepSpeed. Llama 3's paper puts dp outermost, and pp before it.
ORDER = ("pp", "dp", "tp")


class Axes(NamedTuple):
    """The sizes of the axes alone: what a person chooses, and defends."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        return " · ".join(f"{axis.upper()} {size}" for axis, size in self._asdict().items())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """dp · tp · pp ranks. The numbers may be NumPy arrays of one shape, to look at many layouts at once.

    microbatch: sequences that go through the model together (b). interleave: chunks on each pipeline rank
    (v). zero: 0 to 3, what is split over dp: nothing, optimizer state, gradients too, weights too (3 is what
    FSDP does). recompute: none; selective, the attention scores only; per-op, all but the attention and every
    second matrix product (torchtitan's default); full, all of a layer. sequence_parallel: split what lies
    between the matrices over tp as well. order: the axes from the outermost to the innermost. balanced: the
    last pipeline stages hold fewer layers, to make up for the head's work.
    """

    dp: int | np.ndarray = 1
    tp: int | np.ndarray = 1
    pp: int | np.ndarray = 1
    microbatch: int | np.ndarray = 1
    interleave: int | np.ndarray = 1
    schedule: str = "1F1B"
    zero: int | np.ndarray = 0
    recompute: str = "none"
    sequence_parallel: bool | np.ndarray = True
    order: tuple[str, ...] = ORDER
    balanced: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> how many ranks, the outermost axis first: what `placement` asks for."""
        return {axis: getattr(self, axis) for axis in self.order}

    @property
    def pipeline(self) -> Pipeline:
        """The record of its schedule."""
        return SCHEDULES[self.schedule]

    @property
    def chunks(self):
        """Stages on each pipeline rank: v, or what the schedule has."""
        return self.pipeline.chunks or self.interleave

    @property
    def ranks(self):
        """d · t · p: how many devices it takes."""
        return self.dp * self.tp * self.pp

    def tokens(self, seq_len):
        """Tokens of a microbatch that go through a rank's matrices together."""
        return self.microbatch * seq_len

    @property
    def axes(self) -> Axes:
        """Its sizes alone."""
        return Axes(*(getattr(self, axis) for axis in Axes._fields))

    def __str__(self) -> str:
        parts = [str(self.axes), f"b {self.microbatch}"]
        if np.any(np.asarray(self.interleave) > 1):
            parts.append(f"v {self.interleave}")
        if np.any(np.asarray(self.pp) > 1):
            parts.append(self.schedule)
        parts += [f"ZeRO-{self.zero}"] * bool(self.zero) + ["SP"] * bool(
            self.sequence_parallel and np.any(np.asarray(self.tp) > 1)
        )
        parts += (
            [f"{self.recompute} recompute"] * (self.recompute != "none")
            + [f"{' '.join(self.order)} from the outermost"] * (self.order != ORDER)
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
    if sorted(layout.order) != sorted(Axes._fields):
        raise ValueError(f"order names each of {', '.join(Axes._fields)} once, not {layout.order!r}")
    if gpus is not None and layout.ranks != gpus:
        raise ValueError(f"dp·tp·pp = {d}·{t}·{p} = {layout.ranks}, but there are {gpus} GPUs")
    if model.heads % t:
        raise ValueError(
            f"tp {t} does not divide {model.heads} attention heads; {_divisors(model.heads, t, gpus)}"
        )
    if model.kv_heads % t and t % model.kv_heads:
        raise ValueError(
            f"tp {t} neither divides nor is a multiple of {model.kv_heads} key/value heads;"
            f" {_divisors(model.heads, t, gpus)}"
        )
    if model.ffn % t:
        raise ValueError(
            f"tp {t} does not divide the feed-forward width {model.ffn}; {_divisors(model.ffn, t, gpus)}"
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
            f"{model.layers} layers do not divide over {p * v} stages (pp·interleave), nor do {model.layers}"
            f" + 2 with the embedding and the head counted; {_divisors(model.layers, p * v, gpus)}"
        )
    if layout.schedule == "interleaved" and (p == 1 or v == 1):
        raise ValueError("interleaving needs pp and interleave of at least 2; use 1F1B otherwise")
    if layout.schedule != "interleaved" and v > 1:
        raise ValueError(f"interleave {v} needs the schedule 'interleaved', not {layout.schedule!r}")
    if layout.pipeline.splits:
        if p == 1:
            raise ValueError(f"{layout.schedule} needs pp of at least 2; use 1F1B otherwise")
        if layout.recompute in ("per-op", "full"):
            raise ValueError(
                f"{layout.schedule} lets weight gradients wait, and they need what {layout.recompute}"
                " recompute drops; take recompute 'none', or 1F1B"
            )
        if layout.pipeline.folded and model.layers % (2 * p):
            raise ValueError(
                f"{layout.schedule} has two stages on each of {p} ranks, and {model.layers} layers do not"
                f" divide over {2 * p}; take ZB-H1, or another pp"
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
            raise ValueError(
                f"interleaving needs a multiple of pp = {p} microbatches, and there are {m}; take a batch of"
                f" {(m // p + 1) * p * d * b}, another microbatch, or 1F1B"
            )
        if m < (needed := p * layout.pipeline.fills):
            raise ValueError(
                f"{layout.schedule} fills {p} stages with {needed} microbatches, and there are {m}; take a"
                " smaller microbatch, or 1F1B"
            )


def _divisors(n: int, near: int, gpus: int | None) -> str:
    """The nearest divisors of n, of those that the number of GPUs allows."""
    fits = [k for k in divisors(n) if gpus is None or gpus % k == 0]
    below, above = max(k for k in fits if k <= near), min((k for k in fits if k >= near), default=0)
    return f"take {below}" + (f" or {above}" if above not in (0, below) else "")


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
