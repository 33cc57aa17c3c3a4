"""The numbers that matrix products are made of: how fast they go, what narrowing them costs, what is kept.

The attention, the router, norms, embedding, head and optimizer stay as they are; weights are narrowed once a
step. Sources: Micikevicius et al. 2022 (FP8, a scale for each tensor), DeepSeek-AI 2024 (V3, section 3.3:
blocks of 128), OCP 2023 (MX formats, blocks of 32), NVIDIA 2025 (Pretraining with NVFP4, blocks of 16 and
Hadamard transforms); Transformer Engine's recipes, of which inputs are kept and gathered narrow.
"""

from __future__ import annotations

from typing import NamedTuple


class Precision(NamedTuple):
    """rate: of a device, that products run at: bf16, fp8 or fp4. bytes: of a number in a product, and of one
    that is kept or gathered for it. cast: bytes moved to narrow a number: read, and written twice, since the
    product of the weights' gradient wants it the other way round.
    """

    name: str
    rate: str = "bf16"
    bytes: float = 2.0
    cast: float = 0.0


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("bf16"),
        # Scales known from the steps before: read 2, written 1 and 1.
        Precision("fp8", "fp8", 1.0, 4.0),
        # Scales of the tensor itself: it is read once more for its largest number.
        Precision("fp8-current", "fp8", 1.0, 6.0),
        # A float32 scale for 128 numbers, of each copy.
        Precision("fp8-blockwise", "fp8", 1 + 4 / 128, 4 + 8 / 128),
        # A byte for 32 numbers.
        Precision("mxfp8", "fp8", 1 + 1 / 32, 4 + 2 / 32),
        # Half a byte and a byte for 16; read once more for the largest number, and the copy for the weights'
        # gradient is written and read again by its transform.
        Precision("nvfp4", "fp4", 0.5 + 1 / 16, 4 + 2 * (0.5 + 1 / 16) + 4),
    )
}


def find_precision(name: str) -> Precision:
    """By name. Raises ValueError for one that is not known."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known are {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
