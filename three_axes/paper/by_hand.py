"""Formulas that the drops, the planner, the quiz and the pictures share, to be redone on paper. The lines of
the reader's cost model are in `drops.formulas`.

    N   parameters                       d, t, p   sizes of data, tensor and pipeline parallelism
    a   attention heads                  m         microbatches of b sequences of s tokens
    h   hidden size                      v         chunks of layers on each pipeline rank

`three_axes.plan` computes the same for other models, frameworks and thousands of layouts at once;
`tests/paper/test_by_hand.py` compares the two. Arguments and results are plain numbers.
"""

from __future__ import annotations

# -- drop 02: collectives --------------------------------------------------------------------------


def reduce_scatter_bytes(size: float, n: int) -> float:
    """A ring cuts the `size` bytes into n chunks. In each of its n−1 steps a rank sends one chunk. An
    all-gather sends as much. Patarasu and Yuan 2009.
    """
    return (n - 1) / n * size


def all_reduce_bytes(size: float, n: int) -> float:
    """A reduce-scatter, then an all-gather."""
    return 2 * (n - 1) / n * size


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


# -- drop 07: time ---------------------------------------------------------------------------------


def bubble(p: int, m: int, v: int = 1) -> float:
    """The share of wall time in which a pipeline rank idles, with GPipe or 1F1B (v = 1), or interleaved. A
    slot is the time of a forward and its backward. Of m + (p−1)/v slots, (p−1)/v are idle. Narayanan et al.
    2021.
    """
    idle = (p - 1) / v
    return idle / (m + idle)
