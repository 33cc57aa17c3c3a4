"""What each training framework does that changes bytes and seconds: a record for each.

Each record was read from the framework's source in November 2026, in the files that it names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from ..checks import unknown
from .layout import Axes, Layout

# What may be sent while something is computed: see `Framework.hides`.
HIDDEN = (
    "gradients",  # data parallelism's, under backward; with ZeRO-3 also weights, and both under all layers
    "updated weights",  # ZeRO-1's, under the next forward
    "input gradients",  # tensor parallelism's, under the product of the weight gradient
    "tensor parallel",  # other gathers and scatters of sequence parallelism, in pieces, under their products
    "keys and values",  # those of ring attention, under the attention
    "dispatch",  # experts' tokens, under the layers of another microbatch
    "sends",  # between stages of an interleaved pipeline, under other chunks
)
CONTEXT = ("ring", "gather", "heads")  # how ranks that share a sequence attend to all of it: see `attention`


class Reached(NamedTuple):
    """The share of the achievable FLOP/s that a fused attention with causal mask reaches, forward and
    backward together.

    share: that of a long sequence, with heads of 128 numbers. half: the length that reaches half of it; n
    tokens reach n / (n + half) of it. measured: rows in place of `share`, if a kernel was measured: tokens,
    TFLOP/s with heads of 128, TFLOP/s with heads of 64, on a device whose products reach `PRODUCTS` FLOP/s.
    """

    share: float
    half: float
    measured: tuple[tuple[int, float, float], ...] = ()

    def at(self, tokens, size: int):
        """The share for so many tokens and heads of `size` numbers. Between measured lengths it is a straight
        line over the logarithm of the length; below the first of them it falls as n / (n + half) does.
        Smaller heads do fewer FLOPs for each exponential: where nobody measured, heads of 64 reach 0.8 of
        what heads of 128 reach (Shah et al. 2024, figures 5 and 6).
        """
        size = min(128, size)
        narrow = size / (size + 43) * (128 + 43) / 128
        short = lambda n: n / (n + self.half)
        if not self.measured:
            return self.share * narrow * short(tokens)
        lengths, *rates = (np.array(column, float) for column in zip(*self.measured))
        of_128, of_64 = (np.interp(np.log(tokens), np.log(lengths), rate) for rate in rates)
        slower = (1 - narrow) / (1 - NARROW)  # 0 for heads of 128, 1 for heads of 64
        of_size = of_128 + (of_64 - of_128) * slower
        return of_size * 1e12 / PRODUCTS * short(np.minimum(tokens, lengths[0])) / short(lengths[0])


NARROW = 64 / (64 + 43) * (128 + 43) / 128  # speed of heads of 64 over heads of 128, where nobody measured
# FLOP/s of products on the H100 on which attention was measured: `cost`'s gemm_efficiency times achievable.
PRODUCTS = 0.935 * 720e12
# Kernel -> generation of GPUs -> what it reaches. A generation that nobody measured takes the first entry.
# flash is FlashAttention-2. A100: 0.63 to 0.73 of 312 TFLOP/s (Dao 2023, section 4.1). GB200: PyTorch's
# kernel in cuDNN's benchmarks (cudnn-frontend, benchmark/sdpa_benchmark_training, 2025).
# cudnn is cuDNN's kernel. GB200: the same benchmarks. A100: flash, which Transformer Engine takes there.
# H100: both were measured in November 2026 (PyTorch 2.11's scaled_dot_product_attention, both directions,
# causal). PyTorch itself prefers cuDNN's kernel on Hopper and Blackwell if cuDNN is newer than 9.15.0, as in
# wheels for CUDA 13; with wheels for CUDA 12 it takes FlashAttention-2
# (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention, at 001f694).
FLASH_H100 = ((2048, 191, 182), (4096, 235, 221), (8192, 283, 251), (16384, 301, 264), (32768, 325, 289))
CUDNN_H100 = (
    (1024, 204, 180),
    (2048, 304, 260),
    (4096, 403, 340),
    (8192, 509, 405),
    (16384, 547, 451),
    (32768, 543, 422),
)
ATTENTION: dict[str, dict[str, Reached]] = {
    "flash": {
        "Hopper": Reached(0.436, 300, FLASH_H100),
        "A100": Reached(0.70, 350),
        "Blackwell": Reached(0.233, 700),
    },
    "cudnn": {
        "Hopper": Reached(0.745, 830, CUDNN_H100),
        "A100": Reached(0.70, 350),
        "Blackwell": Reached(0.923, 1420),
    },
}


@dataclass(frozen=True, kw_only=True)
class Holds:
    """What a GPU holds, and how many bytes of it. Raises ValueError for impossible values."""

    # Bytes for each parameter. A float32 master copy counts as optimizer state. Where the parameter itself is
    # float32 (weight_bytes 4), a half-precision copy is sent.
    weight_bytes: int = 2
    gradient_bytes: int = 2
    optimizer_bytes: int = 12
    number_bytes: int = 2  # of an activation, and of a weight that is sent
    norm_bytes: int = 2  # that a norm keeps for each number of its input
    # Precisions in which two narrow copies of each matrix of a layer, one of them transposed, are kept from
    # microbatch to microbatch (Transformer Engine's workspaces). In other precisions the weights themselves
    # are narrow and take as much, or they are narrowed each time.
    narrow_copies: tuple[str, ...] = ()
    split_vocabulary: bool = True  # embedding and head are split over tp
    buckets: bool = False  # gradients are copied into buckets of the same size (DistributedDataParallel)
    # DeepSpeed: numbers in a flat bucket. With overlapping, gradients take 4.5 buckets and weights as many,
    # in ZeRO-3 one each (HF Transformers' docs/source/en/deepspeed.md).
    flat_bucket: float = 0.0
    # DeepSpeed: numbers that ZeRO-3 keeps gathered. Its optimizer copies so many gradients to float32 at a
    # time; ZeRO-1's and 2's copies all of a rank (sub_group_size; zero/stage_1_and_2.py and stage3.py).
    live: float = 0.0
    # What PyTorch's allocator reserves, over the most that is allocated, from public logs. Megatron-LM's
    # since 2024 print 1.01 to 1.13, the largest in its pull request 5662 (July 2026).
    reserves: float = 1.13
    # Off in all records below; `--with` turns these on.
    eight_bit: bool = False  # Adam's two states take a byte each
    offload: bool = False  # master copy and states are in the host's memory, and its processors step

    def __post_init__(self):
        if self.gradient_bytes not in (2, 4):
            raise ValueError(f"gradient_bytes is 2 or 4, not {self.gradient_bytes!r}")

    @property
    def state_bytes(self) -> float:
        """Bytes of a parameter's optimizer state, with the master copy. 8-bit states have a float32 scale for
        256 numbers each (Dettmers et al. 2022, section 2, with bitsandbytes' block).
        """
        return self.optimizer_bytes - self.eight_bit * (8 - 2 * (1 + 4 / 256))


@dataclass(frozen=True, kw_only=True)
class Sends:
    """What ranks send and how often, and the order of the axes. Raises ValueError for impossible values."""

    order: tuple[str, ...] = ("pp", "dp", "tp")  # of the axes, the outermost first
    context: str = "ring"  # one of `CONTEXT`
    regathers: bool = True  # sequence parallelism gathers a matrix's input again for backward: it is not kept
    merged: bool = True  # input gradients of q, k and v, and of gate and up, are summed, then reduced
    splits_sends: bool = True  # a tp rank sends its part of an activation to the next stage, not all of it
    # Full recompute runs a layer to its end: also its last product and collective, which nobody needs.
    # PyTorch's checkpoint without reentry stops before them (set_checkpoint_early_stop; on by default).
    whole_recompute: bool = True
    # ZeRO-2 and 3 reduce gradients in every microbatch. If not, PyTorch's FSDP holds them whole meanwhile.
    reduces_each: bool = True
    reduced_bytes: int = 0  # of a gradient that FSDP reduces; 0: as many as of one that is held
    reduces_whole: bool = False  # ZeRO-1 and 2 all-reduce gradients, and each rank keeps its part
    fsdp: bool = False  # ZeRO-3 is PyTorch's FSDP, whose overlap was measured: see `cost`
    # A token with several experts on a node is sent to the node once, to each rank once (DeepEP, HybridEP).
    once_a_node: bool = False

    def __post_init__(self):
        if self.context not in CONTEXT:
            raise ValueError(f"context is one of {', '.join(CONTEXT)}, not {self.context!r}")


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Which kernels compute, and how the host launches them."""

    # One kernel for what PyTorch's operations do one by one.
    fused: bool = True  # in a layer
    fused_loss: bool = True
    fused_sums: bool = True  # the product that makes a gradient adds it to the sum of gradients
    fused_attention: bool = True  # never stores its scores
    attention: str = "flash"  # the kernel of a fused attention: see `ATTENTION`
    grouped: bool = True  # one kernel for all experts of a rank, not one for each
    # In MXFP8 the kernel of the experts' first product also computes the activation function and narrows its
    # result, and so does the kernel of its backward (Transformer Engine's op fuser, on Blackwell).
    fused_experts: bool = False
    weighs_early: bool = True  # a router's weights multiply the activation: experts' results are not kept
    # Of the host, for each kernel or collective: a layer takes the longer of the host's and the GPU's time.
    # Runs of Megatron Bridge on one node that wait for the host give 37 µs. 0 where a step is a CUDA graph.
    launch_seconds: float = 3.7e-5
    # Off in all records below; `--with` turns it on.
    compiled: bool = False  # torch.compile makes a kernel of each norm, activation and sum; not of the loss


@dataclass(frozen=True, kw_only=True)
class Offers:
    """Which layouts the framework can run."""

    axes: tuple[str, ...] = Axes._fields  # along which it splits
    schedules: tuple[str, ...] = ("1F1B", "interleaved")
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    zeros_in_pipeline: tuple[int, ...] = (0, 1)
    recomputes: tuple[str, ...] = ("none", "full")
    recomputes_some: bool = False  # some layers of a stage can be recomputed, and the others not
    most_chunks: int = 8  # on a pipeline rank, that the planner tries


# The groups of a framework's fields, and the group of each field.
GROUPS: dict[str, type] = {"holds": Holds, "sends": Sends, "runs": Runs, "offers": Offers}
GROUP_OF = {field.name: group for group, kind in GROUPS.items() for field in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What of a framework changes bytes and seconds. hides: those of `HIDDEN` that are sent while something
    is computed. Raises ValueError for impossible values.
    """

    name: str
    source: str  # where each value can be read
    holds: Holds = Holds()
    sends: Sends = Sends()
    hides: tuple[str, ...] = ("gradients", "keys and values")
    runs: Runs = Runs()
    offers: Offers = Offers()

    def __post_init__(self):
        if wrong := [one for one in self.hides if one not in HIDDEN]:
            raise ValueError(f"hides are some of {', '.join(HIDDEN)}; {wrong[0]!r} is given")

    def but(self, **changed) -> Framework:
        """This framework with other values of some fields, its own or its groups'. No two fields have the
        same name. Raises TypeError for a name that is no field.
        """
        made: dict[str, Any] = {}
        for name, value in changed.items():
            if group := GROUP_OF.get(name):
                made[group] = replace(made.get(group, getattr(self, group)), **{name: value})
            else:
                made[name] = value
        return replace(self, **made)

    @property
    def switches(self) -> list[str]:
        """The switches that are on, in words."""
        words = {
            "compiled": self.runs.compiled,
            "8-bit Adam": self.holds.eight_bit,
            "optimizer on the host": self.holds.offload,
            "gradients reduced in each microbatch": self.name == "transformers" and self.sends.reduces_each,
        }
        return [switch for switch, on in words.items() if on]

    @property
    def sent_bytes(self) -> int:
        """Bytes of a gradient that is sent."""
        return self.sends.reduced_bytes or self.holds.gradient_bytes

    def layout(self, **chosen) -> Layout:
        """A layout with this framework's order of axes."""
        return Layout(**{"order": self.sends.order, **chosen})


TEXTBOOK = Framework(
    name="textbook", source="16 bytes a parameter and Megatron's four sums a layer, as the drops count them"
)
# What the course's own ranks do, all in float32: those of helpers/toy and of helpers/train.
TOY = Framework(
    name="toy",
    source="helpers/toy, helpers/train",
    holds=Holds(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, number_bytes=4, split_vocabulary=False),
    sends=Sends(
        context="gather", regathers=False, splits_sends=False, whole_recompute=False, reduces_each=False
    ),
)
MEGATRON = Framework(
    name="megatron-lm",
    source="arguments.py (--bf16 sums gradients in float32), parallel_state.py (tp-cp-ep-dp-pp, innermost"
    " first), tensor_parallel/layers.py (what is gathered again, what runs under which product); with"
    " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather, off unless asked for",
    holds=Holds(gradient_bytes=4, narrow_copies=("fp8", "fp8-current", "fp8-blockwise", "mxfp8", "nvfp4")),
    hides=("gradients", "updated weights", "input gradients", "keys and values", "sends"),
    runs=Runs(attention="cudnn", grouped=False),
    offers=Offers(zeros=(0, 1), recomputes=("none", "selective", "modules", "full"), recomputes_some=True),
)
TORCHTITAN = Framework(
    name="torchtitan",
    source="parallel_dims.py (pp, dp, cp, tp), job_config.py (bfloat16 copies of float32 parameters,"
    " float32 reductions), fsdp.py (no resharding in a pipeline), activation_checkpoint.py (early_stop=False,"
    " since its pull request 1580 of August 2025); FSDP2, no compiler",
    # reserves: peak reserved over peak active of seven runs of PyTorch's FSDP, 1.07 to 1.35, median 1.26
    # (llama-cookbook, pull requests 41, 165 and 650, issue 120). With expandable segments, which torchtitan's
    # own script sets, less is reserved.
    holds=Holds(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8, reserves=1.26),
    sends=Sends(context="gather", regathers=False, splits_sends=False, fsdp=True),
    runs=Runs(fused=False, fused_loss=False, fused_sums=False),
    offers=Offers(zeros=(3,), zeros_in_pipeline=(3,), recomputes=("none", "per-op", "full")),
)
TRANSFORMERS = TORCHTITAN.but(
    name="transformers",
    source="models/qwen3/modeling_qwen3.py at 000c33f (a norm keeps a float32 copy of its input and what its"
    " weight multiplies; positions one operation at a time), loss/loss_utils.py at 0114da0 (float32 scores),"
    " integrations/sdpa_attention.py at 00c238b; FSDP2 around each layer, embedding and head, with float32"
    " parameters and bfloat16 computing, as Accelerate's utils/fsdp_utils.py at 16cb6eb has it; bfloat16"
    " reductions (utils/dataclasses.py), the last microbatch's alone unless sync_each_batch is set, and"
    " recompute without reentry (accelerator.py); no compiler",
    whole_recompute=False,
    reduces_each=False,
    reduced_bytes=2,
    norm_bytes=6,
    axes=("dp",),
    recomputes=("none", "full"),
)
FRAMEWORKS: dict[str, Framework] = {
    f.name: f
    for f in (
        TEXTBOOK,
        MEGATRON,
        MEGATRON.but(
            name="megatron-bridge",
            source="scripts/performance/configs (grad_reduce_in_fp32 off; tp_comm_overlap where tp > 1, but"
            " not for NVFP4 and Qwen3 235B on H100; HybridEP; use_megatron_fsdp, which is ZeRO-3);"
            " perf_recipes/qwen/common.py (experts' kernels); training/mixed_precision.py (fp8_param_gather)",
            zeros=(0, 1, 3),
            gradient_bytes=2,
            hides=(*MEGATRON.hides, "tensor parallel"),
            narrow_copies=("fp8-blockwise", "nvfp4"),  # in the others the parameters are narrow
            once_a_node=True,
            fused_experts=True,
        ),
        TORCHTITAN,
        Framework(
            name="deepspeed",
            source="pipe/topology.py (pipe, data, model), pipe/engine.py (no ZeRO-2 or 3 in a pipeline),"
            " engine.py (gradients in the model's type), zero/stage_1_and_2.py (ZeRO-2 reduces in every"
            " microbatch; all-reduce for a bucket; weights gathered after the step); with overlap_comm",
            # Eight models under PyTorch's allocator leave 15 % of what is reserved unused (Guo et al. 2024,
            # GMLake).
            holds=Holds(flat_bucket=5e8, live=1e9, reserves=1.18),
            sends=Sends(context="heads", reduces_whole=True),
            offers=Offers(schedules=("1F1B",)),
        ),
        TRANSFORMERS,
        TRANSFORMERS.but(
            name="transformers-ddp",
            source=f"{TRANSFORMERS.source}; DistributedDataParallel, or one GPU, under autocast: bfloat16"
            " copies of float32 weights, norms whole in float32, and buckets beside the gradients; recompute"
            " without reentry (modeling_utils.py, since pull request 43203 of January 2026)",
            weight_bytes=6,
            reduced_bytes=0,
            norm_bytes=8,
            buckets=True,
            zeros=(0,),
            zeros_in_pipeline=(0,),
        ),
    )
}


def find_framework(name: str) -> Framework:
    """A framework by name. Raises ValueError with the nearest name."""
    if name.lower() not in FRAMEWORKS:
        raise ValueError(f"unknown framework {unknown(name, FRAMEWORKS)}")
    return FRAMEWORKS[name.lower()]
