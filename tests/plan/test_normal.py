"""Is my speed normal: what was measured, beside what is predicted and what others measured."""

import json
from dataclasses import replace

import pytest

from three_axes.__main__ import main
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout, estimate
from three_axes.plan.measured import read, step_seconds
from three_axes.plan.normal import Normal, nearest, published_runs

JOB = Job(MODELS["llama-3-70b"], CLUSTERS["dgx-h100"], 128, 8192, FRAMEWORKS["megatron-bridge"])
LAYOUT = Layout(dp=2, tp=4, pp=4, cp=2, interleave=5, schedule="interleaved", zero=1)
ASKED = "normal llama-3-70b --gpus 64 --batch 128 --seq 8192 --framework megatron-bridge --tp 4 --pp 4 --cp 2"


def test_units_of_what_was_measured():
    tokens = 128 * 8192 / 64
    assert step_seconds(JOB, LAYOUT, 4100, "ms") == 4.1 == step_seconds(JOB, LAYOUT, 4.1, "s")
    assert step_seconds(JOB, LAYOUT, tokens, "tokens/s") == 1
    of_token = JOB.model.flops_per_token(8192)
    assert step_seconds(JOB, LAYOUT, 450, "TFLOP/s") == pytest.approx(tokens * of_token / 450e12)
    causal = step_seconds(JOB, LAYOUT, 450, "causal TFLOP/s")
    assert causal == pytest.approx(tokens * JOB.model.flops_per_token(8192, causal=True) / 450e12)
    twice = step_seconds(JOB, replace(LAYOUT, recompute="full"), 450, "hardware TFLOP/s")
    assert twice == pytest.approx(4 / 3 * tokens * of_token / 450e12)
    quarter = replace(LAYOUT, recompute="full", recomputed=5)  # of 20 layers of a stage
    some = step_seconds(JOB, quarter, 450, "hardware TFLOP/s")
    assert some == pytest.approx((1 + 1 / 12) * tokens * of_token / 450e12)
    causes = dict(Normal(estimate(JOB, quarter), 20.0).longer())
    assert "all layers are computed twice" in causes


@pytest.mark.parametrize(
    "line, amount",
    [
        (" iteration 9/ 50 | elapsed time per iteration (ms): 13105.3 | lr: 1", (13105.3, "ms")),
        ("step: 10  loss: 7.1  memory: 61.2GiB(64%)  tps: 6,667  tflops: 386.1", (6667, "tokens/s")),
        ("tokens_per_sec: 9.1K | tokens_per_sec_per_gpu: 1.2K | lm_loss: 1.1", (1200, "tokens/s")),
    ],
)
def test_lines_of_logs(line, amount):
    assert read(line) == ({}, *amount)
    assert read(f"rank=0 {line} lr=3") == ({}, *amount)
    assert read(f"dp 8 = {line}") == ({"dp": 8}, *amount)


def test_a_layout_may_be_said_as_it_is_printed():
    layouts = (
        LAYOUT,
        Layout(dp=8, cp=2, ep=4, zero=3, shard=8, recompute="full", recomputed=5),
        Layout(dp=2, tp=4, pp=2, schedule="ZB-V", recompute="per-op", microbatch=2),
    )
    for layout in layouts:
        said, seconds, unit = read(f"{layout} = 16.2 s")
        assert Layout(**said) == layout and (seconds, unit) == (16.2, "s")
    assert read("dp8 tp4 zero 1 no sp=1,100 tokens/s/GPU")[0] == dict(
        dp=8, tp=4, zero=1, sequence_parallel=False
    )


@pytest.mark.parametrize(
    "text", ["", "=", "dp 8 = ", "4.1", "4.1 parsecs", "dp eight = 4 s", "-1 s", "0 s", "4..1 s"]
)
def test_what_is_no_measurement_is_refused(text):
    with pytest.raises(ValueError):
        read(text)


def test_nvidias_own_run_is_normal_and_one_that_hides_nothing_is_slow():
    """1,533 tokens/s a GPU in FP8 is printed for this layout (NeMo 24.07)."""
    narrow = replace(JOB, precision="fp8")
    printed = Normal(estimate(narrow, LAYOUT), step_seconds(narrow, LAYOUT, 1533, "tokens/s"))
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
    assert (
        main(f"{ASKED} --interleave 5 --schedule interleaved --zero 1 --measured".split() + ["900 tokens/s"])
        == 0
    )
    out = capsys.readouterr().out
    assert "DP 2 · TP 4 · PP 4 · CP 2" in out and "900 tokens/s/GPU" in out and "MLPerf Training" in out
    assert main(f"{ASKED} --json --measured".split() + ["15 s"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step_seconds"] == 15 and {"nearest", "longer", "predicted", "verdict"} <= set(printed)
    for wrong, sentence in (
        ("--measured 0s", "must be a positive number, not 0"),
        ("--measured nothing", "no time or speed in 'nothing'"),
        ("--measured tp8=4s", "--tp, --pp and the rest say the layout"),
        ("--tp 5 --measured 1s", "--gpus 64 is no multiple of tp · pp · cp = 40"),
    ):
        assert main(f"{ASKED} {wrong}".split()) == 2 and sentence in capsys.readouterr().err
