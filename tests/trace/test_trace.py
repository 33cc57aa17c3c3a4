"""A real model is traced on fake ranks (`three_axes.trace`): its collectives equal the planner's to the byte,
and its memory is the planner's within a few percent.
"""

from dataclasses import replace

import pytest
import torch

from three_axes.plan import MODELS, Layout
from three_axes.plan.data_parallel import synchronisation
from three_axes.plan.memory import stage_memory
from three_axes.plan.traced import traced_job
from three_axes.plan.traffic import calls
from three_axes.trace.run import trace, trace_here

SHORT = replace(MODELS["llama-3-8b"], layers=4)
GPT = replace(MODELS["opt-30b"], layers=3, positions=2048)  # FSDP would pad its 2,050 positions
MIXTRAL, LITE = (replace(MODELS[name], layers=2) for name in ("mixtral-8x7b", "deepseek-v2-lite"))


def slow(*cases: tuple) -> list:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def listed(job, layout) -> list:
    """The planner's calls, which are those of PyTorch before 2.15. Since 2.15 FSDP casts the gradients of
    norms to the type of its own sum before tp sums them, so the calls that sum over tp are made larger.
    """
    made = calls(job, layout)
    if torch.__version__ >= (2, 15) and layout.pp == 1:
        norms = next(op for op in synchronisation(job, layout) if op.name == "gradients of norms")
        wider = norms.sends.calls * norms.sends.payload * (job.framework.holds.gradient_bytes / 2 - 1)
        summed = lambda call: (call.op, call.axis) == ("all_reduce", "tp")
        made = [replace(c, payload=c.payload + wider) if summed(c) else c for c in made]
    return made


def is_the_theory(traced) -> bool:
    """Whether the memory is the planner's: 4 bytes of weight (master copy), 4 of gradient, 8 of optimizer."""
    paper = stage_memory(traced_job(traced.model, traced.seq_len, traced.layout), traced.layout, 0, 0)
    for kind in ("weights", "gradients", "optimizer"):
        assert traced.memory[kind] == pytest.approx(paper[kind], rel=0.001), kind
    return traced.peak == pytest.approx(sum(paper.values()), rel=0.05)


FULL = dict(zero=3, recompute="full")
WHOLE = dict(zero=3, sequence_parallel=False)


@pytest.mark.parametrize(
    "model, layout, seq_len, plan, gradient_bytes",
    [
        (SHORT, Layout(dp=8, tp=8, zero=3), 4096, "Megatron's", 4),
        (SHORT, Layout(dp=8, tp=8, **WHOLE), 4096, "Megatron's", 4),
        (SHORT, Layout(dp=8, tp=8, **WHOLE), 4096, "usual", 4),
        (SHORT, Layout(dp=16, tp=4, zero=3), 2048, "Megatron's", 2),
        (GPT, Layout(dp=8, tp=4, zero=3), 2048, "Megatron's", 4),
        # Mixtral and DeepSeek-V2-Lite, built of PyTorch's own parts: FSDP2 over dp and edp, all-to-alls over
        # ep.
        (MIXTRAL, Layout(dp=8, ep=4, zero=3), 512, "Megatron's", 4),
        (LITE, Layout(dp=8, ep=4, zero=3), 512, "Megatron's", 4),  # a dense layer, shared experts
        *slow(
            (SHORT, Layout(dp=16, tp=4, microbatch=2, zero=3), 2048, "Megatron's", 4),
            (SHORT, Layout(dp=8, tp=2, **FULL), 4096, "Megatron's", 4),
            (SHORT, Layout(dp=8, tp=2, **FULL, sequence_parallel=False), 4096, "usual", 4),
            (SHORT, Layout(dp=64, tp=1, **WHOLE), 4096, "Megatron's", 4),
            (SHORT, Layout(dp=1, tp=8, zero=3), 4096, "Megatron's", 4),
            (GPT, Layout(dp=4, tp=8, **WHOLE), 2048, "usual", 4),
            (MIXTRAL, Layout(dp=8, ep=2, microbatch=2, zero=3), 512, "Megatron's", 4),
            (LITE, Layout(dp=16, ep=8, zero=3), 512, "Megatron's", 4),
            # On more ranks than it has experts, FSDP pads the router's rows.
            (MODELS["mixtral-8x7b"], Layout(dp=8, ep=4, zero=3), 512, "Megatron's", 4),
            (MODELS["deepseek-v2-lite"], Layout(dp=64, ep=8, zero=3), 512, "Megatron's", 4),
        ),
    ],
    ids=str,
)
def test_collectives_are_the_formulas_to_the_byte(aside, model, layout, seq_len, plan, gradient_bytes):
    traced = aside(trace_here, model, layout, seq_len, plan, gradient_bytes)
    assert traced.params == model.params
    job = traced_job(model, seq_len, layout, plan, gradient_bytes=gradient_bytes)
    assert traced.calls == listed(job, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(dp=4, tp=8, pp=2, zero=3), Layout(dp=4, tp=4, pp=4, **WHOLE, recompute="full")], ids=str
)
def test_a_first_stage_sends_what_the_formulas_say(layout):
    """In another process: PyTorch caches plans for equal meshes, which name groups that are gone."""
    traced = trace(SHORT, layout, seq_len=4096)
    assert traced.calls == listed(traced_job(SHORT, 4096, layout), layout)


def test_the_process_of_a_trace_has_this_ones_import_path(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(2, b'found')\nos._exit(1)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="the trace failed: found"):
        trace(SHORT, Layout(dp=8, tp=8, zero=3), seq_len=4096)


OTHERS = Layout(dp=8, tp=8, **WHOLE), Layout(dp=16, tp=4, zero=3, microbatch=2), Layout(dp=8, tp=8, **FULL)


@pytest.mark.parametrize("layout", [Layout(dp=8, tp=8, zero=3), *slow(*zip(OTHERS))], ids=str)
def test_memory_is_the_theorys(aside, layout):
    model = replace(MODELS["llama-3-8b"], layers=16)
    assert is_the_theory(aside(trace_here, model, layout, 8192, "Megatron's"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, seq_len, recompute",
    [
        ("llama-2-13b", 1024, "full"),  # the peak is in a layer's backward
        ("llama-2-13b", 1024, "none"),
        ("llama-3-8b", 2048, "none"),  # the peak is in the loss
        ("llama-3-8b", 8192, "full"),
    ],
)
def test_fsdp_is_at_its_fullest_in_the_loss_or_in_a_layers_backward(aside, name, seq_len, recompute):
    layout = Layout(dp=32, zero=3, recompute=recompute)
    traced = aside(trace_here, MODELS[name], layout, seq_len, "Megatron's")
    paper = stage_memory(traced_job(MODELS[name], seq_len, layout), layout, 0, 0)
    assert traced.peak == pytest.approx(sum(paper.values()), rel=0.02)


@pytest.mark.slow
def test_the_first_stage_of_a_pipeline_holds_what_the_theory_says():
    layout = Layout(dp=4, tp=8, pp=2, zero=3)
    traced = trace(MODELS["llama-3-70b"], layout, seq_len=8192)
    assert traced.calls == listed(traced_job(traced.model, 8192, layout), layout)
    assert is_the_theory(traced)


@pytest.mark.slow
def test_the_70b_on_a_laptop():
    model, layout = MODELS["llama-3-70b"], Layout(dp=8, tp=8, zero=3)
    traced = trace(model, layout, seq_len=8192)
    assert traced.params == 70_553_706_496 and traced.calls == listed(traced_job(model, 8192, layout), layout)
    assert is_the_theory(traced) and traced.resident < 800e6
    states = sum(traced.memory[kind] for kind in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(16 * model.params / 64, rel=0.001)


@pytest.mark.parametrize(
    "layout, how, sentence",
    [
        (Layout(dp=4, tp=8, pp=2, zero=3, schedule="interleaved", interleave=2), {}, "zero 3 and 2 chunks"),
        (Layout(dp=8, tp=8, zero=1), {}, "not zero 1 and 1 chunks"),
        (Layout(dp=4, tp=16, zero=3), {}, "tp 16 must divide 8 key/value heads"),
        (Layout(dp=8, tp=8, zero=3), {"plan": "usual"}, "the usual one goes without sequence parallelism"),
        (Layout(dp=8, tp=8, zero=3), {"plan": "mine"}, "plans are"),
        (Layout(dp=8, ep=8, zero=3), {"model": MIXTRAL}, "ep below dp, so that experts have replicas"),
        (Layout(dp=4, tp=2, ep=4, zero=3), {"model": MIXTRAL}, "tp, pp, cp and etp 1"),
        (Layout(dp=8, tp=8, zero=3), {"seq_len": 1001}, "must divide the sequence of 1001 tokens"),
    ],
)
def test_a_layout_that_cannot_be_traced_is_refused(layout, how, sentence):
    with pytest.raises(ValueError, match=sentence):
        trace(**{"model": SHORT, "layout": layout, "seq_len": 1024} | how)


def test_an_older_pytorch_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr("three_axes.trace.run.version", lambda name: "2.10.0+cpu")
    with pytest.raises(ValueError, match="a trace needs PyTorch 2.11 or newer, .*; this is 2.10.0"):
        trace(SHORT, Layout(dp=4, zero=3), seq_len=1024)


@pytest.mark.slow
def test_experts_of_every_second_layer_are_built_there():
    """Llama 4 Maverick has experts in every second layer, so half as many all-to-alls."""
    model, layout = replace(MIXTRAL, layers=4), Layout(dp=8, ep=4, zero=3)
    models = (replace(model, experts=replace(model.experts, every=every)) for every in (1, 2))
    all_of_them, half = (trace(one, layout, seq_len=256).count("all_to_all", "ep") for one in models)
    assert all_of_them == 2 * half > 0
