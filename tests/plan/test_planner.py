"""The planner: terms of a step's seconds, and which layouts it picks, refuses and explains."""

import itertools
import json
import re
from dataclasses import replace

import pytest
from test_memory import activations_per_layer

from three_axes.paper.collectives import group_seconds, ring_seconds
from three_axes.paper.hardware import find_cluster
from three_axes.paper.pipelines import SCHEDULES
from three_axes.paper.placement import Placement
from three_axes.paper.simulation import Times, simulate
from three_axes.plan import CLUSTERS, FRAMEWORKS, MODELS, Cluster, Job, Layout, ModelShape, estimate, plan
from three_axes.plan.cost import constants, step_terms, work
from three_axes.plan.flags import flags
from three_axes.plan.frameworks import TEXTBOOK, find_framework
from three_axes.plan.layout import ORDER
from three_axes.plan.memory import OVERHEAD, in_flight, stage_memory
from three_axes.plan.operations import layer
from three_axes.plan.possible import check
from three_axes.plan.traffic import sent

LLAMA2, LLAMA3, DGX = MODELS["llama-2-70b"], MODELS["llama-3-70b"], CLUSTERS["dgx-h100"]
JOB = Job(LLAMA3, DGX, 128, 8192)
EVERY = TEXTBOOK.but(schedules=tuple(SCHEDULES))


def bandwidth(cluster, members, stride):
    """Bytes/s that a rank sends in a large all-reduce on a ring of ranks that are `stride` apart."""
    inside, nodes = Placement({"dp": members, "tp": stride}).reach("dp", cluster.gpus_per_node)
    seconds = float(ring_seconds("all_reduce", 1e15, inside, nodes, cluster))
    return 2 * (members - 1) / members * 1e15 / seconds


def test_a_ring_across_nodes_uses_the_ports_of_its_members():
    assert bandwidth(DGX, 8, 1) == pytest.approx(450e9)  # one node
    assert bandwidth(DGX, 8, 8) == pytest.approx(50e9)  # one member in each of eight nodes
    assert bandwidth(DGX, 16, 1) == pytest.approx(400e9)  # eight in each of two
    assert bandwidth(DGX, 16, 4) == pytest.approx(100e9)


def test_measured_rings_set_the_pace_where_they_are_slower():
    slow = replace(DGX, busbw=((2, 360e9), (8, 90e9)))
    assert bandwidth(slow, 8, 1) == pytest.approx(450e9)  # inside a node nothing changes
    assert [bandwidth(slow, n, 1) for n in (16, 64, 512)] == pytest.approx([360e9, 90e9, 90e9])
    assert bandwidth(slow, 32, 1) == pytest.approx(180e9)  # halfway in the logarithms
    assert bandwidth(slow, 8, 8) == pytest.approx(50e9)  # one port is slower still
    gathers = replace(slow, busbw_gather=((2, 180e9),))
    took = lambda op, network: float(group_seconds(op, 1e12, 8, 2, network))
    assert took("all_reduce", gathers) == took("all_reduce", slow)
    assert took("all_gather", gathers) == pytest.approx(2 * took("all_gather", slow), rel=1e-3)


def test_only_one_of_two_axes_is_inside():
    """With DP 4 · TP 2 · PP 2 on nodes of eight, the outermost axis of dp and pp leaves the node."""
    job, sizes = Job(LLAMA3, DGX, 32, 8192), dict(dp=4, tp=2, pp=2, microbatch=1, zero=1)
    inside, outside = (step_terms(job, Layout(**sizes, order=o)) for o in (ORDER, ("dp", "pp", "tp")))
    assert inside["pipeline sends"] > outside["pipeline sends"]
    assert inside["data parallel"] < outside["data parallel"]


def test_the_bubble_of_schedules_that_split_backward_is_the_simulated_one():
    """GPT-3 without a head has equal stages."""
    model = replace(MODELS["gpt3-175b"], vocab=1)
    for name, p, b in itertools.product([n for n, k in SCHEDULES.items() if k.splits], (2, 4, 8), (1, 2)):
        layout = Layout(tp=8, pp=p, microbatch=b, schedule=name)
        job = Job(model, DGX, 3 * p * b, 2048)
        one, terms = work(layer(job, layout), job, layout, constants()), step_terms(job, layout)
        times = Times(*(float(model.layers / p / layout.chunks * one.phase(k)) for k in "FIW"))
        idle = simulate(SCHEDULES[name].make(p, 3 * p, 1), times).makespan - 3 * model.layers * one.total
        assert float(terms["bubble"]) == pytest.approx(float(idle), rel=2e-3), name


def test_schedules_that_split_backward_are_asked_for():
    everything, usual = plan(replace(JOB, framework=EVERY), gpus=64), plan(JOB, gpus=64)
    rows = lambda made: [*made.ranked, *made.tight, *made.too_large]
    of = lambda made: {row.layout.schedule for row in rows(made)}
    assert of(usual) == {"1F1B", "interleaved"} and of(everything) == set(SCHEDULES)
    assert everything.best.seconds <= usual.best.seconds
    assert len({row.layout for row in rows(everything)}) == len(rows(everything)) == everything.looked_at
    for row in rows(everything):  # each can be
        Job(LLAMA3, global_batch=128).check(row.layout)


@pytest.mark.parametrize(
    "given, sentence",
    [
        (lambda: Job(LLAMA3, global_batch=0), "global_batch must be a whole number of at least 1, not 0"),
        (lambda: Job(LLAMA3, seq_len=10**22), "seq_len must be at most 1,000,000,000; a number of 23 digits"),
        (lambda: plan(JOB, gpus=2.0), "gpus must be a whole number"),
        (lambda: plan(JOB, gpus=64, tp=5), "tp 5 cannot be on 64 GPUs: the sizes must multiply to 64"),
        (lambda: TEXTBOOK.but(gradient_bytes=-4), "gradient_bytes is 2 or 4, not -4"),
        (lambda: TEXTBOOK.but(hides=("sums",)), "hides are some of gradients"),
        (lambda: find_framework("megatorn"), "the nearest is 'megatron-lm'"),
        (lambda: check(LLAMA3, Layout(order=("dp", "tp"))), "order names each of dp, tp, pp once"),
        # 5 divides the 80 layers, but not 48 GPUs.
        (lambda: check(LLAMA3, Layout(tp=8, pp=6), gpus=48), "output layer counted; take 4 or 8"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(given, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        given()


@pytest.mark.parametrize("t", [3, 7, 8, 14, 56])
def test_a_hint_about_tp_offers_only_sizes_that_are_accepted(t):
    """Qwen2.5-7B has 28 heads, 4 for keys and values, and a feed-forward width that 7 does not divide."""
    qwen = ModelShape("qwen2.5-7b", 28, 3584, 28, 152064, 4, 18944, gated=True, qkv_biases=True)
    with pytest.raises(ValueError) as refused:
        check(qwen, Layout(tp=t))
    for k in str(refused.value).partition("; take ")[2].split(" or "):
        check(qwen, Layout(tp=int(k)))


def test_a_job_without_a_layout_says_why():
    seven = plan(Job(MODELS["llama-3-8b"], DGX, 128), gpus=7)
    assert "0 fit" in repr(seven)
    why = "cannot be laid out on 7 GPUs with a batch of 128: .* a batch of 128 does not divide by"
    with pytest.raises(ValueError, match=why):
        seven.best


def test_bytes_that_the_allocator_may_reserve_must_fit_too():
    """Tight: the allocated bytes fit, but not with what the allocator may reserve beside them."""
    made = plan(JOB, gpus=64)
    card, times = DGX.device.memory, JOB.framework.holds.reserves
    assert times > 1 and made.tight and made.too_large
    assert all((row.memory - OVERHEAD) * times + OVERHEAD <= card for row in made.ranked)
    assert all(row.memory <= card < (row.memory - OVERHEAD) * times + OVERHEAD for row in made.tight)
    assert all(row.memory > card for row in made.too_large)
    tight, fits = (estimate(JOB, rows[0].layout) for rows in (made.tight, made.ranked))
    assert tight.tight and not tight.fits and tight.warnings()[0].startswith("tight: ")
    assert fits.fits and not fits.tight


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_has_a_plan(name):
    cluster = CLUSTERS[name]
    made = plan(Job(MODELS["llama-3.2-1b"], cluster, 64, 2048), gpus=2 * cluster.gpus_per_node)
    warnings = made.estimate().warnings()
    assert 0.05 < made.estimate().mfu < 0.7
    assert any("measure yours" in one for one in warnings) == cluster.device.assumed


def test_short_sequences_large_batches_and_a_slow_network_have_a_plan_too():
    """A slower network and a larger batch than those of the last plan would be refused."""
    short = plan(Job(MODELS["toy"], DGX, 8, 1), gpus=4)
    assert short.ranked and all(row.axes != short.best.axes for *_, row in short.flips())
    made = plan(Job(MODELS["toy"], replace(DGX, inter_node_bandwidth=1e5), 10**9, 64), gpus=8, dp=8)
    assert made.changed("speed between nodes", 0.5) is None and made.changed("global batch", 4) is None
    assert made.changed("speed between nodes", 2) and made.flips() is not None


def test_a_layer_is_never_faster_than_its_host():
    """However many ranks share a layer, its step takes at least as long as its launches."""
    job = Job(MODELS["llama-3.2-1b"], DGX, 8, 1024, TEXTBOOK.but(launch_seconds=1e-4))
    terms = step_terms(job, Layout(tp=8))
    launches = sum(work(layer(job, Layout(tp=8)), job, Layout(tp=8), constants()).host.values())
    shown = sum(float(terms[k]) for k in ("matrices", "attention", "elementwise", "tensor parallel"))
    assert terms["waiting for the host"] > 0
    assert shown + float(terms["waiting for the host"]) == pytest.approx(8 * 16 * launches)
    at_once = replace(job, framework=TEXTBOOK.but(launch_seconds=0))
    assert step_terms(at_once, Layout())["waiting for the host"] == 0


def test_sequence_parallelism_sends_a_quarter_more_where_it_gathers_again():
    """A layer has ten gathers and scatters. Megatron-LM has four all-reduces, each of twice their bytes."""
    layout = Layout(dp=4, tp=8, pp=2, zero=1)
    jobs = (replace(JOB, framework=TEXTBOOK.but(regathers=r)) for r in (True, False))
    again, kept = (sent(job, layout)["tp"] for job in jobs)
    plain = sent(JOB, replace(layout, sequence_parallel=False))["tp"]
    assert again / plain == pytest.approx(1.25, rel=0.01) and kept / plain == pytest.approx(1, rel=0.01)


def test_mfu_by_hand():
    e = estimate(JOB, Layout(dp=4, tp=8, pp=2, zero=1))
    flops = LLAMA3.flops_per_token(8192) * 128 * 8192
    assert e.mfu == pytest.approx(flops / e.step_seconds / 64 / 989.4e12)
    assert e.fits and "MFU" in repr(e)
    assert e.step_seconds == pytest.approx(sum(e.time.values())) and all(s >= 0 for s in e.time.values())


def test_bars_of_an_estimate_add_up():
    e = estimate(JOB, Layout(dp=4, tp=8, pp=2, zero=1))
    for table in (e.time_table(), e.memory_table()):
        bars = [row[table.columns.index("drawn")] for row in table.rows]
        assert "".join(b.strip("\u2007") for b in bars) == "█" * 28  # the bars add up
        assert all(len(b) == 28 for b in bars)
        ends = [len(b.rstrip("\u2007")) for b in bars if b.strip("\u2007")]
        assert ends == sorted(ends) and ends[-1] == 28  # each bar begins where the previous bar ends
    assert "s = 8,192, b = 1, m = 32, h = 8,192, L = 80" in e.inputs()
    assert "70,553,706,496 parameters" in e.inputs()


def test_four_by_four_by_four_for_llama_2_70b():
    """The planner picks TP 4, PP 4, as in NVIDIA's own base configuration for 64 H100s."""
    made = plan(Job(LLAMA2, DGX, 128, framework=FRAMEWORKS["megatron-lm"]), gpus=64)
    assert (4, 4, 4) in [row.axes[:3] for row in made.by_axes[:3]]
    across_nodes = [row for row in made.by_axes if row.layout.tp > 8]
    assert all(row.seconds > 1.5 * made.best.seconds for row in across_nodes)


def test_metas_own_layout_of_the_405b():
    """TP 8 · PP 16 · DP 128 without recompute needs 4 GB more than an H100 has. The difference is
    activations: Meta's program frees those that are no longer needed (Llama 3, section 3.3.2), which the
    planner does not count. Without chunks the layout is tight.
    """
    framework = FRAMEWORKS["megatron-lm"].but(hides=("gradients",))
    job = Job(MODELS["llama-3-405b"], DGX, 2048, 8192, framework)
    sizes = dict(dp=128, tp=8, pp=16, zero=1, order=("dp", "pp", "tp"))
    e = estimate(job, Layout(**sizes, interleave=4, schedule="interleaved"))
    assert 0 < e.memory_bytes - DGX.device.memory < 5e9 and e.memory["activations"] > 60e9
    assert estimate(job, Layout(**sizes)).tight


def test_a_plan_explains_itself():
    made = plan(JOB, gpus=64)
    best = made.best
    assert made.why(**best.axes._asdict()).startswith("the fastest")
    assert "slower than" in made.why(dp=4, tp=8, pp=2) and "It loses" in made.why(dp=4, tp=8, pp=2)
    assert made.why(dp=3) == "DP 3 · TP 1 · PP 1 takes 3 GPUs, but there are 64"
    assert "% slower than DP" in made.why(tp=64) and "s on tensor parallel" in made.why(tp=64)
    assert [r.seconds for r in made.ranked] == sorted(r.seconds for r in made.ranked)
    assert all(r.memory > DGX.device.memory for r in made.too_large)
    assert made.estimate().step_seconds == pytest.approx(best.seconds)
    for what, factor, winner in made.flips():
        assert winner.axes != best.axes


def test_why_says_that_a_layout_was_not_looked_at():
    why = plan(JOB, gpus=64, tp=4).why(dp=4, tp=8, pp=2)
    assert why == "DP 4 · TP 8 · PP 2 was not tried: only tp 4 was"
    sharded = FRAMEWORKS["deepspeed"].but(zeros=(3,), zeros_in_pipeline=())
    made = plan(replace(JOB, framework=sharded), gpus=64)
    assert {row.layout.pp for row in made.ranked} == {1}
    assert made.why(dp=4, tp=8, pp=2) == "with a pipeline deepspeed has no ZeRO 3, which is asked for"


def test_some_layers_are_computed_twice():
    """The cost is linear in the number of recomputed layers. The planner recomputes as few layers as fit."""
    job = Job(MODELS["llama-3-70b"], DGX, 128, 8192, find_framework("megatron-bridge"))
    sizes = dict(dp=4, tp=4, pp=4, interleave=5, schedule="interleaved", zero=1)
    of = lambda recompute, k=0: estimate(job, Layout(**sizes, recompute=recompute, recomputed=k))
    none, some, all_ = of("none"), of("full", 5), of("full")
    for seconds in (lambda e: e.time["matrices"], lambda e: e.time["attention"]):
        assert seconds(some) - seconds(none) == pytest.approx((seconds(all_) - seconds(none)) / 4)
    assert some.time["head"] == pytest.approx(none.time["head"])  # no head is computed twice
    kept = lambda e: stage_memory(job, e.layout, 1)["activations"]
    buffer = kept(all_) - activations(job, all_.layout)  # one layer whose activations are rebuilt
    assert kept(some) == pytest.approx((3 * kept(none) + kept(all_) - buffer) / 4 + buffer)
    assert estimate(job, replace(some.layout, recomputed=20)).step_seconds == all_.step_seconds
    found = next(row for row in plan(job, gpus=64).by_axes if row.axes == some.layout.axes)
    assert found.layout == some.layout and estimate(job, found.layout).fits
    assert estimate(job, found.layout).step_seconds == pytest.approx(found.seconds)
    assert not estimate(job, replace(found.layout, recomputed=0, recompute="none")).fits
    # One layer of each of the five chunks.
    of_megatron = flags("megatron-lm", job, found.layout)
    assert "--recompute-method block" in of_megatron and "--recompute-num-layers 1" in of_megatron
    with pytest.raises(ValueError, match="recomputed 5 belongs to recompute full, not none"):
        job.check(replace(some.layout, recompute="none"))
    # A framework without the switch recomputes all layers or none.
    assert not any(row.layout.recomputed for row in plan(replace(job, framework=TEXTBOOK), gpus=64).ranked)


def activations(job, layout):
    """Bytes of the inputs of a middle stage's layers, for all microbatches in flight."""
    held = 20 * sum(activations_per_layer(job, layout).values())
    return held * float(in_flight(layout, job.microbatches(layout), 1))


def test_a_job_that_does_not_fit_says_by_how_much():
    made = plan(Job(MODELS["llama-3-405b"], DGX, 64, 8192), gpus=8)
    assert not made.ranked
    assert "too much" in made.why(**made.too_large[0].axes._asdict())
    with pytest.raises(ValueError, match="does not fit 8 × h100-80gb of 85.5 GB; the smallest needs"):
        made.best


def test_clusters_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"device": "a100-80gb", "gpus_per_node": 4, "inter_node_bandwidth": 12.5e9}))
    mine = find_cluster(str(path))
    assert (mine.name, mine.gpus_per_node, mine.inter_node_bandwidth) == ("mine", 4, 12.5e9)
    own = dict(name="l40s", flops=362e12, achievable=280e12, bandwidth=864e9, memory=48e9)
    path.write_text(json.dumps({"device": own, "intra_node_bandwidth": 32e9}))
    assert find_cluster(str(path)).device.name == "l40s" and isinstance(find_cluster(str(path)), Cluster)
    path.write_text('{"device": "h200", "all_to_all": [3e11, 4e10]}')
    assert hash(find_cluster(str(path))) and find_cluster(str(path)).all_to_all == (3e11, 4e10)
    for text, sentence in (
        ('{"device": "gpu"}', "device must be one of .*, or an object with name, flops"),
        ('{"device": {"flops": 1e14}}', "the device lacks achievable, bandwidth, memory"),
        ('{"device": {"flop": 1e14}}', "the device has no field 'flop'; known are name, flops"),
        ('{"device": "h200", "inter_node_bandwidth": -1}', "inter_node_bandwidth must be a positive number"),
        ('{"device": "h200", "intra_node_bandwidth": 900}', "bytes/s per GPU, one direction, and must be at"),
        ('{"device": "h200", "wires": 3}', "the cluster has no field 'wires'"),
        ('{"device": "h200", "all_to_all": [1, 2, 3]}', r"all_to_all is bytes/s .*, not \(1, 2, 3\)"),
        ('{"device": "h200", "host_bandwidth": 1e300}', r"must be at most 1e\+20; 1e\+300 is given"),
        ('{"device": "h200", "name": [1]}', r"the name of the cluster must be a text, not \[1\]"),
        (json.dumps({"device": own | {"assumed": 1}}), "assumed must be true or false, not 1"),
        ('{"device": "h200",\n "rails": }', "line 2, column 11"),
        ("[1]", "no JSON object"),
        ('{"device": "h200", "busbw": [[2, "x"]]}', "busbw must be pairs"),
        ('{"device": "h200", "busbw": [[4, 1e9], [2, 2e9]]}', "busbw must be pairs"),
        ('{"device": "h200", "rails": 0}', "rails"),
        ('{"device": "h200", "gpus_per_node": 7.5}', "gpus_per_node"),
        ('{"device": "h200", "storage_bandwidth": NaN}', "holds NaN for a number"),
        (json.dumps({"device": own | {"memory": 80}}), "memory"),
        (json.dumps({"device": own | {"achievable": 1e15}}), "achievable"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            find_cluster(str(path))
