"""`diagnose` reads a pipeline schedule that somebody wrote, and explains what is wrong with it."""

import pytest

from helpers.practice import diagnose
from helpers.practice.diagnose import Illegal
from three_axes.paper import schedules
from three_axes.paper.simulation import simulate


def text(schedule):
    return [[f"{op.kind}{op.microbatch}" for op in ops] for ops in schedule.ops]


@pytest.mark.parametrize("make", [schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1, schedules.zb_h2])
def test_known_schedules_are_recognised(make):
    read = diagnose.read(text(make(4, 8)), 8)
    assert read.name == make(4, 8).name and read.ops == make(4, 8).ops


def test_an_order_of_ones_own_is_recognised():
    orders = text(schedules.one_f_one_b(4, 8))
    orders[0][0], orders[0][1] = orders[0][1], orders[0][0]
    assert diagnose.read(orders, 8).name == "your own"


@pytest.mark.parametrize(
    "orders, m, name",
    [
        ([["B0", "F0"]], 1, "a backward before its forward"),
        ([["F0"]], 1, "a missing drain"),
        ([["B0"]], 1, "a backward before its forward"),
        ([["F0", "B0"]], 2, "a forward is missing"),
        ([["F1", "B1"]], 1, "microbatches counted from 1"),
        ([["F0", "F0", "B0"]], 1, "an operation twice"),
        (["F0"], 1, "no list of operations"),
        ([[1]], 1, "no list of operations"),
        ([["F0", "I0"]], 1, "a W is missing"),
        ([["F0", "W0", "I0"]], 1, "a W before its I"),
    ],
)
def test_a_wrong_schedule_gets_the_name_of_its_mistake(orders, m, name):
    with pytest.raises(Illegal) as e:
        diagnose.read(orders, m)
    assert e.value.misconception == name


def test_a_schedule_that_hangs_is_explained_rank_by_rank():
    orders = [["F0", "F1", "B0", "B1"], ["F1", "B1", "F0", "B0"]]
    assert diagnose.run(diagnose.read(orders, 2)).makespan > 0  # out of order, and yet it runs
    orders = [["F0", "B0", "F1", "B1"], ["F1", "B1", "F0", "B0"]]
    first, second = "rank 0 waits to run B0, which needs B0 of rank 1", "rank 1 waits to run F1, which"
    with pytest.raises(Illegal, match=f"{first}; {second} needs F1 of rank 0"):
        diagnose.run(diagnose.read(orders, 2))


def test_every_idle_time_has_its_reason():
    timeline = simulate(schedules.one_f_one_b(4, 8))
    gaps = diagnose.idle(timeline)
    assert sum(b - a for _, a, b, _ in gaps) == pytest.approx(timeline.bubble * timeline.makespan * 4)
    assert gaps[0] == (0, 4.0, 10.0, "B0 waits for B0 on rank 1")
