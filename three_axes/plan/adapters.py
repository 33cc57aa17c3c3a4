"""Frozen weights: only small matrices beside them are trained.

Sources: Hu et al. 2021 (LoRA, section 4: the product of two matrices of rank r beside a frozen one); Dettmers
et al. 2023 (QLoRA, section 3: 4 bits, a scale for 64 numbers, and scales of the scales).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..paper.checks import whole

# Which linear layers of a layer belong to which part, as `attention` and `feed_forward` call them. Routed
# experts, the router, embedding and head stay as they are.
MATRICES: dict[str, frozenset[str]] = {
    "attention": frozenset(
        (
            "queries",
            "keys",
            "values",
            "attention's output",
            "queries, down",
            "queries, up",
            "keys and values, down",
            "keys and values, up",
        )
    ),
    "feed-forward": frozenset(("gate", "up", "down")),
}


@dataclass(frozen=True)
class Lora:
    """rank: of the adapters. matrices: the parts whose linear layers have one, of `MATRICES`; the rest is
    frozen without. four_bit: the layers' frozen weights are kept in four bits (QLoRA). Raises ValueError for
    a rank below 1 and for parts that are not known.
    """

    rank: int
    matrices: tuple[str, ...] = tuple(MATRICES)
    four_bit: bool = False

    def __post_init__(self):
        whole("the rank of LoRA", self.rank, 1, 10**5)
        wrong = [part for part in self.matrices if part not in MATRICES]
        if wrong or not self.matrices:
            given = repr(wrong[0]) if wrong else "none"
            raise ValueError(f"LoRA adapts {' or '.join(MATRICES)}, or both; {given} is given")

    def adapts(self, name: str) -> bool:
        """Whether a linear layer, or a part, has adapters."""
        return any(name == part or name in MATRICES[part] for part in self.matrices)

    @property
    def weight_bytes(self) -> float:
        """Of a frozen weight of a layer: 2, or half a byte, one for 64 and a float32 for 64 times 256."""
        return 0.5 + 1 / 64 + 4 / (64 * 256) if self.four_bit else 2.0

    def __str__(self) -> str:
        of = "" if len(self.matrices) == len(MATRICES) else f" of {self.matrices[0]}"
        return f"{'4-bit ' * self.four_bit}LoRA {self.rank}{of}"
