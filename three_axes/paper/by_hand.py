"""The formulas of drops 02 to 09, to be redone on paper, and to be read before the planner.

    N   parameters                       d, t, p   sizes of data, tensor and pipeline parallelism
    L   layers, of hidden size h         m         microbatches of b sequences of s tokens
    a   attention heads                  v         chunks of layers on each pipeline rank
    e   bytes of one number: 2 in half precision, 4 in float32

The model is a GPT: attention and an MLP of 4·h in each layer, without fused attention. `three_axes.plan`
computes the same for other models, frameworks and thousands of layouts at once; `tests/paper/test_by_hand.py`
compares the two. Bytes are those that one rank sends, or holds. Arguments and results are plain numbers.
"""

from __future__ import annotations

# -- the model -------------------------------------------------------------------------------------


def layer_parameters(h: float) -> float:
    """Parameters of one layer, but for biases and norms: 4·h² in attention (q, k, v, out), 8·h² in the MLP
    (h → 4·h → h).
    """
    return 12 * h * h


def training_operations(N: float, tokens: float) -> float:
    """Floating-point operations of a step, attention's scores left out: 2 for each parameter and token
    forward, and twice that backward. Kaplan et al. 2020.
    """
    return 6 * N * tokens


# -- drop 02: collectives --------------------------------------------------------------------------


def reduce_scatter_bytes(size: float, n: int) -> float:
    """A ring cuts the `size` bytes into n chunks. In each of its n−1 steps a rank sends one chunk. An
    all-gather sends as much. Patarasu and Yuan 2009.
    """
    return (n - 1) / n * size


def all_reduce_bytes(size: float, n: int) -> float:
    """A reduce-scatter, then an all-gather."""
    return 2 * (n - 1) / n * size


# -- what each axis sends in a step ----------------------------------------------------------------


def data_parallel_bytes(N: float, d: int, e: int = 2) -> float:
    """Drop 02: one all-reduce of all gradients, however large the batch is."""
    return all_reduce_bytes(N * e, d)


def zero_3_bytes(N: float, d: int, e: int = 2) -> float:
    """Drop 09: the weights are gathered for forward and again for backward, and the gradients are
    reduce-scattered: three halves of data parallelism's bytes.
    """
    return 3 * reduce_scatter_bytes(N * e, d)


def tensor_parallel_bytes(b: float, s: float, h: float, L: float, t: int, m: int = 1, e: int = 2) -> float:
    """Drops 03 and 06: each layer all-reduces an activation of b·s·h numbers four times in a microbatch. Two
    are forward, after attention and after the MLP; two are backward. Sequence parallelism sends the same
    bytes.
    """
    return m * L * 4 * all_reduce_bytes(b * s * h * e, t)


def pipeline_bytes(b: float, s: float, h: float, m: int = 1, e: int = 2) -> float:
    """Drop 04: a middle stage sends an activation on, and a gradient back, in every microbatch."""
    return m * 2 * b * s * h * e


# -- drop 09: what a GPU holds ---------------------------------------------------------------------


def states_bytes(
    N: float,
    d: int = 1,
    t: int = 1,
    p: int = 1,
    zero: int = 0,
    of_each: tuple[float, float, float] = (2, 2, 12),
) -> tuple[float, float, float]:
    """(weights, gradients, the optimizer's states) on a rank. `of_each`: bytes of each kind for a parameter.

    In mixed precision these are 2 + 2 + 12. The 12 are a float32 copy of the weights, and Adam's m and v. t
    and p cut all of it; ZeRO-1 cuts the 12 over d, ZeRO-2 the gradients as well, ZeRO-3 the weights as well.
    Rajbhandari et al. 2020, section 3.1.
    """
    n, (weights, gradients, optimizer) = N / (t * p), of_each
    return (
        weights * n / (d if zero >= 3 else 1),
        gradients * n / (d if zero >= 2 else 1),
        optimizer * n / (d if zero >= 1 else 1),
    )


def layer_activation_bytes(
    b: float,
    s: float,
    h: float,
    a: float,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """What one layer keeps for the backward of one microbatch, in half precision, dropout masks of one byte.
    Korthikanti et al. 2022, Table 2.

    Of 34·s·b·h bytes t cuts 24, and with sequence parallelism the other 10 too. The scores of attention are
    5·a·s²·b bytes, cut by t; recompute "selective" computes them again, "full" keeps the layer's input alone.
    """
    if recompute == "full":
        return 2 * s * b * h
    scores = 5 * a * s * s * b / t if recompute == "none" else 0
    return s * b * h * (34 / t if sequence_parallel else 10 + 24 / t) + scores


def microbatches_held(schedule: str, p: int, m: int, stage: int = 0) -> int:
    """Drop 07: of how many microbatches a stage holds activations at its peak, with GPipe or 1F1B."""
    return m if schedule == "GPipe" else min(m, p - stage)  # 1F1B: one backward frees one, after a warm-up


# -- drop 07: time ---------------------------------------------------------------------------------


def bubble(p: int, m: int, v: int = 1) -> float:
    """The share of wall time in which a pipeline rank idles, with GPipe or 1F1B (v = 1), or interleaved. A
    slot is the time of a forward and its backward. Of m + (p−1)/v slots, (p−1)/v are idle. Narayanan et al.
    2021.
    """
    idle = (p - 1) / v
    return idle / (m + idle)


def ring_seconds(size: float, n: int, bandwidth: float, latency: float = 0.0) -> float:
    """Seconds of an all-reduce: 2·(n−1) steps, in each of which a rank sends size/n bytes and waits once.

    bandwidth: bytes a second of one rank, in one direction. latency: seconds of one message.
    """
    return 2 * (n - 1) * (size / n / bandwidth + latency)


# -- drop 08: who shares a group -------------------------------------------------------------------


def neighbours_apart(axis: str, sizes: dict[str, int]) -> int:
    """The difference of the numbers of two neighbours along an axis: the product of the sizes further in.
    sizes: from the outermost axis to the innermost, such as {"pp": 2, "dp": 2, "tp": 2}. Raises ValueError
    for an axis that is not among them.
    """
    apart = 1
    for inner in reversed(sizes):
        if inner == axis:
            return apart
        apart *= sizes[inner]
    raise ValueError(f"no axis {axis!r}; there are {', '.join(sizes)}")


def leaves_the_node(axis: str, sizes: dict[str, int], node: int) -> bool:
    """Whether the groups along an axis are on several nodes of `node` ranks: the group's size times the
    distance of neighbours is more than a node has.
    """
    return sizes[axis] > 1 and sizes[axis] * neighbours_apart(axis, sizes) > node
