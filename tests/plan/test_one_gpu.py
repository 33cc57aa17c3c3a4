"""The planner's estimates are checked on nine runs of Hugging Face's models on one H100, of which two ran out
of memory. Nothing is fitted.

Measured in November 2026 with PyTorch 2.11 and transformers 5.17: FSDP2 without a compiler, float32 master
weights, bfloat16 computing, fused AdamW, clipping, PyTorch's fused attention.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Estimate, Job, Layout, estimate, plan


class Run(NamedTuple):
    """A run: seconds of a step, GB allocated. Both are None if it ran out of memory."""

    model: str
    tokens: int  # of each sequence
    sequences: int
    recompute: str
    seconds: float | None = None
    allocated: float | None = None


def estimated(run: Run) -> Estimate:
    """The planner's estimate of a run."""
    job = Job(MODELS[run.model], CLUSTERS["dgx-h100"], run.sequences, run.tokens, FRAMEWORKS["transformers"])
    return estimate(job, Layout(microbatch=run.sequences, zero=3, recompute=run.recompute))


def verdict(ours: Estimate) -> str:
    return "fits" if ours.fits else "tight" if ours.tight else "too large"


def interval(ours: Estimate) -> list[float]:
    """The two ends, in seconds."""
    return [end * ours.step_seconds for end in (ours.sure.low, ours.sure.high)]


def held(ours: Estimate) -> float:
    """GB without the CUDA context."""
    return (ours.memory_bytes - ours.memory["overhead"]) / 1e9


RUNS = [
    Run("qwen3-0.6b", 4096, 4, "none", 0.423, 75.5),
    Run("qwen3-0.6b", 2048, 8, "none"),
    Run("qwen3-1.7b", 4096, 2, "none", 0.393, 67.2),
    Run("qwen3-1.7b", 4096, 4, "full", 0.803, 65.2),
    Run("llama-3.2-3b", 4096, 1, "none", 0.377, 68.8),
    Run("llama-3.2-3b", 4096, 4, "full"),
    Run("gpt2-xl", 1024, 16, "full", 0.698, 39.3),
    Run("tinyllama-1.1b", 2048, 8, "none", 0.359, 58.8),
    Run("tinyllama-1.1b", 2048, 2, "none", 0.192, 27.7),
]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Run, Estimate]]:
    return [(run, estimated(run)) for run in RUNS]


def test_no_run_that_ended_is_refused_and_no_run_that_crashed_is_said_to_fit(pairs):
    for run, ours in pairs:
        assert verdict(ours) != ("too large" if run.seconds else "fits"), run
        assert not run.allocated or held(ours) == pytest.approx(run.allocated, rel=0.1)
    # The second run, which crashed, had one microbatch of eight sequences; the planner takes two of four.
    assert plan(pairs[1][1].job, gpus=1).best.layout.microbatch == 4


def test_runs_outside_the_interval_are_those_that_wait_for_the_host(pairs):
    """Of the seven timed runs here the one with the fewest tokens is outside, 43 % too fast: launches take
    longer than assumed. Of nine timed runs, two of which are not here, it is three: 41, 43 and 43 % too fast.
    """
    timed = [(run, ours) for run, ours in pairs if run.seconds]
    inside = lambda run, ours: interval(ours)[0] <= run.seconds <= interval(ours)[1]
    ((run, ours),) = [pair for pair in timed if not inside(*pair)]
    assert len(timed) == 7 and run == RUNS[-1] and round(100 * (ours.step_seconds / run.seconds - 1)) == -43
    assert run.tokens * run.sequences == min(one.tokens * one.sequences for one, _ in timed)


def test_the_manual_has_these_runs(pairs):
    manual = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for run, ours in pairs:
        asked = f"| {run.model} | {run.tokens:,} · {run.sequences} | {run.recompute}"
        seconds = "{:.2f} s, {:.2f} to {:.2f}".format(ours.step_seconds, *interval(ours))
        here = f"{verdict(ours)} | {held(ours):.1f} GB | {seconds}"
        there = f"{run.allocated} GB | {run.seconds:.2f} s" if run.seconds else "out of memory | "
        assert f"{asked} | {here} | {there} |" in manual, f"{asked} | {here} | {there} |"
