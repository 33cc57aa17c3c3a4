"""Numbers of 8 and 4 bits: which operations get faster, the casts, and the bytes that are kept and sent."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_memory import activations_per_layer
from validation_axes import folding_in_fp8

from three_axes.paper.hardware import DEVICES
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout
from three_axes.plan.cost import constants, step_terms
from three_axes.plan.job import PRECISIONS
from three_axes.plan.memory import stage_memory
from three_axes.plan.op import product
from three_axes.plan.operations import head, layer
from three_axes.plan.traffic import sent

LLAMA, DGX = MODELS["llama-3-8b"], CLUSTERS["dgx-h100"]
JOB = Job(LLAMA, DGX, 64, 8192, FRAMEWORKS["megatron-lm"])
LAYOUT = Layout(dp=4, tp=2, zero=1)
NARROW = [name for name in PRECISIONS if name != "bf16"]
BLACKWELL = replace(JOB, cluster=CLUSTERS["dgx-b200"])


@pytest.mark.parametrize("name", NARROW)
def test_only_products_run_at_the_narrow_rate(name):
    job, at = replace(BLACKWELL, precision=name), PRECISIONS[name]
    rates = {op.part: op.rate for op in layer(job, LAYOUT) if op.flops}
    assert rates == {"matrices": at.rate, "attention": "bf16"}
    assert {op.rate for op in head(job, LAYOUT)} == {"bf16"}
    wide, narrow = step_terms(BLACKWELL, LAYOUT), step_terms(job, LAYOUT)
    assert narrow["attention"] == wide["attention"] and narrow["elementwise"] == wide["elementwise"]
    gpu = job.cluster.device
    faster = wide["matrices"] / narrow["matrices"]
    assert 0.8 * gpu.rate(at.rate) / gpu.achievable < faster < 1.1 * gpu.rate(at.rate) / gpu.achievable
    total = lambda terms: float(sum(terms.values()))
    assert 1 < total(wide) / total(narrow) < faster  # what is not narrow, and the casts, cost the rest


def test_casts_by_hand():
    """Forward casts four inputs (of q, k, v; of gate, up). Backward casts all outputs' gradients."""
    job = replace(JOB, precision="fp8")
    h, q, kv, f, tokens = 4096, 4096, 1024, 14336, 8192
    lines = [op for op in layer(job, Layout()) if op.part == "casts"]
    casts = {phase: sum(op.streamed for op in lines if op.phase == phase) for phase in "FI"}
    assert casts["F"] == 4 * tokens * (h + q + h + f)
    assert casts["I"] == 4 * tokens * (q + 2 * kv + h + 2 * f + h)
    c = constants()
    per_layer = (casts["F"] + casts["I"]) / (3.35e12 * c.memory_efficiency)
    assert step_terms(job, Layout())["casts"] == pytest.approx(64 * 32 * per_layer)


def test_inputs_are_kept_and_gathered_in_a_byte():
    wide, narrow = (activations_per_layer(replace(JOB, precision=p), Layout()) for p in ("bf16", "fp8"))
    x, inside = 2 * 8192 * 4096, 2 * 8192 * 14336
    assert narrow["queries"] == wide["queries"] / 2 == x / 2 and narrow["down"] == inside / 2
    # The attention keeps its half-precision result as well as the narrow copy.
    assert narrow["attention's output"] == 1.5 * x and narrow["attention"] == wide["attention"]
    # A layer has ten gathers and scatters; the four gathers of inputs have half the bytes.
    split = Layout(tp=8)
    ratio = sent(replace(JOB, precision="fp8"), split)["tp"] / sent(JOB, split)["tp"]
    assert ratio == pytest.approx(0.8, rel=0.01)


def test_a_device_without_the_rate_is_refused():
    with pytest.raises(ValueError, match="a100-80gb has no rate for fp8 here; take bf16"):
        Job(LLAMA, CLUSTERS["dgx-a100"], 8, 4096, precision="fp8")
    with pytest.raises(ValueError, match="h100-80gb has no rate for nvfp4"):
        replace(JOB, precision="nvfp4")
    with pytest.raises(ValueError, match="unknown precision 'fp9'; known are bf16, fp8"):
        replace(JOB, precision="fp9")
    for device in DEVICES.values():
        assert device.achievable_fp8 <= device.fp8 and device.achievable_fp4 <= device.fp4


def test_the_gain_of_fp8_is_near_the_printed_one():
    """FP8's gain for Mixtral 8x22B on 128 H100 is a tenth more than printed, as the manual says."""
    gains = folding_in_fp8()
    (ours, printed), (folded, printed_folded) = gains.values()
    manual = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert f"{ours:.2f} times faster than in bfloat16 and {folded:.2f} times with folding" in manual
    assert f"the paper prints {printed:.2f} and {printed_folded:.2f}" in manual


# groups, rows of each, n, k, TFLOP/s: products of DeepGEMM's README (February 2025), an H800 in FP8.
DEEPGEMM = """1 4096 24576 1536 990, 1 4096 32768 512 590, 1 4096 7168 16384 1358, 1 4096 4096 7168 1304,
    1 4096 7168 2048 1025, 4 8192 4096 7168 1297, 4 8192 7168 2048 1099, 8 4096 4096 7168 1288,
    8 4096 7168 2048 1093"""


def test_short_products_reach_less():
    """One rate and the bytes of each product predict all measured products, the shortest and the longest."""
    rate, bandwidth = 1585e12, 0.95 * 3.35e12
    for row in DEEPGEMM.split(","):
        groups, rows, n, k, reached = map(int, row.split())
        forward, *_ = product("", rows, k, n, bytes_=1.0)
        seconds = groups * (forward.flops / rate + forward.streamed / bandwidth)
        assert 2e-12 * groups * rows * n * k / seconds == pytest.approx(reached, rel=0.04)


def test_narrow_copies_of_weights():
    """Transformer Engine keeps two narrow copies beside the weights, and none if the weights are narrow."""
    extra = lambda job: stage_memory(job, LAYOUT, 0).get("narrow weights", 0.0)
    matrices = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336) / 2
    assert extra(JOB) == 0 and extra(replace(JOB, precision="fp8")) == 2 * matrices
    assert extra(replace(BLACKWELL, precision="mxfp8")) == pytest.approx(2 * (1 + 1 / 32) * matrices)
    bridge = replace(BLACKWELL, framework=FRAMEWORKS["megatron-bridge"])
    assert extra(replace(bridge, precision="mxfp8")) == 0
    assert extra(replace(bridge, precision="nvfp4")) == pytest.approx(2 * (0.5 + 1 / 16) * matrices)
