"""Parametrised cases: some always run, the others are marked slow."""

from collections.abc import Iterable

import pytest


def sampled(cases: Iterable, every: int = 3) -> list:
    """Mark cases as slow, except the first of each `every`. A tuple is a case with several arguments."""
    made = [case if type(case) is tuple else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] * bool(i % every)) for i, case in enumerate(made)]
