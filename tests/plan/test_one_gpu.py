"""The planner's estimates are checked on nine runs of Hugging Face's models on one H100, of which two ran out
of memory. Nothing is fitted.

Measured in November 2026 with PyTorch 2.11 and transformers 5.17: FSDP2 without a compiler, float32 master
weights, bfloat16 computing, fused AdamW, clipping, PyTorch's fused attention.
"""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from three_axes.__main__ import main


def output_of(command: str) -> str:
    """What a command prints."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(command.split()) == 0
    return out.getvalue()


class Run(NamedTuple):
    """A run: seconds of a step, GB allocated and reserved. All are None if it ran out of memory."""

    model: str
    tokens: int  # of each sequence
    sequences: int
    recompute: str
    seconds: float | None = None
    allocated: float | None = None
    reserved: float | None = None


class Estimated(NamedTuple):
    """The planner's estimate of a run. held: GB without the CUDA context."""

    verdict: str
    seconds: float
    low: float
    high: float
    held: float


def estimated(run: Run) -> Estimated:
    """The planner's estimate of a run."""
    batch = f"--batch {run.sequences} --microbatch {run.sequences} --seq {run.tokens}"
    how = f"--zero 3 {batch} --recompute {run.recompute} --framework transformers"
    made = json.loads(output_of(f"estimate {run.model} {how} --json"))
    verdict = "fits" if made["fits"] else "tight" if made["tight"] else "too large"
    ends = (made["step_seconds"] * made["sure"][end] for end in ("low", "high"))
    held = (made["memory_bytes"] - made["memory"]["overhead"]) / 1e9
    return Estimated(verdict, made["step_seconds"], *ends, held)


RUNS = [
    Run("qwen3-0.6b", 4096, 4, "none", 0.423, 75.5, 83.3),
    Run("qwen3-0.6b", 2048, 8, "none"),
    Run("qwen3-1.7b", 4096, 2, "none", 0.393, 67.2, 80.6),
    Run("qwen3-1.7b", 4096, 4, "full", 0.803, 65.2, 81.4),
    Run("llama-3.2-3b", 4096, 1, "none", 0.377, 68.8, 82.5),
    Run("llama-3.2-3b", 4096, 4, "full"),
    Run("gpt2-xl", 1024, 16, "full", 0.698, 39.3, 47.2),
    Run("tinyllama-1.1b", 2048, 8, "none", 0.359, 58.8, 68.2),
    Run("tinyllama-1.1b", 2048, 2, "none", 0.192, 27.7, 32.4),
]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Run, Estimated]]:
    return [(run, estimated(run)) for run in RUNS]


def test_no_run_that_ended_is_refused_and_no_run_that_crashed_is_said_to_fit(pairs):
    for run, ours in pairs:
        assert ours.verdict != ("too large" if run.seconds else "fits"), run
        assert not run.allocated or ours.held == pytest.approx(run.allocated, rel=0.1)
    # The run that crashed had one microbatch of eight sequences; the planner takes two of four.
    plan = output_of("plan qwen3-0.6b --gpus 1 --batch 8 --seq 2048 --framework transformers")
    assert "b 4 · ZeRO-3" in plan and "7 fit, 1 more are tight" in plan


def test_runs_outside_the_interval_are_those_that_wait_for_the_host(pairs):
    """Of the seven timed runs here the one with the fewest tokens is outside, 43 % too fast: launches take
    longer than assumed. Of nine timed runs, two of which are not here, it is three: 41, 43 and 43 % too fast.
    """
    timed = [(run, ours) for run, ours in pairs if run.seconds]
    outside = [(run, ours) for run, ours in timed if not ours.low <= run.seconds <= ours.high]
    assert len(timed) == 7 and [run for run, _ in outside] == [RUNS[-1]]
    ((run, ours),) = outside
    assert round(100 * (ours.seconds / run.seconds - 1)) == -43
    assert run.tokens * run.sequences == min(one.tokens * one.sequences for one, _ in timed)


def test_the_manual_has_these_runs(pairs):
    manual = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for run, ours in pairs:
        asked = f"| {run.model} | {run.tokens:,} · {run.sequences} | {run.recompute}"
        seconds = f"{ours.seconds:.2f} s, {ours.low:.2f} to {ours.high:.2f}"
        here = f"{ours.verdict} | {ours.held:.1f} GB | {seconds}"
        there = f"{run.allocated} GB | {run.seconds:.2f} s" if run.seconds else "out of memory | "
        assert f"{asked} | {here} | {there} |" in manual, f"{asked} | {here} | {there} |"
