"""Operations of a layer's feed-forward part: a dense one, or experts, k of them for each token.

Sources: Shazeer et al. 2017 and Lepikhin et al. 2020, section 3 (dispatch, experts, combine); Liu et al. 2025
(MoE Parallel Folding: experts have their own tensor, expert and data parallelism over the same ranks);
Megatron-Core's token_dispatcher.py and experts.py (what is permuted, gathered and kept); Transformer Engine's
cast.cpp (what narrows the inputs of many experts at once).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from .op import Kept, LayerOnRank, Op, enter, grouped, leave, product, sending, stream
from .shape import Experts

ROUTER = "choice of experts"  # the operation whose result the host may wait for: see `cost`


def feed_forward(at: LayerOnRank, eager: bool, last: tuple[str, ...]) -> list[Op]:
    """The operations from the output of a layer's second norm to the sum over the tensor-parallel ranks.
    eager: the activation function takes a kernel for each of PyTorch's operations. last: the recompute
    policies under which a layer's end is computed again.
    """
    if not (e := at.model.experts):
        return dense(at, at.model.ffn, eager, last)
    return [*(dense(at, e.shared, eager, last) if e.shared else []), *experts(at, e, eager)]


def _activation(inside, gated: bool, eager: bool, **again) -> list[Op]:
    """The activation function, whose result has `inside` bytes. SiLU moves 4 bytes for each of its numbers,
    and the product with up's result 6. Both in one kernel move 6, and a GELU without such a product 4.
    """
    moved, kept = (5.0 if eager else 3.0 if gated else 2.0), (3 if eager else 2 if gated else 1)
    kernels = 2 if eager else 1
    return stream("activation function", moved * inside, kernels, keeps=Kept(kept * inside), **again)


def dense(at: LayerOnRank, width: int, eager: bool, last: tuple[str, ...]) -> list[Op]:
    """A part of this width through which all tokens go, split over tp."""
    model, t, sb, h, x = at.model, at.layout.tp, at.tokens, at.model.hidden, at.x
    inside, inputs = at.job.framework.holds.number_bytes * sb * width / t, at.gathered(x)
    recomputed = ("per-op", "full")
    # What follows the last product may need its result: dropout, a norm, an adapter's sum, routed experts.
    ends = model.bare and model.norms == 2 and not model.experts
    again = last if ends and not at.job.lora else ("full",)
    matrix = partial(at.product, block="feed-forward")
    if model.gated:
        gate = matrix("gate", sb, h, width / t, keeps=Kept(per_op=inside))
        of_up = Kept(inputs, modules=0.0)
        up = matrix("up", sb, h, width / t, first=False, keeps=of_up, recomputed=recomputed)
        kept: dict[str, Any] = dict(keeps=Kept(at.narrow(inside), per_op=x / at.parts), recomputed=again)
    else:
        gate, up = [], matrix("up", sb, h, width / t, keeps=Kept(inputs, per_op=inside, modules=0.0))
        kept = dict(keeps=Kept(at.narrow(inside)), recomputed=recomputed)
    return [
        *enter(at, x, "feed-forward", 2 if model.gated else 1),
        *gate,
        *up,
        *_activation(inside, model.gated, eager),
        *at.product("down", sb, width / t, h, "feed-forward's output", **kept),
        *leave(at.layout, x, "feed-forward", last),
    ]


def experts(at: LayerOnRank, e: Experts, eager: bool) -> list[Op]:
    """The routed experts. A rank has a part of its tp group's tokens, sends each to the ranks of its k
    experts, and gets the results back. Experts are distributed over ep ranks, and each is split over etp. The
    router is assumed to be balanced.
    """
    layout, runs, h = at.layout, at.job.framework.runs, at.model.hidden
    n, ep, etp = at.job.framework.holds.number_bytes, layout.ep, layout.etp
    mine = at.tokens / at.parts  # tokens
    copies = mine * e.per_token  # one for each expert of a token
    # The bytes of these copies; the rows of a rank's products; the experts on a rank.
    routed, rows, local = n * h * copies, copies * etp, e.count / ep
    inside = n * rows * e.ffn / etp
    together = runs.fused_experts and at.precision.name == "mxfp8"
    kernels = 1 if runs.grouped or together else local
    # One kernel narrows all experts' inputs only if the scales are known before.
    casts = 1 if at.job.precision == "fp8" else kernels
    # Whether the router keeps its input for itself: shared experts may keep the same one.
    alone = not (e.shared and at.job.framework.sends.regathers)

    def send(name: str, axis: str, phase: str, collective: str, payload, **where) -> Op:
        return sending(name, axis, phase, collective, 1, payload, **where)

    first = 2 if at.model.gated and runs.fused else 1  # 2: gate and up are one product, twice as wide
    matrix = dict(groups=local, kernels=kernels, bytes_=at.precision.bytes, rate=at.precision.rate)
    # torchtitan's per-op recompute keeps neither grouped products nor the tokens that are sent to them.
    again: dict[str, Any] = dict(recomputed=("per-op", "full"))
    inputs = dict(keeps=Kept(at.narrow(n * rows * h)), **again)
    up = grouped("experts, up", rows, h, first * e.ffn / etp, **matrix, **inputs)
    if at.model.gated and first == 1:
        up = [*grouped("experts, gate", rows, h, e.ffn / etp, **matrix, **again), *up]
    results = dict(keeps=Kept(at.narrow(inside), modules=0.0), **again)
    down = grouped("experts, down", rows, e.ffn / etp, h, **matrix, **results)
    clamped, biased = _not_fused(2 * inside, n * rows * h, local) if at.model.biases else ([], [])
    activation = _activation(inside, at.model.gated, eager, recomputed=("per-op", "full", "modules"))
    between = [*clamped, *activation]
    if together:  # inside the kernels of the two products
        between, biased = ([op._replace(streamed=0.0, kernels=0) for op in ops] for ops in (between, biased))
    narrowed, apart = at.precision.rate != "bf16", 1 - together
    into = at.casts("experts, up", rows * h, apart * first * rows * e.ffn / etp, casts)
    out = at.casts("experts, down", apart * rows * e.ffn / etp, rows * h, casts)
    kept = Kept(routed * (not runs.weighs_early))
    router = product("router", mine, h, e.count, keeps=Kept(at.x / at.parts * alone, modules=0.0))
    return [
        *at.trained("router", router, h * e.count),
        *stream(ROUTER, 4.0 * 6 * mine * e.count, 8, keeps=Kept(4.0 * mine * e.count)),
        *stream("permutation", n * h * (mine + copies), 1, 1),
        send("dispatch", "ep", "F", "all_to_all", routed, **again),
        send("gradient of the dispatch", "ep", "I", "all_to_all", routed),
        send("gather for experts", "etp", "F", "all_gather", etp * routed, **again),
        send("gradient of experts", "etp", "I", "reduce_scatter", etp * routed),
        *stream("order by expert", 2.0 * n * h * rows * (local > 1), (local > 1) * 1, 1),
        *at.trained("experts", up, local * (1 + at.model.gated) * h * e.ffn / etp),
        *(into if narrowed else []),
        *between,
        *at.trained("experts", down, local * h * e.ffn / etp),
        *(out if narrowed else []),
        *biased,
        *stream("order by rank", 2.0 * n * h * rows * (local > 1), (local > 1) * 1, 1),
        send("sum of experts", "etp", "F", "reduce_scatter", etp * routed),
        send("gradient into experts", "etp", "I", "all_gather", etp * routed),
        send("combine", "ep", "F", "all_to_all", routed),
        send("gradient of the combine", "ep", "I", "all_to_all", routed),
        *stream("results put together", n * h * (mine + copies), 1, 1, keeps=kept, recomputed=("full",)),
    ]


def _not_fused(up, results, local) -> tuple[list[Op], list[Op]]:
    """Operations of gpt-oss that Megatron-Core does not fuse (fused_bias_geglu.py,
    `TEGroupedMLP._apply_bias`): the result of up is clamped, each half separately, and put together; and each
    row of `local` experts' results gets its bias times the router's weight. up, results: bytes.
    """
    # Reads and writes of up: clamped 2, put together 2; backward masks of a byte, chosen, put together.
    again: dict[str, Any] = dict(recomputed=("per-op", "full", "modules"))
    clamped = stream("clamp", 4.0 * up, 3, 15 / 8, keeps=Kept(up, modules=0.0), **again)
    # Bias times weight 1, sum 3, put together 2; backward two products and their sums.
    return clamped, stream("biases of experts", 6.0 * results, 2 * local + 1, 1.0)
