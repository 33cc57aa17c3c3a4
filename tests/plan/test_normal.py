"""Is my speed normal: what was measured, beside what is predicted and what others measured."""

import json
from dataclasses import replace

import pytest

from three_axes.__main__ import main
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout, estimate
from three_axes.plan.normal import Normal, nearest, published_runs, read_line, step_seconds

JOB = Job(MODELS["llama-3-70b"], CLUSTERS["dgx-h100"], 128, 8192, FRAMEWORKS["megatron-bridge"])
LAYOUT = Layout(dp=2, tp=4, pp=4, cp=2, interleave=5, schedule="interleaved", zero=1)
ASKED = "normal llama-3-70b --gpus 64 --batch 128 --seq 8192 --framework megatron-bridge --tp 4 --pp 4 --cp 2"


def test_units_of_what_was_measured():
    tokens = 128 * 8192 / 64
    assert step_seconds(JOB, LAYOUT, 4100, "milliseconds") == 4.1 == step_seconds(JOB, LAYOUT, 4.1, "seconds")
    assert step_seconds(JOB, LAYOUT, tokens, "tokens") == 1
    of_token = JOB.model.flops_per_token(8192)
    assert step_seconds(JOB, LAYOUT, 450, "TFLOP/s") == pytest.approx(tokens * of_token / 450e12)
    causal = step_seconds(JOB, LAYOUT, 450, "TFLOP/s", "causal")
    assert causal == pytest.approx(tokens * JOB.model.flops_per_token(8192, causal=True) / 450e12)
    twice = step_seconds(JOB, replace(LAYOUT, recompute="full"), 450, "TFLOP/s", "hardware")
    assert twice == pytest.approx(4 / 3 * tokens * of_token / 450e12)
    quarter = replace(LAYOUT, recompute="full", recomputed=5)  # of 20 layers of a stage
    some = step_seconds(JOB, quarter, 450, "TFLOP/s", "hardware")
    assert some == pytest.approx((1 + 1 / 12) * tokens * of_token / 450e12)
    causes = dict(Normal(estimate(JOB, quarter), 20.0).longer())
    assert "all layers are computed twice" in causes


@pytest.mark.parametrize(
    "line, read",
    [
        (" iteration 9/ 50 | elapsed time per iteration (ms): 13105.3 | lr: 1", (13105.3, "milliseconds")),
        ("step: 10  loss: 7.1  memory: 61.2GiB(64%)  tps: 6,667  tflops: 386.1", (6667, "tokens")),
        ("tokens_per_sec: 9.1K | tokens_per_sec_per_gpu: 1.2K | lm_loss: 1.1", (1200, "tokens")),
    ],
)
def test_lines_of_logs(line, read):
    assert read_line(line) == read


def test_nvidias_own_run_is_normal_and_one_that_hides_nothing_is_slow():
    """1,533 tokens/s a GPU in FP8 is printed for this layout (NeMo 24.07)."""
    narrow = replace(JOB, precision="fp8")
    printed = Normal(estimate(narrow, LAYOUT), step_seconds(narrow, LAYOUT, 1533, "tokens"))
    assert printed.verdict == "normal"
    bare = replace(JOB, framework=replace(JOB.framework, hides=(), fused=False))
    slow = Normal(estimate(JOB, LAYOUT), estimate(bare, LAYOUT).step_seconds)
    assert slow.verdict == "slow" and "Each of these alone would add" in slow.text()
    causes = dict(slow.longer())
    assert list(causes.values()) == sorted(causes.values(), reverse=True)
    assert {"TP's sums and gathers do not hide", "operations run one by one, not fused"} <= set(causes)
    fast = Normal(estimate(JOB, LAYOUT), 5.0)
    assert fast.verdict == "fast" and "would add" not in fast.text()


def test_the_nearest_runs_are_of_the_same_kind():
    assert len(published_runs()) > 100
    first, *_ = nearest(JOB, 64)
    assert not first.experts and 20 < first.params < 250
    experts = nearest(replace(JOB, model=MODELS["mixtral-8x22b"]), 128)
    assert experts and all(run.experts for run in experts)
    assert len({(run.source, run.params) for run in experts}) == len(experts)


def test_the_command(capsys):
    assert main(f"{ASKED} --interleave 5 --schedule interleaved --zero 1 --tokens 900".split()) == 0
    out = capsys.readouterr().out
    assert "DP 2 · TP 4 · PP 4 · CP 2" in out and "900 tokens/s/GPU" in out and "MLPerf Training" in out
    assert main(f"{ASKED} --step 15 --json".split()) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step_seconds"] == 15 and {"nearest", "longer", "predicted", "verdict"} <= set(printed)
    for wrong, sentence in (
        ("--step 0", "seconds must be a positive number, not 0"),
        ("--log nothing", "no step time in 'nothing'"),
        ("--tp 5 --step 1", "--gpus 64 is no multiple of tp · pp · cp = 40"),
    ):
        assert main(f"{ASKED} {wrong}".split()) == 2 and sentence in capsys.readouterr().err
