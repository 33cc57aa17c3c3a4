"""Coordinates and groups on the grid of axes agree with each other and with PyTorch's DeviceMesh."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from three_axes.paper import Placement, crosses
from three_axes.plan import Layout

GRIDS = st.permutations(["dp", "pp", "tp"]).flatmap(
    lambda order: st.tuples(*(st.integers(1, 6) for _ in order)).map(lambda n: dict(zip(order, n)))
)


@given(GRIDS)
def test_groups_partition_the_ranks_and_hold_one_coordinate_free(sizes):
    n = math.prod(sizes.values())
    for axis in sizes:
        groups = Placement(sizes).groups(axis)
        assert sorted(r for g in groups for r in g) == list(range(n))
        assert {len(g) for g in groups} == {sizes[axis]}
        for members in groups:
            at = [Placement(sizes).coordinates(r) for r in members]
            others = {tuple(value for a, value in here.items() if a != axis) for here in at}
            assert len(others) == 1 and members == Placement(sizes).group(members[-1], axis)
            assert all(b - a == Placement(sizes).stride(axis) for a, b in zip(members, members[1:]))
    a, b = 0, n - 1
    assert Placement(sizes).axis_between(a, b) == (
        next((x for x in sizes if sizes[x] > 1), None) if sum(s > 1 for s in sizes.values()) == 1 else None
    )


def test_groups_are_those_of_pytorchs_mesh(world):
    def mesh():
        from helpers import toy

        grid = toy.grid_groups(2, 1, 2)
        import torch.distributed as dist

        return {axis: dist.get_process_group_ranks(grid[axis].get_group()) for axis in ("pp", "dp", "tp")}

    sizes = {"pp": 1, "dp": 2, "tp": 2}
    assert world.run(mesh) == [{axis: Placement(sizes).group(r, axis) for axis in sizes} for r in range(4)]


def test_which_groups_cross_a_node():
    llama = {"dp": 128, "pp": 16, "tp": 8}
    assert [axis for axis in llama if crosses(Placement(llama).group(0, axis), 8)] == ["dp", "pp"]


def test_a_rank_off_the_grid_is_refused():
    with pytest.raises(ValueError, match=r"rank 8 is not on a grid of 2 × 2 × 2 = 8, whose ranks are 0 to 7"):
        Placement({"dp": 2, "pp": 2, "tp": 2}).coordinates(8)


def test_with_cp_the_ranks_of_the_same_weights_are_counted_over_both_axes():
    assert Layout(dp=4, cp=2, tp=2).reach("dp", 8) == (4, 2)
    assert Layout(dp=4, cp=4).reach("dp", 8) == (8, 2)
