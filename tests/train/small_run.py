"""A training run of seconds, and the comparison of its metrics with the twin's losses."""

from pathlib import Path

import pytest

from drops.d14 import twin
from helpers.train import Config, read_metrics

SMALL_RUN = "-m helpers.train --hidden 32 --seq-len 16 --batch 8".split()


def expect_twins_losses(folder: Path, steps: int) -> None:
    """Check that the metrics of a run of SMALL_RUN have every step once, with the loss of the same run in a
    single process.
    """
    metrics = read_metrics(folder)
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    alone = twin(Config(hidden=32, seq_len=16, batch=8, steps=steps), steps)
    assert [line["loss"] for line in metrics] == pytest.approx(alone, rel=1e-5)
