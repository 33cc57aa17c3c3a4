"""Spans of all ranks on one clock, activations that are kept and freed, and pictures of both."""

import time

import ipywidgets
import pytest
import torch
import torch.distributed as dist

from drops import d07
from helpers import toy
from helpers.draw import explore, gantt
from helpers.live import live
from helpers.ranks import memory
from helpers.ranks.current import span
from three_axes.count import clock
from three_axes.paper import schedules
from three_axes.paper.simulation import simulate

pytestmark = pytest.mark.waits


def test_spans_waits_and_one_clock(world):
    def work():
        with span("F", 0):
            time.sleep(0.02)
        dist.barrier()
        if dist.get_rank() == 3:
            time.sleep(0.4)
        dist.all_reduce(torch.ones(10))

    world.run(work)
    t = world.timeline
    assert [[s.kind for s in row][0] for row in t.rows] == ["F"] * 4
    assert t.seconds(0, "wait") > 0.09 and t.seconds(0, "wait") > t.seconds(3, "wait")
    # The last rank may wait too short a time for a span in its row, but its stream has the all-reduce.
    came, left = [row[-1].start for row in t.streams], [row[-1].end for row in t.streams]
    assert max(came) < min(left)  # one clock: no rank left the all-reduce before the last rank called it
    assert "rank 0: F0" in repr(t)


@pytest.mark.parametrize("make", [schedules.gpipe, schedules.one_f_one_b])
@pytest.mark.parametrize("m", [4, 8, 16])
def test_in_flight_is_exact_and_a_step_no_shorter_than_on_paper(world, make, m):
    schedule, unit = make(4, m), 0.01
    t = d07.on_ranks(world, schedule, unit, again=False)
    paper = simulate(schedule)
    assert [t.in_flight(r) for r in range(4)] == [paper.in_flight(r) for r in range(4)]
    one = 1 * 1 * 256 * 4  # bytes of a microbatch's activation; an inner stage keeps only these
    assert [t.peak(r) / one for r in (0, 1, 2)] == [paper.in_flight(r) for r in (0, 1, 2)]
    assert t.makespan > 0.999 * unit * paper.makespan


@pytest.mark.parametrize(
    "took, asked, shortest",
    [
        ([1.04, 1.0], 2, 1.0),
        ([1.5, 1.0, 1.3, 1.04, 1.0], 4, 1.0),  # a machine that is busy at times
        ([2.0, 2.2, 1.0, 1.2, 1.4, 1.6, 1.8], 6, 1.0),  # and one that is all the time
    ],
)
def test_the_shortest_run_is_one_that_another_confirms(took, asked, shortest):
    left = iter(took)
    assert clock.shortest(lambda: next(left), float) == shortest
    assert list(left) == took[asked:]


def test_activations_rise_and_fall():
    block = toy.ToyTransformer(hidden=32).blocks[0]
    x = torch.randn(2, 8, 32, requires_grad=True)
    with memory.saved_activations(block) as held:
        y = block(x)
        full = held.now
        with memory.saved_activations(block) as inner:
            other = block(x)
        assert inner.now == full
        del other
        assert inner.now == 0 and inner.peak == full
    assert held.peak >= full > 0
    y.sum().backward()
    del y
    assert held.now == 0


def test_weights_are_not_activations_even_when_fsdp_swaps_them(world):
    def kept():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        sizes, mesh = [], init_device_mesh("cpu", (4,))
        for shard in (False, True):
            block = toy.ToyTransformer(hidden=32).blocks[0]
            if shard:
                fully_shard(block, mesh=mesh)
            with memory.saved_activations(block) as held:
                block(torch.ones(2, 8, 32, requires_grad=True))
                sizes.append(held.peak)
        return sizes

    plain, sharded = world.run(kept)[0]
    assert plain == sharded


def test_a_picture_of_measured_and_predicted(world):
    schedule = schedules.one_f_one_b(4, 4)
    measured = d07.on_ranks(world, schedule, 0.002, again=False)
    both = {"predicted": d07.on_paper(schedule), "measured": measured}
    picture = gantt.timeline(both, "1F1B", critical=True)
    assert picture.png()[:4] == b"\x89PNG"
    assert "Peaks: 4, 3, 2, 1" in picture.alt and "rank 3 F0 B0 F1 B1" in picture.alt


def test_an_explorer_moves_refuses_and_says_why():
    e = explore.schedules("1F1B", p=4, m=8)
    assert "27.3%" in e.picture.alt
    e.set(schedule="GPipe", m=16)
    assert "15.8%" in e.picture.alt and e.refusal == ""
    e.set(schedule="interleaved", m=9)
    assert "do not go round 4 ranks" in e.refusal and "GPipe" in e.picture.alt  # the last picture stays
    with pytest.raises(ValueError, match="choose from"):
        e.set(p=5)
    bundle, _ = e._repr_mimebundle_()
    assert {"image/png", "text/plain", "application/vnd.jupyter.widget-view+json"} <= set(bundle)
    e._widgets["m"].value = 12
    assert "m = 12" in e.picture.alt
    box = ipywidgets.HBox()
    assert live(box).items() <= box._repr_mimebundle_().items()


def test_a_change_in_place_is_still_found():
    layer = torch.nn.Linear(4, 4)
    with memory.saved_activations(layer):
        y = torch.ones(2, 4, requires_grad=True).exp()
        z = layer(y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()
    with memory.saved_activations(layer):
        z = layer(torch.ones(2, 4, requires_grad=True))
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        z.sum().backward()


def test_spans_inside_each_other_count_once(world):
    def nested():
        with span("F"):
            with span("F"):
                time.sleep(0.02)

    with span("F"):  # in the kernel: nothing
        world.run(nested)
    assert 0 <= world.timeline.bubble < 1
    world.run(lambda: None)
    with pytest.raises(ValueError, match="nothing was recorded"):
        world.timeline.bubble


def test_seconds_of_ranks_that_shared_a_gpu_mean_nothing_and_a_picture_says_so():
    for shared in (False, True):
        line = clock.Timeline([[clock.Span("F", "0", 0.0, 1.0)]] * 2, [[], []], shared=shared)
        axis = gantt.timeline(line).figure.axes[0].get_xlabel()
        assert ("ranks shared a GPU: seconds mean nothing" in repr(line)) is shared
        assert axis == "milliseconds" + ", which mean nothing: ranks shared a GPU" * shared
