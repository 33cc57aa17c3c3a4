"""The short formulas of `paper.by_hand` equal numbers that were computed on paper, and the planner's."""

import itertools

import pytest

from drops import formulas
from three_axes.paper import Network, by_hand
from three_axes.paper.collectives import seconds
from three_axes.paper.schedules import gpipe, interleaved, one_f_one_b
from three_axes.paper.simulation import Times, simulate
from three_axes.plan import FRAMEWORKS, MODELS, Job, Layout
from three_axes.plan.memory import in_flight, kept, states
from three_axes.plan.operations import layer
from three_axes.plan.traffic import sent

GPT = MODELS["gpt3-175b"]
UNFUSED = FRAMEWORKS["textbook"].but(fused_attention=False)


def test_numbers_redone_on_paper():
    assert by_hand.reduce_scatter_bytes(400, 4) == 300 and by_hand.all_reduce_bytes(400, 4) == 600
    assert by_hand.states_bytes(80, d=4, t=2, p=2) == (40, 40, 240)
    assert [sum(by_hand.states_bytes(16, 4, zero=z)) for z in range(4)] == [256, 112, 88, 64]
    assert by_hand.layer_activation_bytes(1, 4, 8, 2) == 34 * 32 + 160
    assert by_hand.layer_activation_bytes(1, 4, 8, 2, t=2) == 22 * 32 + 80
    assert by_hand.layer_activation_bytes(1, 4, 8, 2, 2, True, "selective") == 17 * 32
    assert by_hand.layer_activation_bytes(1, 4, 8, 2, 2, recompute="full") == 64
    assert by_hand.bubble(4, 8) == pytest.approx(3 / 11)
    assert by_hand.bubble(4, 8, 2) == pytest.approx(1.5 / 9.5)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_ring_on_the_clock(n):
    network = Network(name="one node", intra_node_bandwidth=1e11, intra_node_latency=2e-6)
    took = seconds("all_reduce", 1e6, tuple(range(n)), network)
    assert took == pytest.approx(2 * (n - 1) * (1e6 / n / 1e11 + 2e-6), rel=1e-6)


@pytest.mark.parametrize("zero, d, t, p", [*itertools.product(range(4), (1, 4), (1, 2), (1, 2))])
def test_states(zero, d, t, p):
    assert by_hand.states_bytes(7e9, d, t, p, zero) == tuple(states(7e9 / (t * p), d, zero).values())


@pytest.mark.parametrize(
    "t, sp, recompute", [*itertools.product((1, 2, 8), (False, True), ("none", "selective", "full"))]
)
def test_activations(t, sp, recompute):
    if recompute == "full" and sp:
        return  # here the planner splits the layer's input as well
    layout = Layout(tp=t, microbatch=4, sequence_parallel=sp, recompute=recompute)
    planned = sum(kept(layer(Job(GPT, seq_len=2048, framework=UNFUSED), layout), recompute).values())
    mine = by_hand.layer_activation_bytes(4, 2048, GPT.hidden, GPT.heads, t, sp, recompute)
    assert mine == pytest.approx(planned)


@pytest.mark.parametrize("p, m", [(1, 4), (4, 8), (8, 32), (3, 13), (2, 1), (4, 2), (2, 6)])
def test_bubbles_and_what_is_in_flight(p, m):
    for name, make in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        line = simulate(make(p, m))
        assert by_hand.bubble(p, m) == pytest.approx(line.bubble)
        for stage in range(p):
            assert line.in_flight(stage) == in_flight(Layout(pp=p, schedule=name), m, stage)
    for v in (2, 3, 4) if m % p == 0 else ():
        line = simulate(interleaved(p, m, v), Times(1 / v, 1 / v, 1 / v))
        assert by_hand.bubble(p, m, v) == pytest.approx(line.bubble)
        assert line.makespan == pytest.approx(3 * (m + (p - 1) / v))


def test_bytes_of_a_step_by_the_lines_of_the_course():
    b, s, m = 1, 2048, 4
    job = Job(GPT, global_batch=2 * m * b, seq_len=s, framework=FRAMEWORKS["textbook"])
    layers = GPT.layers / 2
    layout = Layout(dp=2, tp=4, pp=2, microbatch=b, sequence_parallel=False)
    planned = sent(job, layout, 0)
    tensor = m * formulas.tp_sends(layers, GPT.hidden, b * s, 4)
    assert planned["tp"] == pytest.approx(tensor, rel=0.01)  # the planner adds the embedding's
    weights = 12 * GPT.hidden**2 * layers / 4
    assert planned["dp"] == pytest.approx(formulas.all_reduce(2 * weights, 2), rel=0.02)
    uncut = sent(job, Layout(dp=2, pp=4, microbatch=b), 1)  # a middle stage
    assert uncut["pp"] == pytest.approx(2 * m * formulas.stage_sends(GPT.hidden, b * s))
