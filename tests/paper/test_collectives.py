"""Formulas for bytes and seconds of collectives agree with each other, with simulated hops, and with gloo."""

from dataclasses import replace

import pytest

from helpers.emulate import networks
from three_axes.paper.collectives import (
    algorithmic_bytes,
    gloo,
    group_seconds,
    hop_by_hop,
    ring_seconds,
    seconds,
)


def test_what_gloo_does_differently():
    assert [gloo("broadcast", 1, 8, r) for r in range(8)] == [3, 2, 1, 1, 0, 0, 0, 0]
    assert [gloo("broadcast", 1, 4, r) for r in range(4)] == [2, 1, 0, 0]
    assert [gloo("broadcast", 1, 3, r) for r in range(3)] == [2, 0, 0]
    assert gloo("reduce_scatter", 16, 4) == 2 * algorithmic_bytes("reduce_scatter", 16, 4) == 24


@pytest.mark.parametrize("op", ["broadcast", "reduce", "gather", "scatter"])
@pytest.mark.parametrize("formula", [algorithmic_bytes, gloo])
def test_all_that_is_sent_is_received(op, formula):
    for n in (1, 2, 3, 4, 8):
        total = sum(formula(op, 24, n, r, root=n - 1) for r in range(n))
        least = 24 * (n - 1) / (n if op in ("scatter", "gather") else 1)
        assert total == pytest.approx(least) or (op == "reduce" and total >= least)


def test_refusals_name_what_is_known():
    with pytest.raises(ValueError, match="unknown collective 'allreduce'; known are all_reduce, "):
        algorithmic_bytes("allreduce", 1, 2)
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        gloo("all_reduce", 1, 0)


TWO_NODES = networks.nodes("two nodes", 4, 100e6, 10e6, 1e-3)


def test_seconds_by_hand():
    inside, across, one_each = range(4), range(8), (0, 4)
    assert seconds("all_reduce", 1e6, inside, TWO_NODES) == pytest.approx(6 * 1e-4 + 1.5e6 / 100e6)
    # A node has four ports. The hop between nodes is always busy, and the last piece adds its latency.
    assert seconds("all_reduce", 1e6, across, TWO_NODES) == pytest.approx(1.75e6 / 40e6 + 1e-3)
    # A small all-reduce takes the latency of all 14 hops, of which 4 leave a node.
    assert seconds("all_reduce", 8, across, TWO_NODES) == pytest.approx(4 * 1e-3 + 10 * 1e-4, rel=1e-3)
    assert seconds("all_reduce", 1e6, one_each, TWO_NODES) == pytest.approx(2 * 1e-3 + 1e6 / 10e6)
    assert seconds("all_gather", 1e6, inside, TWO_NODES) == pytest.approx(3 * 1e-4 + 0.75e6 / 100e6)
    assert seconds("send", 1e6, one_each, TWO_NODES) == pytest.approx(1e-3 + 0.1)
    assert seconds("all_reduce", 1e6, [3], TWO_NODES) == 0


def test_trees_win_where_latency_rules_and_hierarchies_meet_rings_where_bandwidth_does():
    many = range(64)
    small = {a: seconds("all_reduce", 1e3, many, TWO_NODES, a) for a in ("ring", "tree", "hierarchical")}
    assert small["tree"] < 0.4 * small["ring"] and small["hierarchical"] < small["ring"]
    large = {a: seconds("all_reduce", 1e9, many, TWO_NODES, a) for a in ("ring", "hierarchical")}
    # The hierarchical all-reduce uses the same ports, and adds the time inside the node.
    assert large["hierarchical"] == pytest.approx(large["ring"] + 2 * 0.75 * 1e9 / 100e6, rel=0.05)
    with pytest.raises(ValueError, match="all_gather by 'tree'"):
        seconds("all_gather", 1, many, TWO_NODES, "tree")


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    "ranks", [*map(range, (4, 8, 16)), (0, 4), (0, 1, 4, 5), (0, 4, 8, 12), (2,)], ids=str
)
def test_the_formula_of_a_ring_against_its_events(op, ranks):
    """The formula is at most a tenth too small, and exact if all hops are equal or only one thing matters."""
    for payload in (0, 80, 8e3, 8e5, 8e7, 8e9):
        events = hop_by_hop(op, payload, tuple(ranks), TWO_NODES)
        formula = seconds(op, payload, ranks, TWO_NODES)
        assert formula <= events * (1 + 1e-9)
        exact = payload in (0, 8e9) or len({r // 4 for r in ranks}) in (1, len(ranks))
        assert formula == pytest.approx(events, rel=0.02 if exact else 0.1)


def test_two_levels_where_they_are_faster():
    one = lambda payload, network: float(group_seconds("all_reduce", payload, 4, 16, network))
    ring = lambda payload: float(ring_seconds("all_reduce", payload, 4, 16, TWO_NODES))
    assert one(1e3, TWO_NODES) < ring(1e3) and one(1e9, TWO_NODES) == ring(1e9)
    inside = float(group_seconds("all_reduce", 1e6, 4, 1, TWO_NODES))  # one node has one level
    assert inside == pytest.approx(seconds("all_reduce", 1e6, range(4), TWO_NODES))
    measured = replace(TWO_NODES, busbw=((2, 20e6),))  # a measured speed is used
    assert one(1e9, measured) == pytest.approx(2 * 63 / 64 * 1e9 / 20e6, rel=1e-2)
