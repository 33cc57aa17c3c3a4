"""Each term of the planner's seconds and bytes equals a number computed by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from three_axes.paper import Network
from three_axes.paper.collectives import algorithmic_bytes, gloo, seconds
from three_axes.paper.pipelines import SCHEDULES
from three_axes.paper.simulation import Times, simulate
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Job, Layout, estimate
from three_axes.plan.cost import constants, seconds_of, step_terms, work
from three_axes.plan.data_parallel import synchronisation
from three_axes.plan.frameworks import TEXTBOOK
from three_axes.plan.job import Lora
from three_axes.plan.layout import ORDER
from three_axes.plan.memory import largest_stage, peak_memory, stage_memory, stage_params
from three_axes.plan.operations import embedding, head, layer
from three_axes.plan.traffic import sent

LLAMA, DGX = MODELS["llama-3-8b"], CLUSTERS["dgx-h100"]
N, LAYERS = LLAMA.params, LLAMA.layers * LLAMA.layer_params
REST, D, M = N - LAYERS, 8, 4  # D replicas, M microbatches


@pytest.mark.parametrize(
    "framework, zero, elements",
    [
        ("textbook", 0, 2 * N),
        ("textbook", 1, 2 * N),
        ("textbook", 2, (M + 1) * N),  # gradients in every microbatch
        ("textbook", 3, M * (3 * LAYERS + 2 * REST)),  # embedding and head stay gathered until backward
        ("deepspeed", 1, 3 * N),  # a bucket is all-reduced, and weights come back
        ("deepspeed", 2, (2 * M + 1) * N),
        ("megatron-lm", 1, 3 * N),  # gradients of four bytes: two elements each
        ("torchtitan", 3, M * (4 * LAYERS + 3 * REST)),
        ("transformers", 3, M * (2 * LAYERS + REST) + N),  # gradients of two bytes, once
    ],
)
def test_bytes_of_data_parallelism(framework, zero, elements):
    job = Job(LLAMA, DGX, D * M, 4096, FRAMEWORKS[framework])
    assert sent(job, Layout(dp=D, zero=zero))["dp"] == pytest.approx((D - 1) / D * 2 * elements)


def test_whole_gradients_until_the_last_microbatch():
    """Accelerate's default holds two bytes a parameter on each rank, and sums them: 6 bytes moved for each.
    One microbatch, one rank and the switch know no such gradients. What is held after a step is float32.
    """
    late = FRAMEWORKS["transformers"]
    held = lambda d, m, framework=late: stage_memory(
        Job(LLAMA, DGX, d * m, 4096, framework), Layout(dp=d, zero=3), 0
    )["gradients"]
    assert held(D, M) == 2 * N and held(1, M) == 4 * N
    assert held(D, 1) == held(D, M, late.but(reduces_each=True)) == 4 * N / D
    copied = lambda m: sum(
        op.streamed
        for op in synchronisation(Job(LLAMA, DGX, D * m, 4096, late), Layout(dp=D, zero=3))
        if op.name == "copies"
    )
    weights = 2 * (4 + (4 + 2) / D) * N  # gathered twice: copied out of a buffer, and cast before
    assert copied(M) - copied(1) == pytest.approx((M - 1) * (weights + 6 * N))


def test_one_reduction_takes_less_time_and_hides_under_one_backward_alone():
    slow = replace(DGX, inter_node_bandwidth=5e9)
    job = Job(LLAMA, slow, 64 * M, 4096, FRAMEWORKS["transformers"])
    each = replace(job, framework=job.framework.but(reduces_each=True))
    took = lambda job: float(step_terms(job, Layout(dp=64, zero=3))["data parallel"])
    assert took(job) < took(each)
    one = lambda job: replace(job, global_batch=64)
    assert took(one(job)) == pytest.approx(took(one(each)))


def test_in_a_pipeline_fsdp_gathers_and_reduces_once():
    job = Job(LLAMA, DGX, 64, 4096, FRAMEWORKS["torchtitan"])
    layout = Layout(dp=D, pp=4, zero=3)
    mine = stage_params(LLAMA, layout, 1)
    assert sent(job, layout, 1)["dp"] == pytest.approx((D - 1) / D * (2 + 4) * mine)
    held = stage_memory(job, layout, 1, 0)
    assert held["gathered weights"] == (2 + 4) * mine and held["weights"] == 4 * mine / D


@pytest.mark.parametrize(
    "model, framework, layout, vectors, number",
    [
        ("llama-3-8b", "textbook", Layout(dp=2, tp=4), 2 * 32 + 1, 2),  # two norms a layer, and the last
        ("gpt3-175b", "textbook", Layout(dp=2, tp=4), 2 * (2 * 96 + 1), 2),  # with biases
        ("llama-3-8b", "torchtitan", Layout(dp=2, tp=4, zero=3), 2 * 32 + 1, 2),
        ("llama-3-8b", "torchtitan", Layout(dp=2, tp=4, pp=2, zero=3), 2 * 16, 4),  # a sum over microbatches
        ("llama-3-8b", "textbook", Layout(dp=2, tp=4, sequence_parallel=False), 0, 2),
    ],
)
def test_gradients_of_norms_are_summed_over_tp(model, framework, layout, vectors, number):
    job = Job(MODELS[model], DGX, 8, 4096, FRAMEWORKS[framework])
    (sums,) = [op.sends for op in synchronisation(job, layout) if op.name == "gradients of norms"]
    assert (sums.calls, sums.payload) == (vectors, number * MODELS[model].hidden)


@pytest.mark.parametrize("gradient_bytes, zero, moved", [(2, 0, 2 + 2 * 2), (4, 1, 2 + 2 * 4), (4, 2, 0)])
def test_sums_of_gradients_that_no_product_adds(gradient_bytes, zero, moved):
    """Each microbatch reads its gradient, and reads and writes the sum. ZeRO-2 keeps no sum."""
    framework = TEXTBOOK.but(fused_sums=False, gradient_bytes=gradient_bytes)
    lines = layer(Job(LLAMA, DGX, 8, 4096, framework), Layout(zero=zero))
    (streamed,) = [op.streamed for op in lines if op.name == "sums of gradients"]
    assert streamed == moved * LLAMA.matrix_params


def test_seconds_of_data_parallelism_that_nothing_hides():
    """Each of 32 layers, and the embedding with the head, has its ring over one node. Its seconds are the
    bytes over the link's full speed, and a latency for each hop.
    """
    bare = TEXTBOOK.but(hides=())
    c = constants()._replace(intra_node_efficiency=1.0)
    for zero, rings, bytes_ in (
        (0, 2 * (LLAMA.layers + 1), 4 * N),
        (1, 2 * (LLAMA.layers + 1), 4 * N),
        (2, (M + 1) * (LLAMA.layers + 1), 2 * (M + 1) * N),
    ):
        job = Job(LLAMA, DGX, D * M, 4096, bare)
        took = step_terms(job, Layout(dp=D, zero=zero), c)["data parallel"]
        hops = rings * (D - 1)
        assert float(took) == pytest.approx((D - 1) / D * bytes_ / 450e9 + hops * 5e-6)


def test_a_fifth_of_hidden_communication_is_exposed():
    job = Job(LLAMA, DGX, D * M, 4096)
    open_ = step_terms(replace(job, framework=TEXTBOOK.but(hides=())), Layout(dp=D))["data parallel"]
    assert float(step_terms(job, Layout(dp=D))["data parallel"]) == pytest.approx(0.2 * float(open_))
    # ZeRO-2 reduces in each microbatch, hidden under its backward. Nothing hides the gather of the weights.
    short = replace(job, seq_len=1024)
    jobs = (replace(short, framework=framework) for framework in (TEXTBOOK, TEXTBOOK.but(hides=())))
    some, all_ = (float(step_terms(job, Layout(dp=D, zero=2))["data parallel"]) for job in jobs)
    assert some == pytest.approx((0.2 * M + 1) / (M + 1) * all_)


@pytest.mark.parametrize("v, schedule", [(1, "1F1B"), (4, "interleaved"), (1, "ZB-V")])
def test_messages_of_a_pipeline(v, schedule):
    """Each message takes its latency and the time of its bytes."""
    layout = Layout(dp=2, tp=8, pp=4, interleave=v, schedule=schedule)
    job = Job(LLAMA, DGX, 32, 4096)
    c = constants()._replace(inter_node_efficiency=1.0)
    chunks, m = 2 if schedule == "ZB-V" else v, 16
    one = 15e-6 + 2 * 4096 * LLAMA.hidden / 8 / 50e9
    assert float(step_terms(job, layout, c)["pipeline sends"]) == pytest.approx(2 * (m * chunks + 3) * one)


def test_the_slowest_stage_sets_the_pace():
    job, layout = Job(LLAMA, DGX, 16, 4096), Layout(pp=4)
    one = float(work(layer(job, layout), job, layout, constants()).total)
    last = float(work(head(job, layout), job, layout, constants()).total)
    terms = step_terms(job, layout)
    assert float(terms["head"]) == pytest.approx(16 * last)  # eight layers everywhere, and the head on top
    # The time of the other stages for one microbatch.
    assert float(terms["bubble"]) == pytest.approx(24 * one)
    wide = replace(LLAMA, layers=30)  # 7, 8, 8, 7: the head fits where a layer is missing
    terms = step_terms(replace(job, model=wide), layout)
    assert float(terms["head"]) == pytest.approx(max(0.0, 16 * (last - one)))
    three = replace(job, model=replace(LLAMA, layers=31))  # 10, 11, 10
    matrices = [step_terms(j, at)["matrices"] for j, at in ((three, Layout(pp=3)), (job, layout))]
    assert float(matrices[0] / matrices[1]) == pytest.approx(11 / 8)


def test_a_tied_head_is_copied_to_the_last_stage():
    tied = MODELS["llama-3.2-1b"]
    vocabulary = tied.vocab * tied.hidden
    stages = [stage_params(tied, Layout(pp=2), k) for k in range(2)]
    assert sum(stages) == tied.params + vocabulary and stages[1] - stages[0] == tied.hidden
    for model in (tied, MODELS["gpt3-175b"]):
        assert stage_params(model, Layout(), 0) == model.params


@pytest.mark.parametrize("sp, calls", [(True, [1, 0, 1, 1]), (False, [0, 1, 0, 0])])
def test_collectives_of_the_embedding(sp, calls):
    """Under sequence parallelism the gradients of the embedding and of learned positions are gathered."""
    model = MODELS["gpt3-175b"]
    ops = embedding(Job(model, DGX, 8, 2048), Layout(tp=8, sequence_parallel=sp))
    sent = [op.sends for op in ops]
    assert [one.collective for one in sent] == ["reduce_scatter", "all_reduce", "all_gather", "all_gather"]
    assert [one.calls for one in sent] == calls and {one.payload for one in sent} == {2 * 2048 * model.hidden}


FROZEN = Job(LLAMA, DGX, 32, 4096, FRAMEWORKS["megatron-lm"], lora=Lora(16))
EXPERTS = Job(MODELS["deepseek-v3"], DGX, 64, 4096, FRAMEWORKS["megatron-lm"])


@pytest.mark.parametrize(
    "job, columns, order",
    [
        (
            Job(MODELS["llama-3-70b"], DGX, 128, 8192),
            dict(dp=[8, 4, 2, 4], tp=[8, 8, 4, 4], pp=[1, 2, 8, 1], microbatch=[1, 2, 1, 4], cp=[1, 1, 1, 4])
            | dict(interleave=[1] * 4, zero=[1, 1, 0, 3], sequence_parallel=[True, False, True, True]),
            ORDER,
        ),
        # Where tp is outermost, it leaves the node in one of two layouts with as many ranks along it.
        *(
            (FROZEN, dict(dp=[4, 8, 8, 2], tp=[1, 2, 1, 2], pp=[2, 2, 1, 1], zero=[1] * 4), order)
            for order in (ORDER, ("tp", "pp", "dp"))
        ),
        (
            EXPERTS,
            dict(dp=[8, 4, 16, 2], tp=[1, 2, 1, 4], pp=[4, 2, 4, 4], ep=[4, 8, 2, 8], etp=[1] * 4)
            | dict(cp=[1, 1, 1, 2], zero=[1, 0, 1, 1]),
            ORDER,
        ),
    ],
    ids=["dense", "frozen", "frozen, tp outermost", "experts"],
)
def test_arrays_give_what_numbers_give(job, columns, order):
    many = Layout(**{field: np.array(column) for field, column in columns.items()}, order=order)
    together, held = step_terms(job, many), peak_memory(job, many)
    for i in range(4):
        one = Layout(**{field: column[i] for field, column in columns.items()}, order=order)
        for name, seconds_ in step_terms(job, one).items():
            assert float(np.broadcast_to(together[name], 4)[i]) == pytest.approx(float(seconds_)), name
        assert held[i] == pytest.approx(sum(largest_stage(job, one)[1].values()))


@pytest.mark.parametrize("name, early", [("transformers", True), ("torchtitan", False)])
def test_full_recompute_stops_where_pytorch_does(name, early):
    """A Llama layer has seven products. Its backward has two gradients of each, and the recomputed products:
    PyTorch's checkpoint without reentry stops before the last one (set_checkpoint_early_stop).
    """
    lines = layer(Job(LLAMA, DGX, 8, 4096, FRAMEWORKS[name]), Layout(recompute="full"))
    products = [op for op in lines if op.part == "matrices" and op.flops]
    twice = sum(op.phase == "F" and "full" in op.recomputed for op in products)
    listed = twice + sum(op.phase in "IW" for op in products)
    assert listed == (20 if early else 21)


@pytest.mark.parametrize(
    "model, lora, less",
    [
        (LLAMA, None, 0.067),  # a product of 4,096 · 14,336 of four times 218 million
        (MODELS["gpt2-xl"], None, 0),  # dropout keeps a mask of the product's result
        (replace(LLAMA, norms=4), None, 0),  # a norm follows, and keeps its input
        (MODELS["mixtral-8x7b"], None, 0),  # a router's weights are multiplied with it
        (LLAMA, Lora(8), 0),  # an adapter's products follow
    ],
)
def test_a_last_product_is_computed_again_where_something_behind_it_needs_more(model, lora, less):
    job = Job(model, DGX, 8, 1024, FRAMEWORKS["transformers"], lora=lora)
    whole = replace(job, framework=job.framework.but(whole_recompute=True))
    stops, ends = (estimate(j, Layout(dp=8, zero=3, recompute="full")).time["matrices"] for j in (job, whole))
    assert 1 - stops / ends == pytest.approx(less, abs=0.005)


@pytest.mark.parametrize("order", list(itertools.permutations(ORDER)))
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_and_order_is_slower_with_recompute_and_with_a_slow_network(name, order):
    job = Job(LLAMA, DGX, 64, 4096, FRAMEWORKS[name])
    at = lambda job, **k: estimate(job, Layout(**sizes, order=order, **k)).step_seconds
    axes = job.framework.offers.axes
    sizes = dict(dp=8, tp=4, pp=2) if "tp" in axes else dict(dp=16)
    sizes |= dict(zero=(job.framework.offers.zeros_in_pipeline if "tp" in axes else (3,))[-1])
    slower = replace(DGX, inter_node_bandwidth=25e9, inter_node_latency=30e-6)
    assert 0 < at(job) < at(job, recompute="full") and at(job) <= at(replace(job, cluster=slower))


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-H1", "ZB-H2", "ZB-V"])
@pytest.mark.parametrize("f, i, w", [(1, 1, 1), (1, 3, 0.5), (1, 2, 1), (1, 1.2, 1), (1, 4, 1), (2, 3, 1)])
def test_the_bubble_of_a_record_is_the_simulated_one(name, f, i, w):
    p, m, record = 4, 16, SCHEDULES[name]
    line = simulate(record.make(p, m, 1), Times(*(t / (record.chunks or 1) for t in (f, i, w))))
    others = [(p - 1) * t for t in (f, i, w)]
    assert float(record.bubble(*others, 1)) == pytest.approx(line.makespan - m * (f + i + w))


@pytest.mark.parametrize(
    "model, changed, forward, inputs, weights",
    [
        # Forward has four fused pieces and the activation, 7 products, and the attention. Backward has two
        # kernels for each of these; a product's two are its two gradients.
        ("llama-3-8b", {}, 5 + 7 + 1, 2 * 5 + 7 + 2, 7),
        # A norm has 6 kernels, the positions 10, SiLU and its product 2.
        ("llama-3-8b", {"fused": False}, 2 * 7 + 10 + 2 + 7 + 1, 2 * (2 * 7 + 10 + 2) + 7 + 2, 7),
        # Six products; the attention scales scores, applies softmax and dropout, and has two products.
        ("gpt3-175b", {"fused_attention": False}, 5 + 6 + 5, 2 * 5 + 6 + 2 * 5, 6),
    ],
)
def test_kernels_that_the_host_launches(model, changed, forward, inputs, weights):
    job = Job(MODELS[model], framework=TEXTBOOK.but(launch_seconds=1.0, **changed))
    launches = work(layer(job, Layout()), job, Layout(), constants()).host
    assert (launches["F"], launches["I"], launches["W"]) == (forward, inputs, weights)


def test_collectives_with_a_root_pass_each_rank_once():
    network = Network(name="two nodes", gpus_per_node=4, intra_node_latency=1e-4, inter_node_latency=1e-3)
    broadcast = lambda ranks, size=0: seconds("broadcast", size, ranks, network)
    assert broadcast(range(4)) == pytest.approx(3e-4) and broadcast(range(8)) == pytest.approx(6e-4 + 1e-3)
    assert broadcast(range(4), 3e9) == pytest.approx(3e-4 + 3e9 / 300e9)
    assert algorithmic_bytes("send", 7, 2) == 7
    assert algorithmic_bytes("recv", 7, 2) == algorithmic_bytes("barrier", 7, 2) == 0
    # In gloo's reduce each rank sums a part, and then sends its part to the root.
    assert gloo("reduce", 8, 4, rank=1) == 6 + 2 and gloo("reduce", 8, 4, rank=0) == 6
    apart = seconds("all_to_all", 8e9, range(8), network)  # three parts use the link while four use the port
    assert apart == pytest.approx(4 * 1e9 / 25e9 + 1e-3)
    at_once = seconds("all_to_all", 4e9, range(4), network)
    assert at_once == pytest.approx(3e9 / 300e9 + 1e-4)


def test_the_gradients_of_a_tied_head_are_summed():
    """The first and the last stage each hold the tied matrix, and send its gradient to each other."""
    model = MODELS["gpt3-175b"]
    job = Job(model, DGX, 64, 2048, FRAMEWORKS["megatron-lm"])
    free = replace(job, model=replace(model, tied=False))
    more = lambda layout, k: sent(job, layout, k)["pp"] - sent(free, layout, k)["pp"]
    layout, size = Layout(dp=2, tp=8, pp=4, zero=1), 4 * 50257 * 12288 / 8
    assert [more(layout, k) for k in range(4)] == pytest.approx([size, 0, 0, size])
    assert more(Layout(dp=2, tp=8), 0) == 0 == more(replace(layout, schedule="ZB-V"), 0)  # one rank
    slower = step_terms(job, layout)["data parallel"] - step_terms(free, layout)["data parallel"]
    assert slower > size / DGX.inter_node_bandwidth


@pytest.mark.parametrize(
    ("framework", "cluster", "seq_len", "forward", "backward"),
    [  # TFLOP/s as cudnn-frontend's benchmarks print them, causal, heads of 128 in bfloat16
        ("textbook", "dgx-a100", 4096, 204, 168),
        ("textbook", "dgx-a100", 32768, 199, 180),
        ("textbook", "gb200-nvl72", 8192, 414, 338),
        ("megatron-lm", "gb200-nvl72", 4096, 1386, 1054),
        ("megatron-lm", "gb200-nvl72", 16384, 1668, 1304),
        # Figures 5 and 6 of Shah et al. 2024; backward without a mask there.
        ("textbook", "dgx-h100", 8192, 333, 318),
        ("megatron-lm", "dgx-h100", 8192, 529, 518),
    ],
)
def test_the_speed_of_a_fused_attention(framework, cluster, seq_len, forward, backward):
    job = Job(MODELS["llama-3-70b"], CLUSTERS[cluster], 1, seq_len, FRAMEWORKS[framework])
    ops = [op for op in layer(job, Layout()) if op.name == "attention"]
    alone = constants()._replace(gemm_efficiency=1.0)
    took = sum(seconds_of(op, job, Layout(), alone) for op in ops)
    printed = sum(op.flops / 1e12 / rate for op, rate in zip(ops, (forward, backward)))
    assert took == pytest.approx(printed, rel=0.1)


def test_windows_reach_little():
    """gpt-oss's heads of 64 and window of 128 tokens: 166 and 189 TFLOP/s on a GB200 (cudnn-frontend)."""
    model = replace(MODELS["gpt-oss-20b"], windowed=24)
    job = Job(model, CLUSTERS["gb200-nvl72"], 1, 8192, FRAMEWORKS["megatron-lm"])
    op = next(op for op in layer(job, Layout()) if op.name == "attention")
    reached = op.share * job.cluster.device.achievable / 1e12
    assert reached == pytest.approx(3.5 / (1 / 166 + 2.5 / 189), rel=0.1)


@pytest.mark.parametrize(
    ("name", "of_owned", "of_held"),
    [  # norm 4, clipped 8, read 4, states 24 (16 and the parameter 8), weights copied 6
        ("megatron-lm", 46, 4),
        ("megatron-bridge", 46 + 6, 2),  # and a float32 copy of half-precision gradients
        ("torchtitan", 40, 0),
    ],
)
def test_bytes_that_an_optimizer_moves(name, of_owned, of_held):
    framework, model = FRAMEWORKS[name], MODELS["llama-3-8b"]
    job = Job(model, DGX, 8, 8192, framework)
    layout = framework.layout(dp=8, zero=3 if name == "torchtitan" else 1)
    moved = sum(op.streamed for op in synchronisation(job, layout) if op.part == "optimizer")
    assert moved == pytest.approx((of_owned / 8 + of_held) * model.params)


def test_norms_of_queries_and_keys_are_priced():
    """Each layer has two norms. Unfused, each has six kernels, and its input is kept."""
    qwen, titan = MODELS["qwen3-30b-a3b"], FRAMEWORKS["torchtitan"]
    dense = replace(qwen, experts=None)
    of = lambda model: layer(Job(model, framework=titan, seq_len=4096), Layout(zero=3))
    with_, without = of(dense), of(replace(dense, qk_norm=False))
    total = lambda ops, of: sum(float(of(op)) for op in ops if op.phase in "FI")
    more = lambda of: total(with_, of) - total(without, of)
    numbers = 4096 * (dense.q_width + dense.kv_width)
    assert more(lambda op: op.streamed) == pytest.approx(3 * 36 * numbers)
    assert more(lambda op: op.keeps.nbytes) == 2 * numbers
    assert more(lambda op: op.kernels) == 3 * 2 * 6


def test_one_rank_of_fsdp_casts_all_of_its_weights():
    """Twice a microbatch, each of d ranks casts its part from float32 to half precision."""
    job = Job(MODELS["llama-3.2-1b"], framework=FRAMEWORKS["torchtitan"], global_batch=8)
    moved = lambda job, d: sum(
        float(op.streamed) for op in synchronisation(job, Layout(dp=d, zero=3)) if op.name == "copies"
    )
    half = replace(job, framework=job.framework.but(weight_bytes=2))
    cast = lambda d: moved(job, d) - moved(half, d)
    assert cast(1) == pytest.approx(8 * 2 * 6 * job.model.params)
    assert cast(8) == pytest.approx(cast(1) / 8 / 8)  # of one microbatch, and an eighth of the weights
