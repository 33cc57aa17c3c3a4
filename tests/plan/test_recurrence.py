"""Mamba-2 and gated delta networks in place of attention, and layers of several kinds."""

from dataclasses import replace

import pytest

from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout, estimate, plan
from three_axes.plan.cost import step_terms
from three_axes.plan.memory import kept, stage_params
from three_axes.plan.operations import layer
from three_axes.plan.possible import check
from three_axes.plan.shape import Recurrent
from three_axes.plan.stages import kinds_on_rank

NANO, SUPER, NEXT = (MODELS[n] for n in ("nemotron-3-nano", "nemotron-3-super", "qwen3-next-80b-a3b"))
H_8B, H_56B = MODELS["nemotron-h-8b"], MODELS["nemotron-h-56b"]
MEGATRON = FRAMEWORKS["megatron-lm"]


@pytest.mark.parametrize(
    "model, printed",
    [(H_8B, 8.1e9), (H_56B, 56.3e9), (NANO, 31.6e9), (NEXT, 79.7e9)],
    ids=lambda given: getattr(given, "name", ""),
)
def test_sizes_are_those_printed(model, printed):
    """In the reports of Nemotron-H and Nemotron 3 Nano; "80B" with Qwen3-Next's module for a token."""
    assert model.params == pytest.approx(printed, rel=0.002)


def test_flops_are_those_that_nvidia_divides_by():
    """22.28 GFLOPs a token at 8,192 tokens (849 TFLOP/s of 38,102 tokens/s: Megatron Bridge 26.04). Within
    0.1 %, if a Mamba-2 is taken for twice as wide as the model, 84 heads; Nemotron's has 64.
    """
    wider = tuple(
        (replace(kind, recurrent=replace(kind.recurrent, heads=84)) if kind.recurrent else kind, count)
        for kind, count in NANO.others
    )
    counted = replace(NANO, others=wider).flops_per_token(8192, causal=True)
    assert counted == pytest.approx(849e12 / 38_102, rel=0.001)
    assert NANO.flops_per_token(8192, causal=True) == pytest.approx(20.80e9, rel=0.001)


@pytest.mark.parametrize("model", [H_8B, NEXT], ids=lambda model: model.name)
def test_a_recurrence_does_and_keeps_what_its_sizes_say(model):
    """A layer's products are 2 FLOPs a parameter and token, its chunks those of `Recurrent`. Over four ranks
    each does and keeps a quarter, and sends what it would of an attention.
    """
    kind = next(kind for kind, _ in model.kinds if kind.recurrent)
    job, tokens, r = Job(model, CLUSTERS["dgx-h100"], 8, 4096), 4096, kind.recurrent
    alone, split = (
        {(op.name, op.phase): op for op in layer(job, Layout(tp=t), kind) if op.phase in "FI"} for t in (1, 4)
    )
    products = ("into the recurrence", "attention's output")
    assert sum(alone[name, "F"].flops for name in products) == 2 * tokens * kind.attention_params
    assert alone["recurrence", "F"].flops == tokens * r.flops
    for phase in "FI":
        one, part = alone["recurrence", phase], split["recurrence", phase]
        assert (part.flops, part.streamed, part.saved) == (one.flops / 4, one.streamed / 4, one.saved / 4)
    payloads = lambda shape: sum(
        op.calls * op.payload for op in layer(job, Layout(tp=4), shape) if op.axis == "tp"
    )
    assert payloads(kind) == payloads(replace(kind, recurrent=None))


def test_a_gated_delta_network_has_two_gates():
    """Qwen3-Next's sizes: 12,288 columns of queries, keys, values and gates; 64 of two numbers a head."""
    kind = next(kind for kind, _ in NEXT.kinds if kind.recurrent)
    assert kind.recurrent.width == 12_288 + 64
    assert kind.recurrent.mixed == 8192 and kind.recurrent.inner == 4096


def test_kinds_lie_mixed_and_each_parameter_once():
    for model, stages, each in ((NEXT, 4, [9, 3]), (H_8B, 4, [6, 1, 6]), (H_56B, 2, [27, 5, 27])):
        layout = Layout(pp=stages)
        assert [[int(n) for _, n in kinds_on_rank(model, layout, r)] for r in range(stages)] == [
            each
        ] * stages
        held = sum(stage_params(model, layout, r) for r in range(stages))
        assert held == pytest.approx(model.params)
    spread = Layout(dp=8, ep=8)
    routed = 48 * 512 * NEXT.expert_params
    assert stage_params(NEXT, spread, 0) == pytest.approx(NEXT.params - routed * 7 / 8)


def test_a_layer_of_one_part_keeps_less_than_one_of_both():
    job = Job(H_8B, CLUSTERS["dgx-h100"], 8, 4096)
    whole = sum(kept(layer(job, Layout(), replace(H_8B, part="both", others=())), "none").values())
    mixer, forward = (
        sum(kept(layer(job, Layout(), replace(H_8B, part=part, others=())), "none").values())
        for part in ("mixer", "feed-forward")
    )
    assert mixer + forward == pytest.approx(whole)


@pytest.mark.parametrize(
    "cluster, b, printed", [("gb300-nvl72", 4, 38_102), ("gb200-nvl72", 2, 32_727), ("dgx-b300", 4, 35_282)]
)
def test_published_runs_of_nemotron_3_nano(cluster, b, printed):
    """Tokens/s/GPU on 8 GPUs in MXFP8 (Megatron Bridge, docs/performance-summary.md, 26.04). One number
    was read from these three, the speed of the chunks: what is tested is that it serves all of them.
    """
    job = Job(NANO, CLUSTERS[cluster], 512, 8192, MEGATRON, "mxfp8")
    seconds = sum(float(part) for part in step_terms(job, Layout(dp=8, ep=8, microbatch=b, zero=1)).values())
    assert 512 * 8192 / 8 / seconds == pytest.approx(printed, rel=0.2)


def test_latent_experts_send_and_hold_their_part():
    """Nemotron 3 Super: an expert sees 1,024 of 4,096 numbers, so the all-to-alls send a quarter. The two
    matrices to them and back are on each tensor-parallel rank, 2 FLOPs a parameter and token of its own.
    """
    whole = replace(SUPER, experts=replace(SUPER.experts, latent=0))
    layout, lines = Layout(dp=8, tp=2, ep=8), {}
    for model in (SUPER, whole):
        job = Job(model, CLUSTERS["dgx-h100"], 8, 4096)
        lines[model] = {(op.name, op.phase): op for op in layer(job, layout, model)}
    latent, usual = lines[SUPER], lines[whole]
    assert latent["dispatch", "F"].payload == usual["dispatch", "F"].payload / 4
    assert latent["experts, up", "F"].flops == usual["experts, up", "F"].flops / 4
    assert latent["into experts", "F"].flops == 2 * (4096 / 2) * 4096 * 1024
    assert latent["out of experts", "W"].flops == latent["into experts", "W"].flops
    assert SUPER.expert_params == 2 * 1024 * 2688 == whole.expert_params / 4
    assert (
        SUPER.whole_params - whole.whole_params
        == SUPER.shared_params - whole.shared_params
        == 2 * 4096 * 1024
    )


def test_what_cannot_be_is_refused():
    for model, layout, sentence in (
        (H_56B, Layout(dp=4, pp=5), "54 and 10 and 54 layers of its kinds, and 5 stages .* take 2 stages"),
        (H_8B, Layout(tp=16), "tp 16 does not divide 8 groups of a recurrence"),
        (H_8B, Layout(cp=2), "cp 2: a recurrence over parts of a sequence is not priced here"),
    ):
        with pytest.raises(ValueError, match=sentence):
            check(model, layout, seq_len=4096)
    with pytest.raises(ValueError, match="recurrence: state must be a whole number of at least 1, not 0"):
        Recurrent(64, 64, 0, 8)


def test_a_plan_says_what_its_interval_does_not_know():
    for model, gpus in ((H_56B, 64), (NEXT, 64), (NANO, 32)):
        job = Job(model, CLUSTERS["dgx-h100"], 128, 4096)
        text = estimate(job, plan(job, gpus=gpus).best.layout).text()
        assert "recurrent: no model with recurrent layers is among the runs of the interval" in text
