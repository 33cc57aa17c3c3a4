"""By hand, what `runtime.trace` finds of a real model: its collectives, and what plain PyTorch holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .layout import Layout
from .memory import EAGER_SCORE_BYTES, activations_per_layer
from .models import ModelShape


@dataclass
class Call:
    """One kind of collective on one axis: how often in a step, and how large the whole tensors are,
    in bytes.
    """

    op: str
    axis: str
    calls: int
    payload: float


def expected(model: ModelShape, layout: Layout, seq_len: int, plan: str = "Megatron's") -> list[Call]:
    """The collectives of a microbatch by hand: what `trace` should count, to the byte where dp divides every
    matrix.

    FSDP gathers each layer for its forward and again for its backward, and what is left (embedding, last
    norm, head) once; it reduces each once. Tensor parallelism has Megatron's four all-reduces a layer, or
    with sequence parallelism four pairs of gather and scatter; a split vocabulary adds one at each end, and
    the split loss three of a float32 a token. The usual plan sums each matrix's input gradient by itself:
    seven a layer where one gates (two forward; q, k, v, gate and up backward), and none at the ends.
    Recomputing runs a layer's collectives again, but for its last, whose result nobody needs.
    """
    d, t, L, h = layout.dp, layout.tp, model.layers, model.hidden
    sb = seq_len * layout.microbatch
    found: list[Call] = []

    def add(op: str, axis: str, calls: int, payload: float) -> None:
        if calls and {"dp": d, "tp": t}[axis] > 1:
            found.append(Call(op, axis, calls, payload))

    layer = layer_bytes(model, t)
    rest = root_bytes(model, 1 if plan == "usual" else t)
    add("all_gather", "dp", 2 * L + 1, 2 * (2 * L * layer + rest))
    add("reduce_scatter", "dp", L + 1, layout.gradient_bytes * (L * layer + rest))
    again = layout.recompute == "full"
    norms = (2 * L + 1) * (1 if model.gated else 2)
    if plan == "usual":
        each = 2 + (5 if model.gated else 4) + again
        add("all_reduce", "tp", L * each, L * each * 2 * sb * h)
    elif layout.sequence_parallel:
        learned = model.positions > 0  # their gradient is gathered once
        add(
            "all_gather",
            "tp",
            (4 + 2 * again) * L + 2 + learned,
            ((4 + 2 * again) * L + 2) * 2 * sb * h + learned * 2 * seq_len * h,
        )
        add("reduce_scatter", "tp", (4 + again) * L + 2, ((4 + again) * L + 2) * 2 * sb * h)
        add("all_reduce", "tp", norms + 3, norms * 2 * h + 3 * 4 * sb)
    else:
        add("all_reduce", "tp", (4 + again) * L + 2 + 3, ((4 + again) * L + 2) * 2 * sb * h + 3 * 4 * sb)
    return sorted(found, key=lambda c: (c.op, c.axis))


def layer_bytes(model: ModelShape, t: int) -> float:
    """Numbers of one layer on one of t ranks: norms, and biases behind a split by rows, are on all
    of them.
    """
    whole = 2 * model.hidden * (1 if model.gated else 2) + model.biases * 2 * model.hidden
    return (model.layer_params - whole) / t + whole


def root_bytes(model: ModelShape, t: int) -> float:
    """The same for embedding, last norm and head."""
    norm = model.hidden * (1 if model.gated else 2)
    return (model.vocab * model.hidden * (1 if model.tied else 2)) / t + norm + model.positions * model.hidden


def beyond(model: ModelShape, layout: Layout, seq_len: int) -> dict[str, float]:
    """Bytes that plain PyTorch holds at the peak and `theory.memory`, which counts Megatron-LM's fused
    kernels, does not; by what for.
    """
    t, sb, h = layout.tp, seq_len * layout.microbatch, model.hidden
    layers = 0 if layout.recompute == "full" else model.layers  # at the peak, which is at the loss
    return {
        "gathered inputs, kept whole by DTensor": (
            layers * 4.0 * sb * h * (1 - 1 / t) if layout.sequence_parallel else 0.0
        ),
        "SiLU's output, kept beside its input": (
            layers
            * activations_per_layer(model, replace(layout, eager=True, recompute="none"), seq_len).get(
                "SiLU's output", 0.0
            )
        ),
        # A split loss makes one more.
        "scores: more float32 copies, and one in bfloat16": (
            (EAGER_SCORE_BYTES + 4 * (t > 1)) * sb * model.vocab / t
        ),
        "embedding and head, gathered until the end": 2.0 * root_bytes(model, t),
    }
