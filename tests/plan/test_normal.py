"""Is my speed normal: what was measured, beside what is predicted and what others measured."""

import json
import re
from dataclasses import replace

import pytest

from three_axes.__main__ import main
from three_axes.paper.hardware import generation
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout, estimate
from three_axes.plan.measured import read, step_seconds
from three_axes.plan.normal import Normal, causes, nearest, published_runs, that_fits, with_causes

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
    longer = dict(Normal(estimate(JOB, quarter), 20.0).longer())
    assert "all layers are computed twice" in longer


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
    "text",
    [
        "",
        "=",
        "dp 8 = ",
        "4.1",
        "4.1 parsecs",
        "dp eight = 4 s",
        "-1 s",
        "0 s",
        "4..1 s",
        "dp 8 dp 4 = 3 s",
        "b 1 b 1 = 3 s",
    ],
)
def test_what_is_no_measurement_is_refused(text):
    with pytest.raises(ValueError):
        read(text)


def test_nvidias_own_run_is_normal_and_one_that_hides_nothing_is_slow():
    """1,533 tokens/s a GPU in FP8 is printed for this layout (NeMo 24.07)."""
    narrow = replace(JOB, precision="fp8")
    printed = Normal(estimate(narrow, LAYOUT), step_seconds(narrow, LAYOUT, 1533, "tokens/s"))
    assert printed.verdict == "normal"
    whole = estimate(JOB, LAYOUT)
    fast = Normal(whole, 0.8 * whole.step_seconds)
    assert fast.verdict == "fast" and "would add" not in fast.text()


HEALTHY = estimate(replace(JOB, framework=FRAMEWORKS["torchtitan"]), Layout(dp=64, zero=3, recompute="full"))


@pytest.mark.parametrize("cause", causes(HEALTHY), ids=lambda cause: cause.words)
def test_a_sick_run_has_the_right_cause_first(cause):
    """A step that is as long as this alone makes it, if that is more than the interval's width."""
    seconds = with_causes(HEALTHY, [cause])
    run = Normal(HEALTHY, seconds)
    added = seconds - HEALTHY.step_seconds
    if run.verdict == "slow":
        assert abs(run.longer()[0][1] / added - 1) < 0.02 and not run.unexplained()
        assert "Each of these alone would add" in run.text()
    else:
        assert seconds <= HEALTHY.sure.high * HEALTHY.step_seconds and "would add" not in run.text()


def test_where_no_cause_is_enough_it_says_what_would_be():
    sick = Normal(HEALTHY, 4 * HEALTHY.step_seconds)
    text = sick.text()
    assert sick.unexplained() > 0 and "None of these" in text
    speed, clock = sick.needed()
    assert re.fullmatch(r"between nodes [\d.]+ [MG]B/s a GPU, of 50.0 GB/s", speed) and "GPUs at" in clock
    # With that network it takes as long.
    there = float(re.search(r"[\d.]+", speed)[0]) * 1e9
    slow = replace(HEALTHY.job, cluster=replace(HEALTHY.job.cluster, inter_node_bandwidth=there))
    assert estimate(slow, HEALTHY.layout).step_seconds == pytest.approx(sick.seconds, rel=0.05)


@pytest.mark.parametrize(
    "layout", [Layout(dp=64, zero=3, shard=8), Layout(dp=8, tp=8, zero=1), Layout(dp=64)]
)
def test_one_port_slows_all_groups_of_a_node(layout):
    """Of HSDP's shards inside a node and of TP's eight ranks too, which share it."""
    made = estimate(replace(JOB, global_batch=64, model=MODELS["llama-3-8b"]), layout)
    one = next(cause for cause in causes(made) if cause.words.startswith("one port"))
    assert with_causes(made, [one]) > 1.02 * made.step_seconds


def test_more_than_a_gpu_can_do_cannot_be():
    """8,708 tokens/s of a 7B on an A100 are 352 of 312 TFLOP/s."""
    job = Job(MODELS["llama-2-7b"], CLUSTERS["dgx-a100"], 128, 4096)
    made = Normal(estimate(job, Layout(dp=8, zero=3)), step_seconds(job, Layout(dp=8), 8708, "tokens/s"))
    assert made.verdict == "impossible" and "This cannot be" in made.text() and made.mfu > 1


def test_a_run_that_does_not_fit_is_refused_or_recomputes_as_little_as_fits():
    """70B on 32 H200: DP 32 needs a terabyte each; TP 4 fits when some layers are computed twice."""
    job = Job(MODELS["llama-3-70b"], CLUSTERS["dgx-h200"], 128, 8192)
    with pytest.raises(ValueError, match="does not fit h200: it needs 1.1. TB of 151 GB"):
        that_fits(job, Layout(dp=32))
    some = that_fits(job, Layout(dp=8, tp=4, zero=1, microbatch=2))
    assert some.layout.recompute == "full" and some.fits
    if some.layout.recomputed > 1:
        less = replace(some.layout, recomputed=some.layout.recomputed - 1)
        assert not estimate(job, less).fits
    assert that_fits(job, Layout(dp=4, tp=8, zero=1)).layout == Layout(dp=4, tp=8, zero=1)


def test_the_nearest_runs_are_of_the_same_kind():
    assert len(published_runs()) > 100
    first, *_ = nearest(JOB, 64)
    assert not first.experts and 20 < first.params < 250
    experts = nearest(replace(JOB, model=MODELS["mixtral-8x22b"]), 128)
    assert experts and all(run.experts for run in experts)
    assert all(generation(run.device) == "Hopper" for run in [*nearest(JOB, 64), *experts])
    cold = replace(JOB, cluster=CLUSTERS["rtx-4090-pcie"])
    none = Normal(estimate(cold, Layout(tp=8, pp=8)), 500.0)
    assert not none.nearest() and "No published run of its kind is at hand." in none.text()
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
