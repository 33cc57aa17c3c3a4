"""How long a training step takes: a sum of named terms, each a line to be redone by hand.

The slowest pipeline stage sets the pace. For one microbatch, forward, a layer on one GPU takes

    matrices         FLOPs / (achievable FLOP/s · products) + bytes / (bandwidth · memory)
    attention        FLOPs / (achievable FLOP/s · scores), and the bytes of the scores where they are stored
    elementwise      bytes of norms, dropout, activation function / (bandwidth · memory)
    tensor parallel  two all-reduces of 2·s·b·h bytes over the links of the group

and backward twice that (a third time forward where it recomputes). Around the m microbatches
stand the head, the sends between stages, the bubble, data parallelism and the optimizer.

Letters as in `memory`. Six constants, each with a meaning, are fitted to two published tables of
A100 runs and to nothing else; a seventh, `exposed`, was set by judgement (data/cost_constants.json).
bench/cost_model.py holds them against runs they were not fitted to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np

from ..table import Table, human
from .checks import whole
from .collectives import book, group_bandwidth
from .hardware import Cluster
from .layout import Layout, check, layers_on_rank
from .memory import largest_stage
from .models import ModelShape

WIDE = 28  # letters of a bar
OVERHEAD = 2e9  # bytes: the CUDA context, communicators, the allocator's slack


@dataclass(frozen=True)
class Constants:
    """What is reached of what is printed: see data/cost_constants.json for units and bounds."""

    products: float
    scores: float
    memory: float
    link: float
    nic: float
    kernel: float
    exposed: float


@cache
def constants() -> Constants:
    """The fitted constants."""
    found = json.loads((Path(__file__).resolve().parents[2] / "data" / "cost_constants.json").read_text())
    return Constants(**{f.name: found[f.name]["value"] for f in fields(Constants)})


def layer_forward(
    model: ModelShape, layout: Layout, cluster: Cluster, seq_len: int, c: Constants
) -> dict[str, float]:
    """Seconds of one layer's forward for one microbatch on one GPU, by what for. Takes arrays."""
    t, s, h, gpu = layout.tp, seq_len, model.hidden, cluster.device
    sb = s * layout.microbatch
    product = lambda k, n: _product(sb, k, n, gpu, c)
    stream = lambda nbytes, kernels: nbytes / (gpu.bandwidth * c.memory) + kernels * c.kernel
    matrices = (
        product(h, (model.q_width + 2 * model.kv_width) / t)
        + product(model.q_width / t, h)
        + (2 if model.gated else 1) * product(h, model.ffn / t)
        + product(model.ffn / t, h)
    )
    # 4·s·width FLOPs a token; a fused attention skips the half above the diagonal.
    attention = (
        4.0
        * sb
        * s
        * model.q_width
        / t
        * (0.5 if layout.fused_attention else 1)
        / (gpu.achievable * c.scores)
        + c.kernel
    )
    # 11 bytes a score: written, scaled and masked, softmax, dropout and its mask, read.
    if not layout.fused_attention:
        attention = attention + stream(11.0 * sb * s * model.heads / t, 4)
    # Two norms (8 bytes a number), two residual sums (8), two dropouts (6); the activation function inside.
    between = t if layout.sequence_parallel else 1
    if layout.eager and model.gated:
        # One by one. A norm in float32: to float32 6 bytes, square 8, mean 4, product 8, back 6, weight 4. A
        # residual sum 6. Positions turned into queries and keys: minus one half 2, put together 4, times
        # cosine 4 and sine 4, sum 6. SiLU 4, times the other half 6.
        light = (
            stream(sb * h * (2 * 36 + 2 * 6) / between, 14)
            + stream(20.0 * sb * (model.q_width + model.kv_width) / t, 10)
            + stream(10.0 * sb * model.ffn / t, 2)
        )
    else:  # PyTorch's own LayerNorm, GELU and dropout, which a GPT is made of, are fused kernels in any case
        light = stream(sb * h * (16 if model.gated else 22) / between, 4) + stream(
            2.0 * sb * model.ffn * (3 if model.gated else 2) / t, 1
        )
    latency = np.where(np.asarray(t) > cluster.node, cluster.nic_latency, cluster.link_latency)
    reduce = (
        2.0 * (t - 1) / t * 2 * sb * h / group_bandwidth(cluster, t, 1, c.link, c.nic) + 2 * (t - 1) * latency
    )
    return {"matrices": matrices, "attention": attention, "elementwise": light, "tensor parallel": 2 * reduce}


def _again(
    model: ModelShape, layout: Layout, cluster: Cluster, seq_len: int, c: Constants, once: dict
) -> dict[str, float]:
    """What of `once`, a layer's forward, backward computes again."""
    if layout.recompute == "full":
        return once
    if layout.recompute == "selective":
        return {} if layout.fused_attention else {"attention": once["attention"]}
    if layout.recompute == "per-op":  # keys, attention's output, and up where there is a gate, or down
        product = lambda k, n: _product(seq_len * layout.microbatch, k, n, cluster.device, c)
        h, t = model.hidden, layout.tp
        return {
            "matrices": (
                product(h, model.kv_width / t) + product(model.q_width / t, h) + product(h, model.ffn / t)
            ),
            "elementwise": once["elementwise"],
        }
    return {}


def _product(rows, k, n, gpu, c: Constants):
    """Seconds of a matrix product (rows × k) · (k × n) in half precision."""
    moved = 2.0 * (rows * k + k * n + rows * n)
    return 2.0 * rows * k * n / (gpu.achievable * c.products) + moved / (gpu.bandwidth * c.memory) + c.kernel


def step_terms(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    m,
    seq_len: int,
    overlap: bool = True,
    c: Constants | None = None,
) -> dict[str, float]:
    """Seconds of one step by what for, with m microbatches. Arrays in `layout` and `m` give arrays.

    overlap: whether gradients and weights travel while layers compute. A share of it, `exposed`, always
    shows.
    """
    c = c or constants()
    t, p, d, v, L, h = layout.tp, layout.pp, layout.dp, layout.interleave, model.layers, model.hidden
    sb, gpu = seq_len * layout.microbatch, cluster.device
    many = np.asarray(p) > 1
    once = layer_forward(model, layout, cluster, seq_len, c)
    again = _again(model, layout, cluster, seq_len, c, once)
    # Backward computes twice as much as forward, and has as many all-reduces.
    layer = {
        name: (2 if name == "tensor parallel" else 3) * seconds + again.get(name, 0)
        for name, seconds in once.items()
    }

    # Stages: the inner ones hold `deep` layers; the ends one less where L + 2 is what divides.
    short = np.where((L % (p * v) == 0) | layout.balanced, 0, 1)
    deep = layers_on_rank(model, layout, 0) + short * many
    each = sum(layer.values())
    # Bytes moved for each; one by one: to float32 6, softmax 8, and backward 4, 12 and 6.
    scores = 36.0 if layout.eager else 16.0
    # Forward; its input's gradient and its weights' take as long.
    vocabulary = _product(sb, h, model.vocab / t, gpu, c)
    head = 3 * vocabulary + scores * sb * model.vocab / t / (gpu.bandwidth * c.memory) + 6 * c.kernel
    on_last = layers_on_rank(model, layout, p - 1)
    last = on_last * each + head
    pace = np.where(many, np.maximum(deep * each, last), last)  # of the slowest stage
    terms = {name: m * deep * seconds for name, seconds in layer.items()}
    terms["head"] = m * (pace - deep * each)

    hop = 2.0 * sb * h / t
    near = t * p <= cluster.node
    hop = hop / np.where(near, cluster.link * c.link, cluster.nic * c.nic) + np.where(
        near, cluster.link_latency, cluster.nic_latency
    )
    terms["pipeline sends"] = many * 2.0 * (m * layout.chunks + p - 1) * hop
    head_slows = pace > deep * each  # its stage is the slowest
    layers_elsewhere = L - np.where(head_slows, on_last, deep)
    others = lambda a_layer, a_head: layers_elsewhere * a_layer + np.where(head_slows, 0, a_head)
    weight = others(once["matrices"], vocabulary)
    forward = others(sum(once.values()), (head - vocabulary) / 2)
    inputs = others(each, head) - forward - weight
    terms["bubble"] = (
        many
        * {  # as simulated, to the digit; the optimizer waits for all, as it does where gradients are clipped
            "ZB-H1": forward + inputs - weight,
            "ZB-H2": np.maximum(forward, forward + inputs - 2 * weight),
            "ZB-V": np.maximum(inputs / 2, inputs - weight),
        }.get(layout.schedule, (forward + inputs + weight) / v)
    )

    mine = model.params / (t * p)  # parameters on this GPU before ZeRO
    ring = group_bandwidth(cluster, d, t, c.link, c.nic)
    share = (d - 1) / d
    g = layout.gradient_bytes
    if layout.zero == 3:  # gathered for every forward and every backward, reduced for every backward
        sync = share * mine * (2 + 2 + g) * m / ring
    # Gradients reduced to their owner (ZeRO-2, which has no room for a sum of them: for every backward),
    # updated weights gathered
    elif layout.zero:
        sync = share * mine * (g * (m if layout.zero == 2 else 1) + 2) / ring
    else:
        sync = 2 * share * mine * g / ring
    if overlap:
        backward = 2 / (4 if layout.recompute == "full" else 3)  # without what it computes again
        under = {3: m, 2: m * backward}.get(layout.zero, backward) * deep * each
        sync = np.maximum(sync - under, c.exposed * sync)
    if (
        layout.zero == 3
        # To and from the buffers that travel: a weight is read and written twice (2 bytes each), a gradient
        # read (2) and written (g)
    ):
        sync = sync + m * mine * (2 * (2 + 2) + 2 + g) / (gpu.bandwidth * c.memory)
    terms["data parallel"] = sync
    # 16 read, 14 written.
    terms["optimizer"] = 30.0 * mine / (d if layout.zero else 1) / (gpu.bandwidth * c.memory)
    return terms


FORMULAS = {
    "matrices": (
        "m · L/p · (3, or 4 with full recompute) · [FLOPs/(achievable·products) + bytes/(bandwidth·memory)]"
    ),
    "attention": "the same for 4·s²·b·h/t FLOPs, half of them with a fused attention",
    "elementwise": "the same for the bytes of norms, residuals, dropout and activation function",
    "tensor parallel": (
        "4 (6 with full recompute) all-reduces a layer of 2·s·b·h bytes, 2(t-1)/t of them sent"
    ),
    "head": "what the vocabulary's products add to the slowest stage, m times",
    "pipeline sends": "2·(m·v + p - 1) sends of 2·s·b·h/t bytes; v = 2 for ZB-V",
    "bubble": (
        "the time of all other stages for one microbatch, divided by v. Schedules that split the backward"
        " idle for a part of it: F + I - W (ZB-H1), F + I - 2W and at least F (ZB-H2), I - W and at least"
        " I/2 (ZB-V)"
    ),
    "data parallel": (
        "gradients (and weights with ZeRO) around the ring, less what hides under backward; ZeRO-3 copies"
        " them as well"
    ),
    "optimizer": "30 bytes a parameter through memory",
}


HELD = {
    "weights": "2 bytes a parameter of the stage, /t (/d with ZeRO-3)",
    "gradients": (
        "2 or 4 bytes a parameter (6 where they are summed in float32 one by one), /t (/d from ZeRO-2 on)"
    ),
    "optimizer": "12 bytes a parameter, /t (/d from ZeRO-1 on)",
    "activations": "layers of the stage · what a layer keeps · microbatches in flight",
    "logits": "4·s·b·(h + V)/t, 10 more for each score where operations run one by one",
    "gathered weights": "2 bytes a parameter of two layers, /t",
    "overhead": "context, communicators, the allocator's slack: assumed",
}


def sent(model: ModelShape, layout: Layout, global_batch: int, seq_len: int) -> dict[str, float]:
    """Bytes that a GPU sends in one step for each axis, dp, tp and pp, by the book: of the pipeline's stages,
    an inner one.

    An inner stage sends an activation on and a gradient back for each of its chunks. Of two stages each is an
    end: the first never sends a gradient on, the last no activation, so with v chunks each has one message
    less (with ZB-V two: its turn stays on the rank).
    """
    d, t, p = layout.dp, layout.tp, layout.pp
    m = global_batch // (d * layout.microbatch)
    activation, mine = 2.0 * seq_len * layout.microbatch * model.hidden, model.params / (t * p)
    saved = (p == 2) * (2 if layout.schedule == "ZB-V" else 1)
    gathers, reduced = (
        book("all_gather", 2 * mine, d),
        book("reduce_scatter", layout.gradient_bytes * mine, d),
    )
    return {
        "dp": {
            0: 2 * reduced,
            1: gathers + reduced,
            2: gathers + m * reduced,
            3: m * (2 * gathers + reduced),
        }[layout.zero],
        "tp": (
            m
            * model.layers
            / p
            * (6 if layout.recompute == "full" else 4)
            * book("all_reduce", activation, t)
        ),
        "pp": (p > 1) * m * (2.0 * layout.chunks - saved) * activation / t,
    }


@dataclass(frozen=True)
class Estimate:
    """A step on paper: `time` in seconds and `memory` in bytes, each by what for.

    `stage` is the fullest one.
    """

    model: ModelShape
    layout: Layout
    cluster: Cluster
    global_batch: int
    seq_len: int
    time: dict[str, float]
    memory: dict[str, float]
    stage: int

    @property
    def step_seconds(self) -> float:
        return sum(self.time.values())

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.cluster.device.memory

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.global_batch * self.seq_len / self.step_seconds / self.layout.ranks

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: what the model needs, over what the GPUs could print."""
        return (
            self.tokens_per_second_per_gpu
            * self.model.flops_per_token(self.seq_len)
            / self.cluster.device.flops
        )

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: recomputed forwards count as well."""
        return self.mfu * (4 / 3 if self.layout.recompute == "full" else 1)

    def __repr__(self) -> str:
        return "\n".join(
            [
                f"{self.model.name} on {self.layout.ranks} × {self.cluster.device.name}: {self.layout}",
                "",
                repr(self.time_table()),
                "",
                repr(self.memory_table()),
                "",
                self.went_in(),
                "",
                self.summary(),
            ]
        )

    def summary(self) -> str:
        room = self.cluster.device.memory - self.memory_bytes
        return (
            f"{self.step_seconds:.2f} s a step, {self.tokens_per_second_per_gpu:,.0f} tokens/s/GPU, MFU"
            f" {self.mfu:.1%}; {human(self.memory_bytes)} on the fullest GPU, {human(abs(room))}"
            f" {'free' if room >= 0 else 'too much'}"
        )

    def time_table(self) -> Table:
        """Drawn as a waterfall: each part begins where the one above it ends."""
        total = self.step_seconds
        rows = [
            [name, f"{s:.3f}", f"{s / total:.1%}", bar, FORMULAS[name]]
            for (name, s), bar in zip(self.time.items(), _waterfall(self.time))
        ]
        return Table(
            ["time", "seconds", "share", "drawn", "how"],
            rows,
            ["step", f"{total:.3f}", "100 %", "█" * WIDE, ""],
        )

    def memory_table(self) -> Table:
        """The fullest stage's, drawn alike."""
        rows = [
            [name, human(size), bar, HELD[name]]
            for (name, size), bar in zip(self.memory.items(), _waterfall(self.memory))
        ]
        return Table(
            [f"memory, stage {self.stage}", "a GPU", "drawn", "how"],
            rows,
            ["total", human(self.memory_bytes), "█" * WIDE, ""],
        )

    def went_in(self) -> str:
        """The numbers behind the formulas."""
        model, at, gpu, c = self.model, self.layout, self.cluster.device, constants()
        m = self.global_batch // (at.dp * at.microbatch)
        letters = dict(
            s=self.seq_len,
            b=at.microbatch,
            m=m,
            h=model.hidden,
            L=model.layers,
            V=model.vocab,
            d=at.dp,
            t=at.tp,
            p=at.pp,
            v=at.interleave,
        )
        speeds = dict(
            achievable=gpu.achievable, bandwidth=gpu.bandwidth, link=self.cluster.link, port=self.cluster.nic
        )
        return (
            "went in: "
            + ", ".join(f"{k} = {value:,}" for k, value in letters.items())
            + f", {model.params:,} parameters, "
            + ", ".join(f"{k} {value:.4g}/s" for k, value in speeds.items())
            + "; of these "
            + ", ".join(f"{f.name} {getattr(c, f.name):g}" for f in fields(c))
            + " (data/cost_constants.json)"
        )


def _waterfall(parts: dict[str, float]) -> list[str]:
    """A bar in letters for each part, behind as much empty space as the parts before it take; all of one
    width.
    """
    ends = [round(WIDE * x / sum(parts.values())) for x in np.cumsum(list(parts.values()))]
    return [
        ("\u2007" * start + "█" * (end - start)).ljust(WIDE, "\u2007") for start, end in zip([0, *ends], ends)
    ]


def estimate(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    *,
    global_batch: int,
    seq_len: int,
    overlap: bool = True,
) -> Estimate:
    """Time and memory of one training step. Raises ValueError, in a sentence, for a layout that cannot be
    (see `check`).

    global_batch: sequences of seq_len tokens in one step over all ranks.
    """
    check(model, layout, global_batch)
    whole("global_batch", global_batch)
    whole("seq_len", seq_len)
    m = global_batch // (layout.dp * layout.microbatch)
    time = {name: float(s) for name, s in step_terms(model, layout, cluster, m, seq_len, overlap).items()}
    stage, memory = largest_stage(model, layout, seq_len, m, OVERHEAD)
    return Estimate(model, layout, cluster, global_batch, seq_len, time, memory, stage)
