"""Defines `Op`, one operation of a rank in a training step, and functions that make such operations.

Phases: F forward, I backward for the gradient of an operation's input, W backward for the gradient of its
weights, S once a step. A forward operation that backward runs again is listed once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..paper.axes import NAMED
from .job import PRECISIONS, Job, Precision
from .layout import Layout
from .shape import ModelShape

# Bytes for each number of a product's result: 2 to write it, and 1.3 for the time at the start and end of
# each tile, in which nothing is multiplied. From DeepGEMM's README (2025), on an H800, where 512 to 16,384
# products are summed for each number; `tests/plan/test_precision.py` has them.
RESULT = 3.3


class Kept(NamedTuple):
    """Bytes that an operation keeps for its backward, by policy of recompute."""

    nbytes: float = 0.0  # without recompute
    per_op: float = 0.0  # with the policy per-op
    modules: float | None = None  # with the policy modules; None: as without recompute

    def under(self, recompute: str):
        """Bytes kept under any policy. For 'selective' and 'full', `memory.kept` leaves out operations."""
        modules = self.nbytes if self.modules is None else self.modules
        return {"per-op": self.per_op, "modules": modules}.get(recompute, self.nbytes)


class Sent(NamedTuple):
    """Calls of a collective along an axis, such as tp. payload: bytes of the whole tensor of one call."""

    collective: str
    axis: str
    calls: float
    payload: float


class Op(NamedTuple):
    """One operation. Numbers are for one microbatch on one rank, in phase S for a whole step. They may be
    arrays.

    part: the term of a step's seconds to which it belongs. flops: computed at the device's speed `rate`, of
    which it reaches `share`. streamed: bytes through `memory`, which is the GPU's, the host's, or the link
    between them. kernels: the number that the host launches. recomputed: the recompute policies under which
    backward runs it again. block: the part of a layer to which a product belongs. under: the phase in which a
    collective may run at the same time as its block's products, if `hides` is in `Framework.hides`.
    adapters: trained parameters whose gradients it computes, with LoRA.
    """

    name: str
    part: str
    phase: str = "F"
    flops: float = 0.0
    streamed: float = 0.0
    kernels: float = 1
    keeps: Kept = Kept()
    recomputed: tuple[str, ...] = ("full",)
    sends: Sent | None = None
    block: str = ""
    under: str = ""
    hides: str = ""
    rate: str = "bf16"
    share: float = 1.0
    memory: str = "gpu"
    adapters: float = 0.0


class LayerOnRank(NamedTuple):
    """A layer on one rank of a layout. model: the shape of the layer's kind."""

    job: Job
    layout: Layout
    model: ModelShape

    @property
    def tokens(self):
        """The tokens of a microbatch that a rank's split matrices process."""
        return self.layout.tokens(self.job.seq_len)

    @property
    def x(self):
        """Bytes of a microbatch's activation between two blocks, before sequence parallelism splits it."""
        return self.job.framework.holds.number_bytes * self.tokens * self.model.hidden

    @property
    def parts(self):
        """The number of ranks that share that activation: tp with sequence parallelism, else 1."""
        return np.where(self.layout.sequence_parallel, self.layout.tp, 1)

    @property
    def precision(self) -> Precision:
        """The `Precision` that the job names."""
        return PRECISIONS[self.job.precision]

    def narrow(self, x):
        """Bytes of a product's input, x in half precision, in the job's precision."""
        return x if self.job.precision == "bf16" else x * self.precision.bytes / 2

    def gathered(self, x):
        """Bytes that are kept of a gathered input, x in half precision: all, or a rank's part if backward
        gathers it again.
        """
        return self.narrow(x) / (self.parts if self.job.framework.sends.regathers else 1)

    def product(self, name: str, rows, k, n, block: str = "", first=True, **forward) -> list[Op]:
        """A product (rows × k) · (k × n) in the job's precision; LoRA freezes its matrix and gives it an
        adapter. first: whether it is the first product with this input, which is converted once for all.
        forward: see the function `product`.
        """
        its = self.precision
        lines = product(name, rows, k, n, block, bytes_=its.bytes, rate=its.rate, **forward)
        if its.name != "bf16":
            lines += self.casts(name, rows * k * first, rows * n)
        return self.trained(name, lines, k * n, True) + self.adapters(name, rows, k, n, block)

    def trained(self, name: str, lines: list[Op], numbers, adapted: bool = False) -> list[Op]:
        """`lines`, the operations of a product, changed if LoRA freezes its matrix of so many numbers: it has
        no gradient, and its input is kept only for an adapter. A matrix in four bits is expanded to two bytes
        a number before each product.
        """
        if not (lora := self.job.lora):
            return lines
        lines = [op for op in lines if op.phase != "W"]
        if not adapted:
            lines = [op._replace(keeps=op.keeps._replace(nbytes=0.0)) for op in lines]
        if not lora.four_bit or name == "head":
            return lines
        moved = (lora.weight_bytes + 2.0) * numbers
        return [*lines, *(Op(f"dequantise for {name}", "casts", phase, streamed=moved) for phase in "FI")]

    def adapters(self, name: str, rows, k, n, block: str) -> list[Op]:
        """The two products of an adapter, k × r and r × n, beside a frozen matrix k × n. Their result is
        added to the matrix's by the second product itself, or by two kernels, which scale and add. The
        adapter is split as its matrix is, and sends nothing of its own.
        """
        if not (lora := self.job.lora):
            return []
        r, number = lora.rank, self.job.framework.holds.number_bytes
        passes, kernels = (1.0, 0) if self.job.framework.runs.fused else (5.0, 2)
        # Such thin products do little more than read and write, so no time is added for tiles.
        down = product(f"adapter of {name}, down", rows, k, r, block, result=2.0)
        up = product(f"adapter of {name}, up", rows, r, n, block, result=2.0, keeps=Kept(number * rows * r))
        mark = lambda ops, size: [op._replace(adapters=size * (op.phase == "W")) for op in ops]
        moved, summed = number * passes * rows, f"sum with adapter of {name}"
        sums = (
            Op(summed, "elementwise", phase, 0.0, moved * width, kernels)
            for phase, width in (("F", n), ("I", k))
        )
        return [*mark(down, k * r), *mark(up, r * n), *sums]

    def casts(self, name: str, inputs, outputs, kernels=1) -> list[Op]:
        """The conversion of so many numbers of an input forward, and of an output's gradient backward, to the
        job's precision.
        """
        moved, called = self.precision.cast, f"cast for {name}"
        cast = lambda phase, n: Op(called, "casts", phase, streamed=moved * n, kernels=kernels)
        return [cast("F", inputs), cast("I", outputs)]


def product(
    name: str, rows, k, n, block="", part="matrices", bytes_=2.0, rate="bf16", result=RESULT, **forward
) -> list[Op]:
    """(rows × k) · (k × n), forward and its two gradients, which are products of the same size. bytes_: of a
    number of the two factors, which are multiplied at the speed `rate`; the result has half precision.
    result: bytes for a number of the result. forward: fields of `Op` for the forward product alone.
    """
    moved = _moved(rows * k, k * n, rows * n, bytes_, result)
    return _three(name, part, 2.0 * rows * k * n, moved, forward, block=block, rate=rate)


def grouped(name: str, rows, k, n, groups, kernels, bytes_=2.0, rate="bf16", **forward) -> list[Op]:
    """One product, in which each of `groups` experts multiplies its share of the rows by its own matrix. It
    is computed in tiles of 128 rows, and the last tile of each expert is half empty in the mean.
    """
    flops = 2.0 * (rows + 64 * groups) * k * n
    moved = _moved(rows * k, groups * k * n, rows * n, bytes_, RESULT)
    return _three(name, "experts", flops, moved, forward, kernels=kernels, rate=rate)


def _moved(inputs, weights, outputs, bytes_, result) -> list:
    """Bytes through memory of a product and of its two gradients, from the numbers in inputs, weights and
    outputs. Each of the three products reads two of these, `bytes_` a number, and writes the third.
    """
    whole = bytes_ * (inputs + weights + outputs)
    return [whole + (result - bytes_) * numbers for numbers in (outputs, inputs, weights)]


def _three(name: str, part: str, flops, moved: list, forward: dict, **alike) -> list[Op]:
    """A product and its two gradients. moved: bytes of each. forward: fields of the forward product alone."""
    return [
        Op(name, part, phase, flops, streamed, **alike, **(forward if phase == "F" else {}))
        for phase, streamed in zip("FIW", moved)
    ]


def stream(name: str, nbytes, kernels, back=2.0, **forward) -> list[Op]:
    """An operation that moves bytes and computes next to nothing; backward moves `back` times as many."""
    forward = {"recomputed": ("per-op", "full") + ("modules",) * name.startswith("norm")} | forward
    return [
        Op(name, "elementwise", "F", 0.0, nbytes, kernels, **forward),
        Op(name, "elementwise", "I", 0.0, back * nbytes, back * kernels),
    ]


def norm(name: str, nbytes, eager: bool, norm_bytes: int, keeps: Kept) -> list[Op]:
    """A norm of `nbytes` of half-precision numbers. Fused it moves 4 bytes a number forward. Eager it is six
    operations in float32: to float32 6 bytes, square 8, mean 4, product 8, to half precision 6, weight 4; and
    for each number it keeps `norm_bytes`, not 2.
    """
    moved, kernels = (18.0, 6) if eager else (2.0, 1)
    lines = stream(name, moved * nbytes, kernels, keeps=keeps)
    if eager and norm_bytes > 2:
        more = Kept((norm_bytes / 2 - 1) * keeps.nbytes)
        lines.append(Op(f"{name}, in float32", "elementwise", kernels=0, keeps=more))
    return lines


def partial_sums(name: str, phase: str, layout: Layout, payload, times: tuple = (1, 1), **where) -> list[Op]:
    """The sum over the partial results of the tensor-parallel ranks: with sequence parallelism a
    reduce-scatter, without it an all-reduce. times: the number of calls of each.
    """
    split, (scattered, whole) = layout.sequence_parallel * 1, times
    return [
        sending(name, "tp", phase, "reduce_scatter", split * scattered, payload, **where),
        sending(name, "tp", phase, "all_reduce", (1 - split) * whole, payload, **where),
    ]


def sending(name: str, axis: str, phase: str, collective: str, calls, payload, **where) -> Op:
    """A collective along an axis."""
    sends = Sent(collective, axis, calls, payload)
    return Op(name, NAMED[axis].part, phase, kernels=0, sends=sends, **where)


def summed(job: Job, layout: Layout, params, part: str = "elementwise") -> Op:
    """Adds gradients to their sum over earlier microbatches, unless each microbatch's are reduced at once: a
    gradient is read, and the sum is read and written. A fused product adds its result to the sum itself.
    """
    sends = job.framework.sends
    adds = (np.asarray(layout.zero) < 2) | (not sends.reduces_each and not sends.fsdp)
    moved = (2 + 2 * job.framework.holds.gradient_bytes) * (not job.framework.runs.fused_sums)
    return Op("sums of gradients", part, "W", streamed=moved * adds * params, kernels=0)


def enter(at: LayerOnRank, x, block: str, products: int) -> list[Op]:
    """The collectives before a pair of split matrices: forward a gather of the input (x bytes in half
    precision) with sequence parallelism, else nothing; backward the sum of the input's gradient. products:
    the number of matrices that have this input.

    The gather may be cut in pieces: one is multiplied while the next is sent (Transformer Engine's
    userbuffers, PyTorch's async TP).
    """
    job, layout, narrow = at.job, at.layout, at.narrow(x)
    split = layout.sequence_parallel * 1
    sums = 1 if job.framework.sends.merged else products
    # If each rank keeps only its part of the input, the gradient of the weights needs another gather.
    again, name = split * job.framework.sends.regathers, f"gather for {block}"
    beside = dict(block=block, hides="input gradients")
    pieces = dict(block=block, under="F", hides="tensor parallel")
    return [
        sending(name, "tp", "F", "all_gather", split, narrow, recomputed=("per-op", "full"), **pieces),
        *partial_sums(f"gradient of {block}", "I", layout, x, (1, sums), under="W", **beside),
        sending(name, "tp", "W", "all_gather", again, narrow, under="I", **beside),
    ]


def leave(layout: Layout, x, block: str, recomputed: tuple[str, ...]) -> list[Op]:
    """The collectives after a pair of split matrices: forward the sum of the ranks' partial results, x bytes;
    backward, with sequence parallelism, a gather. There both may be cut in pieces.
    """
    pieces: dict[str, Any] = dict(block=f"{block}'s output", hides="tensor parallel")
    scattered, whole = partial_sums(f"sum of {block}", "F", layout, x, recomputed=recomputed)
    back = f"gradient into {block}"
    return [
        scattered._replace(under="F", **pieces),
        whole,
        sending(back, "tp", "I", "all_gather", layout.sequence_parallel * 1, x, under="I", **pieces),
    ]
