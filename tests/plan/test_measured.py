"""`plan --measured` and `estimate --measured` compare a measured step with its prediction."""

import json

import pytest

from three_axes.__main__ import main
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout
from three_axes.plan.measured import step_seconds

JOB = Job(MODELS["llama-3-70b"], CLUSTERS["dgx-h100"], 128, 8192, FRAMEWORKS["megatron-bridge"])
LAYOUT = Layout(dp=2, tp=4, pp=4, cp=2, interleave=5, schedule="interleaved", zero=1)
ASKED = "estimate llama-3-8b --gpus 64 --zero 3 --seq 8192 --framework torchtitan"


@pytest.mark.parametrize("text", ["16", "16s", "16.0 s", "1,024tokens/s", "1024 tokens/s/GPU"])
def test_a_step_is_seconds_or_tokens_a_second_of_one_gpu(text):
    assert step_seconds(JOB, LAYOUT, text) == 128 * 8192 / 64 / 1024 == 16


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ("0s", "must be a positive number, not 0"),
        ("4..1 s", "must be a positive number"),
        ("nothing", "'nothing' is no measured step: give its seconds, 16.2s"),
        ("dp=8=4s", "is no measured step"),
        ("0.01s", "cannot be: it is"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused_in_one_sentence(wrong, sentence, capsys):
    assert main([*ASKED.split(), "--measured", wrong]) == 2
    assert sentence in capsys.readouterr().err


def test_a_step_of_an_estimate_has_its_ratio_and_its_place(output_of):
    out = lambda seconds: json.loads(output_of(f"{ASKED} --json --measured {seconds:.5f}s"))
    seconds = json.loads(output_of(f"{ASKED} --json"))["step_seconds"]
    for times, inside in ((1.0, True), (1.2, True), (1.6, False), (0.7, False)):
        printed = out(times * seconds)
        of = printed["measured"]
        assert of["ratio"] == pytest.approx(times, rel=1e-3) and of["inside"] is inside
        assert of["mfu"] * of["ratio"] == pytest.approx(printed["mfu"], rel=1e-3)
        assert printed["step_seconds"] == pytest.approx(seconds)
        assert (of["low"] <= times * seconds <= of["high"]) is inside
    text = output_of(f"{ASKED} --measured {1.6 * seconds:.5f}s")
    assert "1.60 times what is predicted" in text and "longer than the 80% interval" in text


def test_a_kind_without_published_runs_has_no_interval(output_of):
    """Text has one sentence about it, and JSON has null."""
    asked = f"{ASKED} --cluster mi300x-node"
    made = json.loads(output_of(f"{asked} --json --measured 100s"))
    assert made["sure"]["low"] is made["sure"]["high"] is None
    assert made["measured"]["inside"] is made["measured"]["low"] is made["measured"]["high"] is None
    text = output_of(f"{asked} --measured {1.1 * made['step_seconds']:.4f}s")
    assert text.count("no interval: no published runs of dense models on such GPUs") == 1
    assert "1.10 times what is predicted" in text and "80% interval" not in text


def test_a_measured_step_in_a_plan_is_one_of_the_best_layout(output_of):
    asked = "plan llama-3-70b --gpus 64 --seq 8192 --json"
    plain = json.loads(output_of(asked))
    made = json.loads(output_of(f"{asked} --measured {1.3 * plain['best']['step_seconds']:.6f}s"))
    assert made.pop("measured")["ratio"] == pytest.approx(1.3, rel=1e-5)
    assert made == {name: value for name, value in plain.items() if name != "measured"}
    text = output_of(f"{asked.replace(' --json', '')} --measured 20s --tp 8 --pp 2")
    assert "measured: 20.00 s" in text


def test_the_gpus_of_an_estimate_are_the_product_of_its_sizes(output_of, capsys):
    """If dp is not given, it follows from the GPUs. Sizes that do not multiply to the GPUs are refused."""
    sizes = lambda more: json.loads(output_of(f"estimate llama-3-70b --gpus 64 --json {more}"))["layout"][
        "dp"
    ]
    assert sizes("--tp 8") == 8 and sizes("--tp 4 --pp 2 --cp 2") == 4 and sizes("--dp 8 --tp 8") == 8
    for wrong in ("--tp 5", "--dp 2 --tp 8"):
        assert main(["estimate", "llama-3-70b", "--gpus", "64", *wrong.split()]) == 2
        assert "but there are 64 GPUs" in capsys.readouterr().err
