"""The planner on models with experts: groups, bytes, FLOPs, memory, and published runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_memory import activations_per_layer
from validation_axes import folding, memory_of_deepseek_v3

from three_axes.files import rows_of
from three_axes.paper.collectives import all_to_all_seconds
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout, estimate, plan
from three_axes.plan.cost import constants, seconds_of, step_terms, work
from three_axes.plan.flags import flags
from three_axes.plan.memory import kept, largest_stage, stage_memory, stage_params, states
from three_axes.plan.operations import head, layer, lists
from three_axes.plan.possible import check
from three_axes.plan.shape import Experts
from three_axes.plan.stages import kinds_on_rank, layers_on_rank
from three_axes.plan.traffic import calls, sent

DGX, MEGATRON = CLUSTERS["dgx-h100"], FRAMEWORKS["megatron-lm"]
MIXTRAL, V3 = MODELS["mixtral-8x7b"], MODELS["deepseek-v3"]
total = lambda terms: float(sum(terms.values()))


def test_bytes_of_dispatch_and_combine():
    """Two of four all-to-alls are in forward. Each has T·k·h numbers; (ep - 1)/ep of them leave the rank."""
    job = Job(MIXTRAL, DGX, 64, 4096, MEGATRON)
    layout = Layout(dp=8, ep=8, zero=1)
    one = 2 * 4096 * 2 * 4096
    assert sent(job, layout)["ep"] == pytest.approx(4 * 7 / 8 * one * 8 * 32)
    again = sent(job, replace(layout, recompute="full"))["ep"]
    assert again == pytest.approx(1.5 * sent(job, layout)["ep"])
    # With tp, each rank sends the copies of its own tokens. The ranks of a split expert gather these copies
    # and scatter the sums.
    split = Layout(dp=4, tp=2, ep=4, etp=2, zero=1)
    by_axis = {(c.op, c.axis): c for c in calls(job, split)}
    assert by_axis["all_to_all", "ep"].payload == pytest.approx(4 * one / 2 * 16 * 32)
    assert by_axis["all_gather", "etp"].payload == pytest.approx(2 * one * 16 * 32)


def test_gradients_of_experts_go_along_their_own_replicas():
    job = Job(MIXTRAL, DGX, 64, 4096, FRAMEWORKS["textbook"])
    routed = 32 * 8 * MIXTRAL.expert_params
    own = MIXTRAL.params - routed
    everyone, spread = sent(job, Layout(dp=8)), sent(job, Layout(dp=8, ep=4))
    assert everyone["dp"] == pytest.approx(7 / 8 * 4 * own)
    assert everyone["edp"] == pytest.approx(7 / 8 * 4 * routed)
    assert spread["dp"] == everyone["dp"] and spread["edp"] == pytest.approx(1 / 2 * 4 * routed / 4)
    assert "edp" not in sent(job, Layout(dp=8, ep=8))


def test_states_of_experts_are_shared_out_over_their_own_replicas():
    """DeepSeek-V3 on 64 ranks, ep 16: ZeRO shards an expert's state over 4 ranks, all other state over 64."""
    layout, n = Layout(dp=64, ep=16, zero=1), 58 * 256 * V3.expert_params
    held = stage_memory(Job(V3, DGX, 64, 4096), layout, 0, 0)
    expected = states(V3.params - n, 64, 1)["optimizer"] + states(n / 16, 4, 1)["optimizer"]
    assert held["optimizer"] == pytest.approx(expected)
    assert stage_params(V3, layout, 0) == pytest.approx(V3.params - n + n / 16)


def test_a_shard_has_all_experts():
    """Mixtral, FSDP over 8 of 16 ranks, ep 4: experts are split in two, and summed over two groups."""
    job, n = Job(MIXTRAL, DGX, 16, 4096, FRAMEWORKS["torchtitan"]), 32 * 8 * MIXTRAL.expert_params / 4
    layout = Layout(dp=16, ep=4, zero=3, shard=8)
    bytes_along = sent(job, layout)
    assert bytes_along["ereplicate"] == pytest.approx(2 * 1 / 2 * 4 * n / 2)
    assert bytes_along["eshard"] == pytest.approx(1 / 2 * (2 * 2 + 4) * n)
    assert layout.reach("eshard", 8) == (2, 1) and layout.reach("ereplicate", 8) == (1, 2)
    held = lambda layout: sum(stage_memory(job, layout, 0, 0).values())
    assert held(replace(layout, shard=0)) < held(layout) < held(replace(layout, shard=4))
    everyone = replace(layout, shard=16)
    assert held(everyone) == held(replace(layout, shard=0))
    assert total(step_terms(job, everyone)) == total(step_terms(job, replace(layout, shard=0)))
    # Experts are spread over tp as well: the 2 · 4 ranks of an FSDP group hold the eight experts.
    beside = Layout(dp=8, tp=2, ep=8, zero=3, shard=4)
    assert beside.expert_shards == 1 and beside.members("ereplicate") == 2
    rows = plan(job, gpus=32, shard=8).ranked
    assert any(row.layout.shard == 8 and row.layout.ep > 1 for row in rows)
    for row in rows:
        job.check(row.layout, 32)
    assert rows[0].seconds == pytest.approx(estimate(job, rows[0].layout).step_seconds)
    with pytest.raises(ValueError, match="each shard has all experts; take 4 for ep·etp"):
        job.check(Layout(dp=16, ep=8, zero=3, shard=4))


def test_many_thin_experts_cost_what_a_wide_part_does():
    """k experts of width f/k that all tokens visit have a dense layer's FLOPs, but for half-empty tiles."""
    dense = MODELS["llama-3-8b"]
    many = replace(dense, experts=Experts(4, 4, dense.ffn // 4))
    flops = lambda model: sum(
        op.flops for op in layer(Job(model, DGX, 8, 4096), Layout()) if op.part in ("matrices", "experts")
    )
    router = 6 * 4096 * dense.hidden * 4
    tiles = 3 * 2 * 64 * 4 * 3 * dense.hidden * dense.ffn // 4
    assert flops(many) == pytest.approx(flops(dense) + router + tiles)


def test_dense_layers_and_expert_layers_are_on_the_right_stages():
    layout = Layout(dp=8, pp=16, ep=8)
    assert [int(layers_on_rank(V3, layout, r)) for r in range(16)] == [4] * 15 + [1]
    assert [int(c) for _, c in kinds_on_rank(V3, layout, 0)] == [3, 1]
    assert [int(c) for _, c in kinds_on_rank(V3, layout, 1)] == [0, 4]
    chunked = Layout(pp=4, interleave=8, schedule="interleaved")  # two layers a stage
    kinds = [[int(c) for _, c in kinds_on_rank(V3, chunked, r)] for r in range(4)]
    assert [k[0] for k in kinds] == [2, 1, 0, 0] and [sum(k) for k in kinds] == [16, 16, 15 + 0, 14]
    assert sum(stage_params(V3, layout, r) for r in range(16)) == pytest.approx(
        V3.params - 58 * 256 * V3.expert_params * 7 / 8
    )


def test_experts_in_every_second_layer():
    """Llama 4 Maverick's expert layers are spread evenly over a pipeline, and each parameter is held once."""
    maverick = MODELS["llama-4-maverick"]
    chunked = Layout(dp=8, pp=4, ep=8, interleave=3, schedule="interleaved")  # four layers a chunk
    assert [[int(c) for _, c in kinds_on_rank(maverick, chunked, r)] for r in range(4)] == [[6, 6]] * 4
    held = sum(stage_params(maverick, chunked, r) for r in range(4))
    assert held == pytest.approx(maverick.params - 24 * 128 * maverick.expert_params * 7 / 8)
    # A stage with twice as many dense and routed layers takes twice as long.
    job = Job(maverick, DGX, 64, 8192, MEGATRON.but(launch_seconds=0.0))
    deep, short = (step_terms(job, Layout(dp=8, pp=p, ep=8)) for p in (4, 8))
    assert deep["experts"] == pytest.approx(2 * short["experts"])
    assert deep["matrices"] == pytest.approx(2 * short["matrices"])
    sentence = "24 and 24 layers of its kinds, and 16 stages .* take 12 or 24 stages"
    with pytest.raises(ValueError, match=sentence):
        check(maverick, Layout(dp=8, pp=16, ep=8))
    assert maverick.attended(8192) == 8192  # the attention's chunk is the whole sequence
    assert maverick.attended(32768) == (36 * 8192 + 12 * 32768) / 48


def test_a_module_for_a_further_token():
    """DeepSeek-V3's module is one more layer and one more head, on the last stage. NVIDIA prints model FLOP/s
    and tokens/s with the module and without it (Megatron Bridge, 26.08 and 25.11), which gives 260.0 and
    249.7 GFLOPs for a token.
    """
    more = replace(V3, mtp=1)
    for model, printed in ((more, 260.0e9), (V3, 249.7e9)):
        assert model.flops_per_token(4096, causal=True) == pytest.approx(printed, rel=0.004)
    layout = Layout(dp=16, pp=16, ep=8, zero=1)
    assert [int(layers_on_rank(more, layout, r)) for r in range(16)] == [4] * 15 + [2]
    # The model's card counts 14B for the module. That includes the embedding and the head, which the module
    # shares with the model.
    held = stage_params(more, Layout(dp=16, pp=16), 15) - stage_params(V3, Layout(dp=16, pp=16), 15)
    assert held + more.vocab * more.hidden == pytest.approx(14e9, rel=0.05)
    plain, with_it = (Job(model, DGX, 256, 4096, MEGATRON) for model in (V3, more))
    ops = [sum(op.flops for op in head(job, layout)) for job in (plain, with_it)]
    assert ops[1] == pytest.approx(2 * ops[0] + 6 * 4096 * 2 * more.hidden**2)
    scores = [stage_memory(job, layout, 15, 0)["logits"] for job in (plain, with_it)]
    assert scores[1] - scores[0] == 4 * 4096 * more.vocab
    away = lambda job, stage: sum(sent(job, layout, stage).values())
    assert away(with_it, 0) == away(plain, 0) and away(with_it, 15) > away(plain, 15)


@pytest.mark.parametrize(
    "model, layout, sentence",
    [
        ("llama-3-8b", dict(ep=2, dp=2), "llama-3-8b has no experts to spread over ep 2 and etp 1"),
        ("mixtral-8x7b", dict(ep=3, dp=3), "ep 3 does not divide 8 experts; take 2 or 4"),
        ("mixtral-8x7b", dict(ep=8, dp=4), "ep·etp = 8·1 does not divide dp·cp·tp = 4.* take 4 for ep"),
        ("mixtral-8x7b", dict(dp=8, etp=3), "etp 3 does not divide an expert's width 14336; take 2 or 4"),
        ("mixtral-8x7b", dict(dp=2, tp=2, sequence_parallel=False), "beside tp need sequence parallelism"),
        ("mixtral-8x7b", dict(dp=4, pp=2, ep=4, order=("dp", "pp", "tp")), "fold with the order pp dp tp"),
        ("deepseek-v2-lite", dict(tp=32), "tp 32 does not divide 16 attention heads"),
    ],
)
def test_refusals_of_foldings(model, layout, sentence):
    with pytest.raises(ValueError, match=sentence):
        check(MODELS[model], Layout(**layout))


def test_an_all_to_all_goes_through_link_and_port_at_once():
    """Seconds are near those of NVIDIA 2026, Table 7, also if a token is sent once to each node."""
    payload = 2 * 4096 * 8 * 7168
    assert all_to_all_seconds(payload, 1, 1, DGX) == 0  # one rank sends nothing
    for r in rows_of("megatron_core_moe_2026_table7.csv"):
        for cluster, system in ((DGX, "h100"), (CLUSTERS["gb200-nvl72"], "gb200")):
            inside = min(int(r["ep"]), cluster.gpus_per_node)
            nodes = int(r["ep"]) // inside
            ours = 1e6 * all_to_all_seconds(payload, inside, nodes, cluster)
            assert ours == pytest.approx(float(r[f"{system}_all_to_all_us"]), rel=0.11)
            # NVIDIA's runs send a token to four nodes at most; this limit is not counted here.
            copies = tuple(n / 8 * (1 - (1 - 1 / n) ** 8) for n in (inside * nodes, nodes))
            once = 1e6 * all_to_all_seconds(payload, inside, nodes, cluster, copies=copies)
            assert 0.8 < once / float(r[f"{system}_hybridep_us"]) < 1.5


def test_a_token_goes_once_to_a_rank_and_to_a_node():
    """Of the bytes of two copies, sending once to each rank takes 15/16, and once to each node 3/4."""
    cluster, layout, c = replace(DGX, gpus_per_node=4), Layout(dp=8, ep=8), constants()
    job = Job(MIXTRAL, cluster, 64, 4096, MEGATRON.but(once_a_node=True))
    dispatch = next(op for op in layer(job, layout) if op.name == "dispatch")
    shares = c.intra_node_efficiency, c.inter_node_efficiency
    by_hand = all_to_all_seconds(dispatch.sends.payload, 4, 2, cluster, *shares, copies=(15 / 16, 3 / 4))
    assert float(seconds_of(dispatch, job, layout, c)) == pytest.approx(float(by_hand))


def test_published_strategies_are_ranked_in_the_right_order():
    manual = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    by_model = {}
    for r, job, layout, seconds in folding():
        if r["mfu_pct"] != "OOM":
            by_model.setdefault(r["model"], []).append((float(r["mfu_pct"]), 1 / seconds))
        elif r["method"] == "TP + EP + DP":
            assert layout is None  # no layout fits, as published
        else:  # FSDP fills half of a GPU by our count
            held = {name: f"{size / 1e9:.0f}" for name, size in largest_stage(job, layout)[1].items()}
            told = (
                "{optimizer} GB of optimizer, {gradients} of gradients, {weights} of weights, {activations}"
            )
            assert told.format(**held) in manual
    for model, pairs in by_model.items():
        ranks = [np.argsort(np.argsort(column)) for column in zip(*pairs)]
        assert np.corrcoef(*ranks)[0, 1] >= 0.899, model


def test_the_memory_of_deepseek_v3_is_the_printed_one():
    for item, (ours, printed) in memory_of_deepseek_v3().items():
        assert ours == pytest.approx(printed, rel=0.006), item


def test_recompute_of_modules_frees_what_was_printed():
    printed = {r["item"]: float(r["gb_per_gpu"]) for r in rows_of("megatron_core_moe_2026_memory.csv")}

    def freed(precision: str) -> dict[str, float]:
        """Operation -> GiB that recompute frees, for 15 chunks of 4 layers."""
        job = Job(V3, DGX, 8192, 4096, MEGATRON, precision)
        ops = lists(job, Layout(dp=64, pp=4, ep=64, interleave=4, schedule="interleaved")).layers[-1]
        none, modules = (kept(ops, policy) for policy in ("none", "modules"))
        return {name: 60 * (size - modules.get(name, 0.0)) / 2**30 for name, size in none.items()}

    wide, narrow = freed("bf16"), freed("fp8-blockwise")  # the activation's result is one byte in FP8
    assert wide["attention"] == pytest.approx(printed["Recompute MLA up-projection"], rel=0.02)
    assert narrow["experts, down"] == pytest.approx(printed["Recompute SwiGLU"], rel=0.03)
    norms = sum(size for name, size in wide.items() if name not in ("attention", "experts, down"))
    assert norms == pytest.approx(printed["Recompute LayerNorm"], rel=0.1)
    job, layout = Job(V3, DGX, 8192, 4096, MEGATRON), Layout(dp=64, ep=64, recompute="modules")
    assert "--recompute-modules layernorm moe_act mla_up_proj" in flags("megatron-lm", job, layout)
    with pytest.raises(ValueError, match="recompute of modules"):
        flags("torchtitan", job, layout)


NUMBER, ROWS = 2 * 4096, 4096 * 4  # bytes of one of Mixtral's tokens; gpt-oss' routed rows
GPT_OSS = Job(MODELS["gpt-oss-120b"], CLUSTERS["dgx-b200"], 64, 4096, FRAMEWORKS["megatron-bridge"])


@pytest.mark.parametrize(
    "job, layout, streamed",
    [
        (  # a rank routes two copies of 2048 tokens, and its four experts get 4096 rows
            Job(MIXTRAL, DGX, 8, 4096),
            Layout(tp=2, ep=2),
            {
                "choice of experts": (4 * 6 * 2048 * 8, 4 * 12 * 2048 * 8),
                "permutation": (NUMBER * (2048 + 4096),) * 2,
                "order by expert": (2 * NUMBER * 4096,) * 2,
                "order by rank": (2 * NUMBER * 4096,) * 2,
                "results put together": (NUMBER * (2048 + 4096),) * 2,
            },
        ),
        *(
            (  # two bytes a number are read and written forward, and twice as many backward
                Job(V3, DGX, 8, 4096),
                Layout(tp=8, sequence_parallel=cut),
                {
                    "norm of queries": (4 * tokens * 1536, 8 * tokens * 1536),
                    "norm of keys and values": (4 * tokens * 512, 8 * tokens * 512),
                    "keys put together": (4 * 4096 * 16 * 192, 8 * 4096 * 16 * 192),
                },
            )
            for cut, tokens in ((False, 4096), (True, 512))
        ),
        (  # the 5,760 results of up are clamped, and the 2,880 results of down get a bias
            GPT_OSS,
            Layout(dp=64, ep=64),
            {
                "clamp": (8 * 5760 * ROWS, 15 * 5760 * ROWS),
                "biases of experts": (12 * 2880 * ROWS, 12 * 2880 * ROWS),
            },
        ),
        # Transformer Engine's op fuser puts the clamp and the bias into the kernels of the products.
        (replace(GPT_OSS, precision="mxfp8"), Layout(dp=64, ep=64), {"clamp": (0, 0)}),
    ],
)
def test_bytes_that_stream_between_the_matrices(job, layout, streamed):
    lines = {(op.name, op.phase): op.streamed for op in layer(job, layout)}
    for name, (forward, backward) in streamed.items():
        assert (lines[name, "F"], lines[name, "I"]) == pytest.approx((forward, backward)), name


def test_tensors_that_latent_attention_keeps():
    """DeepSeek-V3's numbers a token."""
    held = activations_per_layer(Job(V3, DGX, 8, 4096), Layout())
    kept = {name: size / (2 * 4096) for name, size in held.items()}
    down, norm, both = ("queries, down", 7168), ("norm of queries", 1536), ("keys and values, down", 512 + 64)
    assert kept.items() >= {down, norm, both, ("queries, up", 1536), ("keys and values, up", 512)}


def test_experts_in_one_kernel_stream_less_and_keep_as_much():
    apart = Job(V3, CLUSTERS["dgx-b200"], 256, 4096, FRAMEWORKS["megatron-bridge"], "mxfp8")
    apart = replace(apart, framework=apart.framework.but(fused_experts=False))
    fused = replace(apart, framework=FRAMEWORKS["megatron-bridge"])
    at = Layout(dp=64, pp=4, ep=64)
    more = lambda of: sum(map(of, layer(apart, at))) - sum(map(of, layer(fused, at)))
    rows, f = 4096 * 8, 2048
    narrowed = (4 + 2 / 32) * rows * (f + 2 * f)  # down's input, up's gradient
    activation = 3 * (3 * 2 * rows * f)  # forward moves three half-precision numbers, backward twice as many
    assert more(lambda op: op.streamed) == pytest.approx(narrowed + activation)
    assert more(lambda op: op.keeps.nbytes) == 0 and more(lambda op: op.kernels) > 0


def test_a_host_that_waits_for_the_router():
    """A layer then takes longer than the host alone and the GPU alone, unless a CUDA graph hides it."""
    job, at = Job(MODELS["qwen3-30b-a3b"], DGX, 16, 4096, MEGATRON), Layout(dp=8, ep=8)
    waits = lambda framework: float(step_terms(replace(job, framework=framework), at)["waiting for the host"])
    made = work(layer(job, at), job, at, constants())
    gpu, host = made.phase("F"), made.host["F"]
    assert max(gpu, host) < made.routed < gpu + host and waits(MEGATRON) > 0
    at_once = MEGATRON.but(launch_seconds=0.0)
    hidden = MEGATRON.but(hides=(*MEGATRON.hides, "dispatch"))
    assert waits(at_once) == 0
    for framework in (at_once, hidden):
        assert work(layer(job, at), replace(job, framework=framework), at, constants()).routed == 0
