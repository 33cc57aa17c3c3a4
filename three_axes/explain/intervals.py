"""Sets of time: sorted intervals that do not touch, as arrays of shape (n, 2)."""

from __future__ import annotations

import numpy as np


def union(spans) -> np.ndarray:
    """The time in which at least one of these (start, end) runs."""
    spans = np.asarray(spans, dtype=float).reshape(-1, 2)
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reached = np.maximum.accumulate(spans[:, 1])
    first = np.r_[True, spans[1:, 0] > reached[:-1]]
    last = np.r_[np.flatnonzero(first)[1:] - 1, len(spans) - 1]
    return np.c_[spans[first, 0], reached[last]]


def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The time that is in a and in b."""
    if not len(a) or not len(b):
        return np.empty((0, 2))
    # Each piece of a meets the pieces of b from the first that ends after its start on.
    low, high = np.searchsorted(b[:, 1], a[:, 0], "right"), np.searchsorted(b[:, 0], a[:, 1], "left")
    counts = np.maximum(0, high - low)
    i = np.repeat(np.arange(len(a)), counts)
    j = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(low, counts)
    return np.c_[np.maximum(a[i, 0], b[j, 0]), np.minimum(a[i, 1], b[j, 1])]


def without(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The time that is in a and not in b."""
    if not len(a):
        return a
    edges = np.r_[-np.inf, b.ravel(), np.inf].reshape(-1, 2)  # the gaps of b
    return both(a, edges[edges[:, 1] > edges[:, 0]])


def length(a: np.ndarray) -> float:
    return float((a[:, 1] - a[:, 0]).sum())
