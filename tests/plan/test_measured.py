"""`plan --measured` and `estimate --measured`: the texts that they read, and the comparison."""

import json
from dataclasses import replace

import pytest

from three_axes.__main__ import main
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout, estimate
from three_axes.plan.measured import read, step_seconds

JOB = Job(MODELS["llama-3-70b"], CLUSTERS["dgx-h100"], 128, 8192, FRAMEWORKS["megatron-bridge"])
LAYOUT = Layout(dp=2, tp=4, pp=4, cp=2, interleave=5, schedule="interleaved", zero=1)


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
    quarter = replace(LAYOUT, recompute="full", recomputed=5)  # a stage has 20 layers
    some = step_seconds(JOB, quarter, 450, "hardware TFLOP/s")
    assert some == pytest.approx((1 + 1 / 12) * tokens * of_token / 450e12)


@pytest.mark.parametrize(
    "line, amount",
    [
        (" iteration 9/ 50 | elapsed time per iteration (ms): 13105.3 | lr: 1", (13105.3, "ms")),
        ("step: 10  loss: 7.1  memory: 61.2GiB(64%)  tps: 6,667  tflops: 386.1", (6667, "tokens/s")),
    ],
)
def test_lines_of_logs(line, amount):
    assert read(line) == ({}, *amount)
    assert read(f"rank=0 {line} lr=3") == ({}, *amount)
    assert read(f"dp 8 = {line}") == ({"dp": 8}, *amount)


def test_a_printed_layout_can_be_read_back():
    layouts = (
        LAYOUT,
        Layout(dp=8, cp=2, ep=4, zero=3, shard=8, recompute="full", recomputed=5),
        Layout(dp=2, tp=4, pp=2, schedule="ZB-V", recompute="per-op", microbatch=2),
    )
    for layout in layouts:
        said, seconds, unit = read(f"{layout} = 16.2 s")
        assert Layout(**said) == layout and (seconds, unit) == (16.2, "s")
    short = dict(dp=8, tp=4, zero=1, sequence_parallel=False)
    assert read("dp8 tp4 zero 1 no sp=1,100 tokens/s/GPU")[0] == short


@pytest.mark.parametrize(
    "text",
    "|=|dp 8 = |4.1|4.1 parsecs|dp eight = 4 s|-1 s|0 s|4..1 s|dp 8 dp 4 = 3 s|b 1 b 1 = 3 s".split("|"),
)
def test_an_invalid_measurement_is_refused(text):
    with pytest.raises(ValueError):
        read(text)


def test_a_step_of_an_estimate_has_its_ratio_and_its_place(capsys):
    """A measured step without a layout is about the layout of the estimate."""
    asked = "estimate llama-3-8b --gpus 64 --zero 3 --seq 8192 --framework torchtitan"
    out = lambda *measured: (
        main([*asked.split(), "--json", "--measured", *measured]) or json.loads(capsys.readouterr().out)
    )
    plain = out("dp 32 tp 2 = 99 s")  # another layout: it corrects the bias, and is not compared
    assert plain["measured"] is None and plain["sure"]["measured"] == 1
    seconds = estimate(
        Job(MODELS["llama-3-8b"], CLUSTERS["dgx-h100"], 128, 8192, FRAMEWORKS["torchtitan"]),
        FRAMEWORKS["torchtitan"].layout(dp=64, zero=3),
    ).step_seconds
    for times, inside in ((1.0, True), (1.2, True), (1.6, False), (0.7, False)):
        printed = out(f"{times * seconds:.5f} s")
        of = printed["measured"]
        assert of["ratio"] == pytest.approx(times, rel=1e-3) and of["inside"] is inside
        assert of["mfu"] * of["ratio"] == pytest.approx(printed["mfu"], rel=1e-3)
        assert printed["step_seconds"] == pytest.approx(seconds)
        assert (of["low"] <= times * seconds <= of["high"]) is inside
    assert main([*asked.split(), "--measured", f"{1.6 * seconds:.5f} s"]) == 0
    text = capsys.readouterr().out
    assert "1.60 times what is predicted" in text and "longer than the 80% interval" in text
    assert "would add" not in text  # the text names no cause


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (["0s"], "must be a positive number, not 0"),
        (["nothing"], "no time or speed in 'nothing'"),
        (["1 s", "2 s"], "are both measured of DP 64"),
        (["0.01 s"], "cannot be: it is"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused_in_one_sentence(wrong, sentence, capsys):
    assert main(["estimate", "llama-3-8b", "--gpus", "64", "--zero", "3", "--measured", *wrong]) == 2
    assert sentence in capsys.readouterr().err


def test_the_gpus_of_an_estimate_are_the_product_of_its_sizes(capsys):
    """If dp is not given, it follows from the GPUs. Sizes that do not multiply to the GPUs are refused."""

    def sizes(more):
        assert main(["estimate", "llama-3-70b", "--gpus", "64", "--json", *more.split()]) == 0
        return json.loads(capsys.readouterr().out)["layout"]["dp"]

    assert sizes("--tp 8") == 8 and sizes("--tp 4 --pp 2 --cp 2") == 4 and sizes("--dp 8 --tp 8") == 8
    for wrong in ("--tp 5", "--dp 2 --tp 8"):
        assert main(["estimate", "llama-3-70b", "--gpus", "64", *wrong.split()]) == 2
        assert "but there are 64 GPUs" in capsys.readouterr().err


def test_a_plan_takes_sizes_from_its_options(capsys):
    """A measured step need not repeat the sizes that the options give."""
    asked = "plan llama-3-70b --gpus 64 --seq 8192 --tp 8 --pp 2 --dp 4 --json --measured".split()
    assert main([*asked, "20 s"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["step_seconds"] == pytest.approx(20, rel=1e-3)
    assert main("plan llama-3-70b --gpus 64 --measured 20s".split()) == 2
    assert "does not say its layout" in capsys.readouterr().err
