"""Closed formulas for collectives against each other and against what is known of gloo."""

import pytest

from helpers.theory.collectives import book, gloo, seconds
from helpers.theory.hardware import DEVICES, Cluster


@pytest.mark.parametrize("n, factor", [(2, 1), (3, 4 / 3), (4, 1.5), (8, 1.75)])
def test_a_ring_all_reduce(n, factor):
    assert book("all_reduce", 12, n) == pytest.approx(12 * factor)
    assert book("all_reduce", 12, n) == pytest.approx(
        book("reduce_scatter", 12, n) + book("all_gather", 12, n)
    )


def test_what_gloo_does_differently():
    assert [gloo("broadcast", 1, 8, r) for r in range(8)] == [3, 2, 1, 1, 0, 0, 0, 0]
    assert [gloo("broadcast", 1, 4, r) for r in range(4)] == [2, 1, 0, 0]
    assert [gloo("broadcast", 1, 3, r) for r in range(3)] == [2, 0, 0]
    assert gloo("reduce_scatter", 16, 4) == 2 * book("reduce_scatter", 16, 4) == 24


@pytest.mark.parametrize("op", ["broadcast", "reduce", "gather", "scatter"])
@pytest.mark.parametrize("formula", [book, gloo])
def test_all_that_is_sent_is_received(op, formula):
    for n in (1, 2, 3, 4, 8):
        each = {"broadcast": 24, "scatter": 24 * 1, "gather": 24, "reduce": 24}[op]
        total = sum(formula(op, each, n, r, root=n - 1) for r in range(n))
        least = {
            "broadcast": 24 * (n - 1),
            "scatter": 24 * (n - 1) / n,
            "gather": 24 * (n - 1) / n,
            "reduce": 24 * (n - 1),
        }[op]
        assert total == pytest.approx(least) or (op == "reduce" and total >= least)


def test_refusals_name_what_is_known():
    with pytest.raises(ValueError, match="unknown collective 'allreduce'; known are all_reduce, "):
        book("allreduce", 1, 2)
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        gloo("all_reduce", 1, 0)


TWO_NODES = Cluster(
    "two nodes", DEVICES["a100-80gb"], node=4, link=100e6, nic=10e6, link_latency=1e-4, nic_latency=1e-3
)


def test_seconds_by_hand():
    inside, across, one_each = range(4), range(8), (0, 4)
    assert seconds("all_reduce", 1e6, inside, TWO_NODES) == pytest.approx(6 * 1e-4 + 1.5e6 / 100e6)
    # Four ports a node.
    assert seconds("all_reduce", 1e6, across, TWO_NODES) == pytest.approx(14 * 1e-3 + 1.75e6 / 40e6)
    assert seconds("all_reduce", 1e6, one_each, TWO_NODES) == pytest.approx(2 * 1e-3 + 1e6 / 10e6)
    assert seconds("all_gather", 1e6, inside, TWO_NODES) == pytest.approx(3 * 1e-4 + 0.75e6 / 100e6)
    assert seconds("send", 1e6, one_each, TWO_NODES) == pytest.approx(1e-3 + 0.1)
    assert seconds("all_reduce", 1e6, [3], TWO_NODES) == 0


def test_trees_win_where_latency_rules_and_hierarchies_meet_rings_where_bandwidth_does():
    many = range(64)
    assert seconds("all_reduce", 1e3, many, TWO_NODES, "tree") < 0.2 * seconds(
        "all_reduce", 1e3, many, TWO_NODES
    )
    ring, levels = (seconds("all_reduce", 1e9, many, TWO_NODES, a) for a in ("ring", "hierarchical"))
    # The same ports, and the way inside the node on top.
    assert levels == pytest.approx(ring + 2 * 0.75 * 1e9 / 100e6, rel=0.05)
    with pytest.raises(ValueError, match="all_gather by 'tree'"):
        seconds("all_gather", 1, many, TWO_NODES, "tree")
