"""Lines of what stands in place of attention in some layers: Mamba-2, and gated delta networks.

Sources: Dao and Gu 2024, sections 6 and 7 (chunks, and the block); Yang et al. 2024 (the gated delta rule);
Megatron-Core's ssm/mamba_mixer.py and ssm/gated_delta_net.py (what is split over tp, and what is kept).
"""

from __future__ import annotations

from typing import Any

from .op import LayerOnRank, Op, enter, leave, stream
from .shape import Recurrent

# Of the achievable FLOP/s, by the kernels that go through a sequence in chunks. Read from three runs of
# Nemotron 3 Nano on Blackwell (Megatron Bridge, docs/performance-summary.md, 26.04): with it they are off by
# as much as Qwen3-30B-A3B's of the same release, 4 to 15 % too fast. Assumed for gated delta networks.
SCAN = 0.035


def recurrence(at: LayerOnRank, r: Recurrent) -> list[Op]:
    """From the norm's output to the sum: matrix, convolution, chunks, a norm with a gate, matrix."""
    t, sb, n, x = at.layout.tp, at.tokens, at.job.framework.number_bytes, at.x
    inner, mixed, recomputed = n * sb * r.inner / t, n * sb * r.mixed / t, ("per-op", "full")
    # The states between chunks go through memory in float32; backward makes them anew.
    states = 2 * 4.0 * sb / r.chunk * r.state * r.inner / t
    scan: dict[str, Any] = dict(share=SCAN, block="scores", kernels=5)
    flops, moved = sb * r.flops / t, mixed + inner + states
    output = "attention's output"
    return [
        *enter(at, x, "attention", 1),
        *at.product(
            "into the recurrence", sb, at.model.hidden, r.width / t, "attention", saved=at.gathered(x)
        ),
        *stream("convolution", 2 * mixed, 1, saved=mixed, recomputed=recomputed),
        Op("recurrence", "attention", "F", flops, moved, saved=mixed, recomputed=recomputed, **scan),
        Op("recurrence", "attention", "I", 2.5 * flops, 2 * moved + states, **scan),
        *stream("gated norm", 3 * inner, 1, saved=2 * inner, recomputed=recomputed),
        *at.product(output, sb, r.inner / t, at.model.hidden, output, saved=at.narrow(inner)),
        *leave(at.layout, x, "attention", ("full",)),
    ]
