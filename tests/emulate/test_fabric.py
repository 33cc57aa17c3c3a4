"""`World(fabric=...)` emulates a network: operations take the time of the theory and can be stopped."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import worlds

from helpers import World, toy
from helpers.emulate import networks
from helpers.emulate.uplink import Oversubscribed, ends_of, leaving
from helpers.ranks.failure import RankError
from helpers.toy.names import reduce_scatter
from three_axes.count.clock import shortest
from three_axes.paper.collectives import hop_by_hop
from three_axes.paper.schedules import gpipe

pytestmark = pytest.mark.waits

# Nodes of 4 ranks; bytes/s inside a node and between nodes, and seconds of latency.
SLOW = replace(networks.nodes("two slow nodes", 4, 5e6, 1e6, 5e-3), intra_node_latency=1e-3)
shared_world = worlds.shared(8, many=1000, timeout=20, fabric=SLOW)  # many: the most groups it may have


def best(world, fn, *args, enough=0.0):
    """Seconds of the shortest of at most ten runs, because a busy machine only adds time. A run takes as long
    as its slowest rank. A run that is shorter than `enough` is the last.
    """
    least = float("inf")
    for _ in range(10):
        least = min(least, max(world.run(fn, *args)))
        if least <= enough:
            break
    return least


def takes(world, expected, fn, *args, rel=0.1):
    """Check the shortest run: at most `rel` less than the theory's seconds, and not much more."""
    measured = best(world, fn, *args, enough=(1 + rel) * expected)
    assert (1 - rel) * expected < measured <= 1.5 * expected + 0.02, (measured, expected)


def seconds(run, group=None):
    """The seconds that `run` takes on this rank, if all ranks begin together."""
    dist.barrier(group)
    start = time.monotonic()
    run()
    return time.monotonic() - start


def timed(op, elements, members):
    """On a rank: the seconds of a collective among `members`."""
    group = dist.new_group(members) if len(members) < 8 else None
    rank, x = dist.get_rank(), torch.ones(elements)
    parts = [torch.ones(elements // len(members)) for _ in members]
    if rank not in members:
        return 0.0
    calls = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "all_gather": lambda: dist.all_gather(parts, parts[0].clone(), group=group),
        "reduce_scatter": lambda: reduce_scatter(parts[0].clone(), x, group=group),
        "broadcast": lambda: dist.broadcast(x, members[0], group=group),
        "send": lambda: dist.send(x, members[1]) if rank == members[0] else dist.recv(x, members[0]),
    }
    return seconds(calls[op], group)


@pytest.mark.parametrize("members", [[0, 1, 2, 3], list(range(8)), [0, 4], [1, 2]], ids=str)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"])
def test_a_collective_takes_what_the_theory_says(world, op, members):
    if op == "send":
        members = members[:2]
    elements = 50_000
    takes(world, hop_by_hop(op, 4 * elements, tuple(members), SLOW), timed, op, elements, members)


def test_two_at_once_share_the_line(world):
    def both():
        groups = [dist.group.WORLD, dist.new_group(list(range(8)))]

        def run():
            works = [dist.all_reduce(torch.ones(50_000), group=g, async_op=True) for g in groups]
            for work in works:
                work.wait()

        return seconds(run)

    takes(world, 2 * hop_by_hop("all_reduce", 2e5, tuple(range(8)), SLOW), both)


def test_a_collective_begins_when_the_last_rank_has_come(world):
    def late():
        def run():
            time.sleep(0.1 if dist.get_rank() == 3 else 0)
            dist.all_reduce(torch.ones(50_000))

        return seconds(run)

    takes(world, 0.1 + hop_by_hop("all_reduce", 2e5, tuple(range(8)), SLOW), late)


def test_a_rank_can_compute_while_a_collective_runs(world):
    def overlapped():
        def run():
            work = dist.all_reduce(torch.ones(50_000), async_op=True)
            time.sleep(0.1)
            work.wait()

        return seconds(run)

    takes(world, max(0.1, hop_by_hop("all_reduce", 2e5, tuple(range(8)), SLOW)), overlapped)


def test_values_and_bytes_are_real(world):
    def work():
        x = torch.full((1000,), float(dist.get_rank()))
        dist.all_reduce(x)
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
        ddp(torch.ones(2, 100)).sum().backward()
        return x[0].item()

    assert world.run(work) == [28.0] * 8
    assert world.traffic.wire[0] is None or world.traffic.wire[0] > 2 * 7 / 8 * 40_000


def test_ddp_and_fsdp_are_held_back(world):
    def step(kind):
        model = torch.nn.Linear(200, 100, bias=False)
        if kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
        run = lambda: model(torch.ones(2, 200)).sum().backward()
        run(), run()  # DDP rebuilds its buckets after the first
        return seconds(run)

    takes(world, hop_by_hop("all_reduce", 80_000, tuple(range(8)), SLOW), step, "ddp", rel=0.2)
    least = 0.9 * hop_by_hop("reduce_scatter", 80_000, tuple(range(8)), SLOW)
    assert best(world, step, "fsdp", enough=1) > least


@pytest.mark.parametrize("begun", [False, True])
def test_a_stop_does_not_wait_for_a_delayed_operation(world, begun):
    """This holds also if all ranks have started the delayed operation (`begun`)."""

    def hang():
        if dist.get_rank() == 5 and not begun:
            raise ValueError("stop here")
        work = dist.all_reduce(torch.ones(2_000_000), async_op=begun)  # 4 s on this network
        if dist.get_rank() == 5:
            time.sleep(0.3)
            raise ValueError("stop here")
        if begun:
            work.wait()

    start = time.monotonic()
    with pytest.raises(RankError, match="stop here"):
        world.run(hang)
    assert time.monotonic() - start < 3
    assert world.run(lambda: dist.get_rank()) == list(range(8))
    expected = hop_by_hop("all_reduce", 2e5, tuple(range(8)), SLOW)
    takes(world, expected, timed, "all_reduce", 50_000, list(range(8)))


def test_a_pipeline_of_stand_ins_takes_what_its_schedule_says(world):
    def step():
        group = dist.new_group([0, 1])
        if dist.get_rank() > 1:
            return 0.0
        chunks, ops = {dist.get_rank(): toy.StandIn(0.02, 0.02, 0.0)}, gpipe(2, 2).ops[dist.get_rank()]
        batch = [whole.chunk(2) for whole in toy.make_batch(4, 8)]
        return seconds(lambda: toy.run_schedule(chunks, ops, [0, 1], *batch, group), group)

    send = hop_by_hop("send", 2 * 8 * 256 * 4, (0, 1), SLOW)
    takes(world, 2 * (3 * 0.02 + send), step, rel=0.2)


def test_an_invalid_fabric_is_refused():
    with pytest.raises(TypeError, match="a fabric is a three_axes.plan.Network"):
        World(2, fabric="fast")
    with pytest.raises(TypeError, match="needs counted=True"):
        World(2, fabric=SLOW, counted=False)


def test_a_world_says_that_its_network_is_emulated(world):
    assert "on an emulated network (two slow nodes, 4 ranks to a node)" in repr(world)


def test_a_rank_that_waits_in_cpp_is_stopped_by_a_failure(world):
    def functional():
        import torch.distributed._functional_collectives as fc

        if dist.get_rank() == 1:
            time.sleep(0.2)
            raise ValueError("the one at fault")
        x = fc.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 0
        globals()["went_on"] = True
        return x

    with pytest.raises(RankError, match="rank 1 raised ValueError: the one at fault"):
        world.run(functional)
    assert world.run(lambda: "went_on" in globals()) == [False] * 8


def test_a_sender_sends_one_thing_at_a_time(world):
    def fan():
        rank, x = dist.get_rank(), torch.ones(50_000)
        dist.barrier()
        start = time.monotonic()
        if rank == 0:
            for work in [dist.isend(x, r) for r in (1, 2, 3)]:
                work.wait()
        elif rank < 4:
            dist.recv(x, 0)
        return start, time.monotonic()

    def arrivals():
        ran = world.run(fan)
        sent = ran[0][0]  # not the receiver's start: a late receiver waits less
        return [end - sent for _, end in ran[1:4]]

    one = hop_by_hop("send", 2e5, (0, 1), SLOW)
    assert shortest(arrivals, sum) == pytest.approx([one, 2 * one, 3 * one], rel=0.3)


def test_a_receive_from_anybody_works(world):
    def anybody():
        x = torch.zeros(1)
        if dist.get_rank() == 0:
            return dist.recv(x) + x.item()
        if dist.get_rank() == 3:
            dist.send(x + 1, 0)

    assert world.run(anybody)[0] == 4


@pytest.mark.slow
def test_many_groups_leave_no_threads(world):
    def groups():
        import threading

        for _ in range(10):
            group = dist.new_group(list(range(8)))
            dist.all_reduce(torch.ones(1), group=group)
            dist.destroy_process_group(group)
        return threading.active_count()

    world.run(groups)
    assert max(world.run(groups)) < 60


@pytest.mark.parametrize(
    "passing, ends",
    [
        ([(0.0, 10.0)], [1.0]),
        ([(0.0, 10.0), (0.0, 10.0)], [2.0, 2.0]),
        ([(0.0, 10.0), (0.5, 10.0)], [1.5, 2.0]),
        ([(0.0, 20.0), (0.0, 5.0)], [2.5, 1.0]),
        ([(3.0, 10.0), (0.0, 10.0)], [4.0, 1.0]),
    ],
)
def test_messages_share_an_uplink(passing, ends):
    assert ends_of(passing, 10.0) == pytest.approx(ends)


def test_bytes_that_leave_a_node():
    assert leaving("all_reduce", 8.0, [0, 4], SLOW) == {0: 8.0, 1: 8.0}
    assert leaving("all_reduce", 8.0, range(8), SLOW) == {0: 14.0, 1: 14.0}
    assert leaving("all_to_all", 8.0, range(8), SLOW) == {0: 16.0, 1: 16.0}
    assert leaving("send", 8.0, [5, 2], SLOW) == {1: 8.0}


def test_groups_share_the_uplink_of_their_node():
    def reduced(alone):
        pairs = [dist.new_group([r, r + 4]) for r in range(4)]
        mine = dist.get_rank() % 4
        run = lambda: dist.all_reduce(torch.ones(25_000), group=pairs[mine])
        return seconds(run if not alone or mine == 0 else lambda: None)

    network = Oversubscribed(**{**vars(SLOW), "name": "4 to 1", "uplink_bandwidth": 1e6})
    single = hop_by_hop("all_reduce", 1e5, (0, 4), network)
    with World(8, timeout=20, fabric=network) as world:
        takes(world, single, reduced, True)
        takes(world, 0.4, reduced, False)


def test_an_uplink_has_a_bandwidth():
    with pytest.raises(ValueError, match="uplink_bandwidth"):
        Oversubscribed(name="none", uplink_bandwidth=0)
