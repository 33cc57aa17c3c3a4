"""Mistakes that are proven by what was counted and seen while the reader's code ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...practice import Mistake, proven


def mistake(name: str, text: str, proof: Callable[[dict], bool]) -> Mistake:
    """proof(facts): whether what one rank saw shows the mistake."""
    return Mistake(name, text, lambda: proof)


def shown_by(facts: Sequence[dict], mistakes: Sequence[Mistake]) -> Mistake | None:
    """The first mistake that the facts of every rank show."""
    return proven(facts, [()] * len(facts), mistakes, lambda seen, proof: bool(proof(seen)))
