"""Pipeline schedules: orders equal PyTorch's, bubbles equal published ones, memory equals the formulas."""

from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from three_axes.files import rows_of
from three_axes.paper.schedules import Op, Schedule, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zb_v
from three_axes.paper.simulation import Stuck, Times, simulate

SIMPLE = [gpipe, one_f_one_b, zb_h1, zb_h2, zb_v]


def test_the_rows_and_levels_of_a_picture():
    line = simulate(one_f_one_b(2, 2))
    assert line.levels == [
        [(0, 0), (0, 1), (1, 2), (6, 1), (9, 0)],  # from a forward's start to its backward's end
        [(0, 0), (1, 1), (4, 0), (4, 1), (7, 0)],
    ]
    assert line.rows[1] == [("F", "0", 1, 2), ("B", "0", 2, 4), ("F", "1", 4, 5), ("B", "1", 5, 7)]
    chunks = simulate(interleaved(2, 2, 2)).rows[0]
    assert [kind + label for kind, label, *_ in chunks][:5] == ["F0", "F1", "F0'", "F1'", "B0'"]


def test_dependencies_need_78_slots_not_71():
    assert simulate(one_f_one_b(8, 32), Times(1, 0.5, 0.5)).makespan == 78


@pytest.mark.parametrize("p, m", [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_memory_of_the_zero_bubble_schedules(p, m):
    h1, h2 = simulate(zb_h1(p, m)), simulate(zb_h2(p, m))
    assert [h2.in_flight(0), h1.in_flight(p - 1)] == [2 * p - 1, p]
    assert max(h1.in_flight(r) for r in range(p)) == p  # as 1F1B
    assert max(simulate(zb_v(p, m)).in_flight(r) for r in range(p)) <= 2 * p  # of half a stage each
    assert m >= 2 * p and simulate(zb_v(p, m)).longest_rank == pytest.approx(6 * m)  # no bubble at all


def published():
    kinds = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2")
    return [row for row in rows_of("zero_bubble_2023.csv") if row["schedule"] in kinds]


@pytest.mark.parametrize("row", published(), ids=lambda r: f"{r['model']}-{r['schedule']}")
def test_published_bubble_rates(row):
    """The bubble rates simulated from Table 9's times equal those of Table 5 (Qi et al. 2023)."""
    p, m = int(row["pp_gpus"]), int(row["num_microbatches"])
    f, i, w, send = (float(row[k]) for k in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms"))
    v = (int(row["layers"]) + 2) // p if row["schedule"] == "1F1B-I" else 1  # one layer to a chunk
    schedule = {"1F1B": one_f_one_b, "ZB-H1": zb_h1, "ZB-H2": zb_h2}.get(
        row["schedule"], lambda p, m: interleaved(p, m, v)
    )
    line = simulate(schedule(p, m), Times(f / v, i / v, w / v, send))
    rate = 1 - m * (f + i + w) / line.longest_rank
    printed = float(row["computed_bubble_rate"])
    assert abs(rate - printed) < 0.005 if row["schedule"] == "1F1B-I" else round(rate, 4) == printed


# -- PyTorch's orders ---------------------------------------------------------------------


def pytorchs(name: str, p: int, m: int, v: int) -> list[list[Op]]:
    """The operations of each rank in PyTorch's schedule of this name."""
    from torch.distributed.pipelining import schedules as torch_schedules
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, p, None, p * v
    made = torch_schedules.get_schedule_class(name)(stage if v == 1 else [stage] * v, m)
    order = made._get_pipeline_order() if v == 1 else made.pipeline_order

    def ops(actions):
        for a in actions:
            value = a and a.computation_type.value
            kind = value if value is None or isinstance(value, str) else str(a.computation_type)
            if kind in (None, "REDUCE_GRAD", "WAIT_REDUCE_GRAD"):
                continue
            if getattr(a, "sub_actions", None):
                yield from ops(a.sub_actions)
            else:
                yield Op(kind, a.microbatch_index, a.stage_index)

    orders = [list(ops(order[rank])) for rank in range(p)]
    if name == "1F1B" and orders[-1][0].microbatch == 1:
        # torch 2.13 lists the last rank's forwards as microbatches 1 to m instead of 0 to m-1. Only the list
        # is wrong: the schedule runs the right microbatches.
        orders[-1] = [o._replace(microbatch=o.microbatch - 1) if o.kind == "F" else o for o in orders[-1]]
    return orders


PYTORCHS = {  # by PyTorch's names
    "GPipe": lambda p, m, v: gpipe(p, m),
    "1F1B": lambda p, m, v: one_f_one_b(p, m),
    "Interleaved1F1B": interleaved,
    "InterleavedZeroBubble": lambda p, m, v: zb_h1(p, m, v),
    "ZBVZeroBubble": lambda p, m, v: zb_v(p, m),
}
CHUNKS = {"GPipe": 1, "1F1B": 1, "ZBVZeroBubble": 2}  # chunks of a rank that the schedule fixes


@pytest.mark.parametrize(
    "p, m, v", [(2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 7, 2), (4, 16, 2), (8, 16, 4), (4, 12, 2)]
)
@pytest.mark.parametrize("name, ours", PYTORCHS.items())
def test_orders_are_pytorchs(name, ours, p, m, v):
    v = CHUNKS.get(name, v)
    if name in ("Interleaved1F1B", "InterleavedZeroBubble") and m % (m // p):
        for refuse in (ours, lambda *sizes: pytorchs(name, *sizes)):
            with pytest.raises(ValueError):
                refuse(p, m, v)
        return
    schedule = ours(p, m, v)
    assert schedule.ops == pytorchs(name, p, m, v)
    simulate(schedule)  # and it can be run


# -- what holds for every schedule -----------------------------------------------------------


TIMES = [st.floats(0.1, 5)] * 3


@given(st.sampled_from(SIMPLE), st.integers(1, 6), st.integers(1, 20), *TIMES, st.floats(0, 1))
def test_every_operation_runs_once_after_what_it_needs(make, p, m, f, i, w, send):
    schedule = make(p, m)
    line = simulate(schedule, Times(f, i, w, send))
    done = {}
    for rank, runs in enumerate(line.runs):
        assert [run.op for run in runs] == schedule.ops[rank]
        for a, b in zip(runs, runs[1:]):
            assert b.start >= a.end
        for run in runs:
            for kind in "IW" if run.op.kind == "B" else run.op.kind:
                assert (kind, run.op.microbatch, run.op.stage) not in done
                done[kind, run.op.microbatch, run.op.stage] = run
    stages = len(schedule.rank_of)
    assert len(done) == 3 * m * stages
    for (kind, mb, k), run in done.items():
        if kind == "F" and k > 0:
            assert run.start >= done["F", mb, k - 1].end
        if kind == "I" and k < stages - 1:
            assert run.start >= done["I", mb, k + 1].end
        if kind == "I":
            assert run.start >= done["F", mb, k].end
        if kind == "W":
            assert run.end >= done["I", mb, k].end
    path = line.critical_path
    assert path[-1].end == line.makespan and path[0].start == 0
    for a, b in zip(path, path[1:]):
        assert b.start == pytest.approx(a.end) or b.start == pytest.approx(a.end + send)


def test_more_microbatches_never_mean_a_larger_bubble():
    for make in SIMPLE:
        bubbles = [simulate(make(4, m)).bubble for m in (4, 8, 16, 32)]
        assert bubbles == sorted(bubbles, reverse=True)


def test_a_slow_last_stage_sets_the_pace():
    even, heavy = (simulate(one_f_one_b(4, 16), Times(*[[1, 1, 1, x]] * 3)) for x in (1, 1.5))
    assert heavy.makespan == pytest.approx(even.makespan + 16 * 1.5, rel=0.02)


def test_messages_between_ranks_take_time():
    """On two ranks a microbatch has six messages in the interleaved order, and four in the V."""
    for schedule, sends in ((interleaved(2, 1, 2), 6), (zb_v(2, 1), 4)):
        at_once, late = (simulate(schedule, Times(send=send)).makespan for send in (0.0, 0.25))
        assert late == at_once + 0.25 * sends


def test_an_order_that_cannot_finish_says_what_each_rank_waits_for():
    first = [Op("F", 0, 0), Op("F", 1, 0), Op("B", 1, 0), Op("B", 0, 0)]
    backward_first = [Op("F", 0, 1), Op("B", 1, 1), Op("F", 1, 1), Op("B", 0, 1)]
    told = "rank 0 can never start B1 of stage 0; rank 1 can never start B1 of stage 1"
    with pytest.raises(Stuck, match=told) as stuck:
        simulate(Schedule("mine", 2, [first, backward_first], [0, 1]))
    assert stuck.value.waits == [(0, first[2], Op("I", 1, 1)), (1, backward_first[1], Op("F", 1, 1))]


@pytest.mark.parametrize("make", SIMPLE)
def test_sizes_that_make_no_sense_are_refused(make):
    with pytest.raises(ValueError, match="number of microbatches m is a whole number of at least 1, not 0"):
        make(4, 0)
    with pytest.raises(ValueError, match="number of ranks p"):
        make(0, 4)


def test_uneven_rounds_are_refused_with_the_nearest():
    sentence = "9 microbatches do not go round 4 ranks in 2 equal groups; take 8 or 10"
    with pytest.raises(ValueError, match=sentence):
        interleaved(4, 9, 2)
    with pytest.raises(ValueError, match="take 22 or 24"):
        interleaved(8, 23, 2)
    assert interleaved(8, 22, 2) and interleaved(8, 24, 2)
