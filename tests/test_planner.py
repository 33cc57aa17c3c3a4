"""The cost model's terms, the planner's choices, and the command line."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.__main__ import main
from helpers.theory import CLUSTERS, MODELS, Layout, estimate, plan
from helpers.theory.collectives import group_bandwidth
from helpers.theory.cost import constants, layer_forward, step_terms
from helpers.theory.hardware import find_cluster
from helpers.theory.layout import SCHEDULES, ZERO_BUBBLE, check
from helpers.theory.memory import largest_stage, peak_memory
from helpers.theory.schedules import MAKE
from helpers.theory.simulation import Times, simulate

LLAMA2, LLAMA3, DGX = MODELS["llama-2-70b"], MODELS["llama-3-70b"], CLUSTERS["dgx-h100"]


def test_a_ring_across_nodes_uses_the_ports_of_its_members():
    c = replace(constants(), link=1.0, nic=1.0)
    bandwidth = lambda members, stride: float(group_bandwidth(DGX, members, stride, c.link, c.nic))
    assert bandwidth(8, 1) == 450e9  # one node
    assert bandwidth(8, 8) == 50e9  # one member in each of eight nodes
    assert bandwidth(16, 1) == 400e9  # eight in each of two
    assert bandwidth(16, 4) == 100e9


def test_measured_rings_set_the_pace_where_they_are_slower():
    c = replace(constants(), link=1.0, nic=1.0)
    slow = replace(DGX, rings=((2, 360e9), (8, 90e9)))
    bandwidth = lambda members, stride: float(group_bandwidth(slow, members, stride, c.link, c.nic))
    assert bandwidth(8, 1) == 450e9  # inside a node nothing changes
    assert [bandwidth(n, 1) for n in (16, 64, 512)] == pytest.approx([360e9, 90e9, 90e9])
    assert bandwidth(32, 1) == pytest.approx(180e9)  # halfway in the logarithms
    assert bandwidth(8, 8) == 50e9  # one port is slower still


@pytest.mark.parametrize(
    "rings",
    ["fast", [[2]], [[2, "x"]], [[1, 1e9]], [[4, 1e9], [2, 2e9]], [[2, -1]], [[2, 1e9], [2, 1e9]], 5, [None]],
)
def test_bad_rings_are_refused_in_a_sentence(rings, tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps({"device": "h100-80gb", "rings": rings}))
    with pytest.raises(ValueError, match="rings (must be|are) pairs"):
        find_cluster(str(tmp_path / "mine.json"))


def test_arrays_give_what_numbers_give():
    d, t, p, b = (
        np.array([8, 4, 2, 16]),
        np.array([8, 8, 4, 4]),
        np.array([1, 2, 8, 1]),
        np.array([1, 2, 1, 4]),
    )
    m = 128 // (d * b)
    many = Layout(d, t, p, b, np.ones(4, int), zero=1)
    together = step_terms(LLAMA3, many, DGX, m, 8192)
    held = peak_memory(LLAMA3, many, 8192, m)
    for i in range(4):
        one = Layout(int(d[i]), int(t[i]), int(p[i]), int(b[i]), zero=1)
        alone = step_terms(LLAMA3, one, DGX, int(m[i]), 8192)
        for name, seconds in alone.items():
            assert float(np.broadcast_to(together[name], 4)[i]) == pytest.approx(float(seconds)), name
        assert held[i] == pytest.approx(sum(largest_stage(LLAMA3, one, 8192, int(m[i]))[1].values()))


def test_the_bubble_of_schedules_that_split_backward_is_the_simulated_one():
    """GPT-3 without a head: all stages alike, a backward's I no shorter than its W or its forward."""
    model = replace(MODELS["gpt3-175b"], vocab=1)
    for name, p, b in itertools.product(ZERO_BUBBLE, (2, 4, 8), (1, 2)):
        layout = Layout(tp=8, pp=p, microbatch=b, schedule=name)
        m = 3 * p
        once = layer_forward(model, layout, DGX, 2048, constants())
        terms = step_terms(model, layout, DGX, m, 2048)
        each = model.layers / p / layout.chunks
        forward, weight = each * float(sum(once.values())), each * float(once["matrices"])
        whole = (
            sum(float(terms[k]) for k in ("matrices", "attention", "elementwise", "tensor parallel"))
            / m
            / layout.chunks
        )
        inputs = whole - forward - weight
        line = simulate(MAKE[name](p, m, 1), Times(forward, inputs, weight))
        assert float(terms["bubble"]) == pytest.approx(line.makespan - m * whole * layout.chunks, rel=2e-3), (
            name
        )


def test_schedules_that_split_backward_are_asked_for():
    everything = plan(LLAMA3, DGX, gpus=64, global_batch=128, seq_len=8192, schedules=SCHEDULES)
    usual = plan(LLAMA3, DGX, gpus=64, global_batch=128, seq_len=8192)
    of = lambda made: {row.layout.schedule for row in made.ranked + made.too_large}
    assert of(usual) == {"1F1B", "interleaved"} and of(everything) == set(SCHEDULES)
    assert everything.best.layout.schedule in ZERO_BUBBLE and everything.best.seconds < usual.best.seconds
    rows = everything.ranked + everything.too_large
    assert len({row.layout for row in rows}) == len(rows) == everything.looked_at
    for row in rows:
        check(LLAMA3, row.layout, 128)  # raises where it looks at what cannot be
    with pytest.raises(ValueError, match="schedules are some of GPipe, .* 'ZB' is given"):
        plan(LLAMA3, DGX, gpus=64, global_batch=128, seq_len=8192, schedules=("ZB",))


@pytest.mark.parametrize(
    "layout, said",
    [
        (Layout(dp=64, schedule="ZB-H1"), "ZB-H1 needs pp of at least 2"),
        (Layout(tp=8, pp=8, schedule="ZB-H1", recompute="full"), "take recompute 'none', or 1F1B"),
        (Layout(tp=4, pp=16, schedule="ZB-V"), "80 layers do not divide over 32; take ZB-H1"),
        (Layout(4, 2, 8, 4, schedule="ZB-H2"), "fills 8 stages with 16 microbatches, and there are 8"),
        (Layout(8, 1, 8, schedule="ZB-V", balanced=True), "for one chunk on each pipeline rank, not 2"),
    ],
)
def test_schedules_that_split_backward_are_refused_in_a_sentence(layout, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check(LLAMA3, layout, 128)


@pytest.mark.parametrize(
    "given, said",
    [
        (
            dict(gpus=48, schedules=("ZB-V",), balanced=True),
            "for one chunk on each pipeline rank, which ZB-V have more of",
        ),
        (dict(recomputes=("all",)), "recomputes are some of none, selective, per-op, full; 'all' is given"),
        (dict(zeros=()), "none is given"),
        (dict(zeros=(7,)), "zeros are some of 0, 1, 2, 3; 7 is given"),
        (dict(global_batch=0), "global_batch must be a whole number of at least 1, not 0"),
        (dict(seq_len=10**22), "seq_len must be at most 1,000,000,000; a number of 23 digits is given"),
        (dict(gpus=2.0), "gpus must be a whole number"),
    ],
)
def test_a_plan_of_nonsense_is_refused_in_a_sentence(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(MODELS["opt-30b"], DGX, **dict(gpus=64, global_batch=128, seq_len=2048) | given)


def test_a_balanced_plan_is_what_check_admits():
    rows = plan(MODELS["toy"], DGX, gpus=64, global_batch=64, seq_len=64, schedules=SCHEDULES, balanced=True)
    for row in rows.ranked + rows.too_large:
        check(MODELS["toy"], row.layout, 64)
    assert max(row.layout.pp for row in rows.ranked) == 4 and "take pp 4, or less" in rows.impossible[8, 1, 8]


def test_what_cannot_be_laid_out_says_why():
    seven = plan(MODELS["llama-3-8b"], DGX, gpus=7, global_batch=128, seq_len=4096)
    assert "0 fit" in repr(seven)
    with pytest.raises(
        ValueError,
        match="cannot be laid out on 7 GPUs with a batch of 128: .* a batch of 128 does not divide by",
    ):
        seven.best


def test_short_sequences_and_large_batches_have_a_plan_too():
    short = plan(MODELS["toy"], DGX, gpus=4, global_batch=8, seq_len=1)
    assert {what for what, *_ in short.flips()} <= {"speed inside a node", "global batch"} and short.ranked
    assert all(row.axes != short.best.axes for *_, row in short.flips())
    assert plan(MODELS["llama-3-8b"], DGX, gpus=64, global_batch=4_194_304, seq_len=4096).ranked


def test_no_number_out_of_range_comes_through():
    device = DGX.device
    for broken in (
        dict(rails=0),
        dict(rails=-3),
        dict(node=7.5),
        dict(rails="four"),
        dict(link=10**400),
        dict(nic=float("nan")),
        dict(device="h100-80gb"),
        dict(rings=((1, 1e11),)),
        dict(rings=((4, 1e11), (2, 1e11))),
        dict(rings={"24": "1e11"}),
        dict(rings=((2.9, 1e11),)),
    ):
        with pytest.raises(ValueError, match=f"cluster 'dgx-h100': {next(iter(broken))}"):
            replace(DGX, **broken)
    for broken in (
        dict(bandwidth=-1e12),
        dict(achievable=0),
        dict(achievable=2 * device.flops),
        dict(memory=float("inf")),
    ):
        with pytest.raises(ValueError, match=f"device 'h100-80gb': {next(iter(broken))}"):
            replace(device, **broken)
    for broken in (dict(global_batch="64"), dict(seq_len=1.5), dict(seq_len=float("nan"))):
        with pytest.raises(ValueError, match="must be a whole number"):
            estimate(MODELS["toy"], Layout(), DGX, **dict(global_batch=8, seq_len=64) | broken)
    with pytest.raises(ValueError, match="gradient_bytes is 2 or 4, not -4"):
        estimate(MODELS["toy"], Layout(gradient_bytes=-4), DGX, global_batch=8, seq_len=64)


def test_a_terminal_without_bars_or_with_a_closed_pipe():
    command = [sys.executable, "-m", "helpers", "memory", "llama-3-8b", "--dp", "8", "--zero", "3"]
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    said = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    assert said.returncode == 0 and "s a step" in said.stdout and not said.stderr
    first = subprocess.run(
        f"{shlex.join(command)} | head -1", shell=True, capture_output=True, text=True, timeout=60
    )
    assert first.stdout and not first.stderr
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            refused = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert refused.returncode == 1 and refused.stderr == "cannot print: No space left on device\n"


def test_mfu_by_hand():
    e = estimate(LLAMA3, Layout(dp=4, tp=8, pp=2, zero=1), DGX, global_batch=128, seq_len=8192)
    flops = LLAMA3.flops_per_token(8192) * 128 * 8192
    assert e.mfu == pytest.approx(flops / e.step_seconds / 64 / 989.4e12)
    assert e.hfu == e.mfu and e.fits and "MFU" in repr(e)
    assert e.step_seconds == pytest.approx(sum(e.time.values())) and all(s >= 0 for s in e.time.values())


def test_an_estimate_draws_itself():
    e = estimate(LLAMA3, Layout(dp=4, tp=8, pp=2, zero=1), DGX, global_batch=128, seq_len=8192)
    for table in (e.time_table(), e.memory_table()):
        bars = [row[table.columns.index("drawn")] for row in table.rows]
        assert "".join(b.strip("\u2007") for b in bars) == "█" * 28  # they add up
        assert all(len(b) == 28 for b in bars)
        ends = [len(b.rstrip("\u2007")) for b in bars if b.strip("\u2007")]
        assert ends == sorted(ends) and ends[-1] == 28  # each begins where the one before it ends
    # Every part has its formula.
    everything = estimate(LLAMA3, Layout(dp=8, tp=8, zero=3, eager=True), DGX, global_batch=128, seq_len=8192)
    assert "gathered weights" in repr(everything) and "logits" in repr(everything)
    assert (
        "s = 8,192, b = 1, m = 32, h = 8,192, L = 80" in e.went_in()
        and "70,553,706,496 parameters" in e.went_in()
    )


def test_four_by_four_by_four_for_llama_2_70b():
    """What NVIDIA's own base configuration for 64 H100s takes: TP 4, PP 4."""
    made = plan(LLAMA2, DGX, gpus=64, global_batch=128, seq_len=4096)
    assert (4, 4, 4) in [row.axes for row in made.by_axes[:3]]
    across_nodes = [row for row in made.by_axes if row.layout.tp > 8]
    assert all(row.seconds > 1.5 * made.best.seconds for row in across_nodes)


def test_a_plan_explains_itself():
    made = plan(LLAMA3, DGX, gpus=64, global_batch=128, seq_len=8192)
    best = made.best
    assert made.why(*best.axes).startswith("the fastest")
    assert "slower than" in made.why(4, 8, 2) and "it loses" in made.why(4, 8, 2)
    assert made.why(3, 1, 1) == "dp·tp·pp = 3·1·1 = 3, but there are 64 GPUs"
    assert "% slower than DP" in made.why(1, 64, 1) and "s on tensor parallel" in made.why(1, 64, 1)
    assert [r.seconds for r in made.ranked] == sorted(r.seconds for r in made.ranked)
    assert all(r.memory <= 80e9 for r in made.ranked) and all(r.memory > 80e9 for r in made.too_large)
    assert made.estimate().step_seconds == pytest.approx(best.seconds)
    for what, factor, winner in made.flips():
        assert winner.axes != best.axes


def test_what_does_not_fit_says_by_how_much():
    made = plan(MODELS["llama-3-405b"], DGX, gpus=8, global_batch=64, seq_len=8192)
    assert not made.ranked
    assert "too much" in made.why(*made.too_large[0].axes)
    with pytest.raises(ValueError, match="does not fit 8 × h100-80gb of 80.0 GB; the smallest needs"):
        made.best


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(["llama-3-8b", "opt-30b", "gpt3-175b"]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["none", "full"]),
)
def test_time_is_positive_and_faster_parts_are_never_slower(name, t, p, d, zero, recompute):
    model, layout = MODELS[name], Layout(d, t, p, zero=zero, recompute=recompute)
    at = lambda **k: sum(map(float, step_terms(model, layout, replace(DGX, **k), 64, 2048).values()))
    here = at()
    assert 0 < here < float("inf")
    no_more = here * (1 + 1e-9)
    assert at(nic=2 * DGX.nic) <= no_more and at(link=2 * DGX.link) <= no_more
    # A step that waits for its communication all the time gains nothing from a faster GPU, but loses nothing
    # either.
    assert (
        at(device=replace(DGX.device, flops=2 * DGX.device.flops, achievable=2 * DGX.device.achievable))
        <= no_more
    )
    terms = step_terms(model, layout, DGX, 64, 2048)
    assert (terms["bubble"] == 0) == (p == 1) and all(v >= 0 for v in terms.values())


def test_the_command_line(capsys):
    assert main("plan llama-3-70b --gpus 64 --cluster dgx-h100 --batch 128 --seq 8192".split()) == 0
    out = capsys.readouterr().out
    assert "what would change the winner" in out and "best: DP" in out
    assert main("plan llama-3-70b --gpus 64 --batch 128 --seq 8192 --schedules 1F1B ZB-V".split()) == 0
    assert "ZB-V · ZeRO-1" in capsys.readouterr().out
    assert main("plan llama-3-70b --gpus 64 --batch 128 --seq 8192 --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["ranked"][0]["step_seconds"] > 0
    assert main("memory llama-3-70b --tp 8 --pp 2 --dp 4 --zero 1 --batch 128 --seq 8192".split()) == 0
    assert "optimizer" in capsys.readouterr().out
    assert main("bubble --pp 4 --microbatches 8".split()) == 0
    assert "27.27% of wall time idle\nheld at once, by rank: [4, 3, 2, 1]" in capsys.readouterr().out
    assert main("bytes llama-3-8b --dp 8 --batch 64 --seq 4096 --json".split()) == 0
    sent = json.loads(capsys.readouterr().out)["bytes"]
    assert (
        sent["data parallel"] == pytest.approx(2 * 7 / 8 * 2 * MODELS["llama-3-8b"].params)
        and sent["tensor parallel"] == 0
    )


@pytest.mark.parametrize(
    "command, said",
    [
        ("plan llama-3-70bb --gpus 64", "the nearest is 'llama-3-70b'"),
        ("plan llama-3-70b --gpus 0", "gpus must be a whole number"),
        ("plan llama-3-70b --gpus 8 --cluster dgx-h1000", "the nearest is 'dgx-h100'"),
        ("memory llama-3-70b --tp 3", "take 2 or 4"),
        ("bubble --pp 4 --microbatches 9 --schedule interleaved", "take a multiple of 4"),
        ("plan llama-3-405b --gpus 8", "does not fit"),
    ],
)
def test_bad_input_is_one_sentence(command, said, capsys):
    assert main(command.split()) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and "Traceback" not in err


def test_clusters_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"device": "a100-80gb", "node": 4, "nic": 12.5e9}))
    mine = find_cluster(str(path))
    assert (mine.name, mine.node, mine.nic, mine.device.name) == ("mine", 4, 12.5e9, "a100-80gb")
    for text, said in (
        ('{"device": "gpu"}', "device must be one of"),
        ('{"device": "h200", "nic": -1}', "nic must be a positive number"),
        ('{"device": "h200", "wires": 3}', "unknown field 'wires'"),
        ("[1]", "no JSON object"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            find_cluster(str(path))


def test_it_loads_without_torch_in_a_moment():
    code = (
        "import time; a = time.perf_counter(); import helpers.theory, sys; print(time.perf_counter() - a,"
        " 'torch' in sys.modules)"
    )
    seconds, torch = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert torch == "False" and float(seconds) < 3  # 0.1 s on an idle laptop
