"""The meter counts a collective's payload exactly, and on the wire the bytes that gloo is known to send. It
counts collectives from every caller: user code, DDP, FSDP, DTensor.
"""

import sys
import time
from contextlib import nullcontext

import cloudpickle
import engine
import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from helpers import World
from helpers.ranks import memory
from three_axes.count.meter import Report
from three_axes.count.traffic import Traffic
from three_axes.paper import collectives
from three_axes.table import human

pytestmark = pytest.mark.waits
cloudpickle.register_pickle_by_value(engine)

linux = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
S = 1_200_000  # elements of float32; 2, 3, 4 and 8 divide it


@pytest.fixture(scope="module", params=[2, 3, 4, 8])
def sized(request):
    with World(request.param) as world:
        yield world


def issue(op: str, elements: int) -> None:
    """Call a collective whose whole tensor has `elements` float32 elements."""
    n, me = dist.get_world_size(), dist.get_rank()
    whole, part = torch.ones(elements), torch.ones(elements // n)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(whole, n - 1),
        "reduce": lambda: dist.reduce(whole, 0),
        "gather": lambda: dist.gather(part, list(whole.chunk(n)) if me == n - 1 else None, n - 1),
        "scatter": lambda: dist.scatter(part, list(whole.chunk(n)) if me == n - 1 else None, n - 1),
        "send": lambda: dist.send(whole, 1) if me == 0 else dist.recv(whole, 0) if me == 1 else None,
    }[op]()


@linux
@pytest.mark.parametrize(
    "op", "all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter send".split()
)
def test_payload_is_exact_and_the_wire_is_gloos(sized, op):
    n, whole = len(sized), S * 4
    for _ in range(2):
        sized.run(issue, op, S)
        traffic = sized.traffic
        for r, (counted, wire, rows) in enumerate(zip(traffic.counted, traffic.wire, traffic.ranks)):
            if op == "send" and r > 1:
                assert rows == [] and wire == 0
                continue
            mine = "recv" if op == "send" and r == 1 else op
            (row,) = rows
            assert (row.op, row.axis, row.calls, row.payload) == (mine, "world", 1, whole)
            root = 0 if op == "reduce" else n - 1
            assert counted == collectives.algorithmic_bytes(mine, whole, n, r, root)
            predicted = collectives.gloo(mine, whole, n, r, root)
            chunks = 1 << 20 if op == "reduce" else 0  # gloo cuts a reduce into pieces of whole MiB
            assert abs(wire - predicted) <= 0.005 * predicted + 2000 + chunks
            assert row.wire == wire


def test_the_root_of_a_reduce_sends_nothing(world):
    world.run(lambda: dist.reduce(torch.ones(50), 2))
    assert world.traffic.counted == [200, 200, 0, 200]


def test_the_list_forms_count_alike(world):
    def lists():
        n, part = dist.get_world_size(), torch.ones(1000)
        dist.all_gather([torch.empty(1000) for _ in range(n)], part)
        parts = [torch.ones(1000) for _ in range(n)]
        copies = [torch.ones(1000) for _ in range(n)]
        for form, result in ((dist.reduce_scatter, part), (dist.all_to_all, copies)):
            try:
                form(result, parts)
            except RuntimeError as e:  # older versions of gloo lack both; calls are counted
                assert "does not support" in str(e)

    world.run(lists)
    rows = {row.op: row.payload for row in world.traffic.ranks[3]}
    assert rows == dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 16_000)


@pytest.mark.parametrize("backward_of", [nullcontext, engine.as_on_a_gpu])
def test_ddp_functional_collectives_and_meshes_are_counted(world, backward_of):
    def everything():
        model = DistributedDataParallel(torch.nn.Linear(100, 10))
        with backward_of():
            model(torch.ones(2, 100)).sum().backward()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        (functional.all_reduce(torch.ones(50), "sum", mesh["tp"]) + 1).sum()
        dist.all_reduce(torch.ones(25), group=mesh.get_group("dp"))
        even = dist.new_group([0, 2])
        if dist.get_rank() % 2 == 0:
            dist.all_reduce(torch.ones(5), group=even)

    world.run(everything)
    rows = {(r.op, r.axis): r.payload for r in world.traffic.ranks[0]}
    assert rows["all_reduce", "world"] == (100 * 10 + 10) * 4
    assert rows["all_reduce", "tp"] == 200 and rows["all_reduce", "dp"] == 100
    assert rows["all_reduce", "ranks 0,2"] == 20


def test_a_sparse_gradient_counts_with_its_indices(world):
    """Each rank has two rows of 4 numbers with their indices, and gathers those of three other ranks."""

    def sparse():
        rows = torch.sparse_coo_tensor([[0, dist.get_rank()]], torch.ones(2, 4), (10, 4))
        dist.all_reduce(rows)
        return rows.to_dense()[0, 0].item()

    assert world.run(sparse) == [5.0] * 4
    (row,) = world.traffic.ranks[1]
    assert (row.op, row.payload, row.algorithmic) == ("all_reduce", 2 * (4 * 4 + 8), 3 * 2 * (4 * 4 + 8))


@linux
def test_a_functional_reduce_scatter_has_its_bytes_on_the_wire(world):
    def twice():
        for _ in range(2):
            scattered = functional.reduce_scatter_tensor(torch.ones(4096, 64), "sum", 0, dist.group.WORLD)
            functional.wait_tensor(scattered)

    world.run(twice)
    (row,) = world.traffic.ranks[0]
    assert world.traffic.not_waited == 0 and row.wire == pytest.approx(2 * row.algorithmic, rel=0.01)


def test_fsdp_and_tensor_parallel_are_seen(world):
    def sharded():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        model.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient))
        model(torch.ones(2, 64)).sum().backward()
        pair = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False))
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        pair(torch.ones(2, 8)).sum().backward()

    world.run(sharded)
    rows = {(r.op, r.axis): (r.calls, r.payload) for r in world.traffic.ranks[1]}
    assert rows["reduce_scatter", "dp"] == (1, 64 * 64 * 4)
    assert rows["all_reduce", "dp"] == (1, 64 * 64)  # of the hook: a shard
    assert rows["all_gather", "dp"][1] == rows["all_gather", "dp"][0] * 64 * 64 * 4
    assert rows["all_reduce", "tp"] == (1, 2 * 8 * 4)  # both meshes use the same group of all ranks


@pytest.mark.parametrize("op", ["barrier", "all_reduce"])
def test_waiting_is_timed_and_ddps_in_cpp_as_well(world, op):
    def late():
        model = DistributedDataParallel(torch.nn.Linear(100, 10))
        loss = model(torch.ones(2, 100)).sum()
        time.sleep(0.6 if dist.get_rank() == 2 else 0)
        dist.barrier() if op == "barrier" else loss.backward()

    world.run(late)
    waited = [next(r.waited for r in rows if r.op == op) for rows in world.traffic.ranks]
    assert all(0.2 < waited[r] < 2 for r in (0, 1, 3)) and waited[2] < 0.2


@linux
def test_the_matrix_has_the_bytes_of_each_pair_of_ranks(world):
    world.run(issue, "all_reduce", S)
    for a, row in enumerate(world.traffic.matrix):
        for b, sent in enumerate(row):
            assert (sent > S * 4) == (b == (a - 1) % 4)  # gloo's ring runs downwards
    world.run(issue, "gather", S)
    assert [row[3] > 0 for row in world.traffic.matrix] == [True, True, True, False]


@linux
def test_a_world_formed_anew_inside_a_call_is_counted(world, tmp_path):
    def again(meeting):
        rank, n = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=n)
        dist.all_reduce(torch.ones(S))

    world.run(again, tmp_path / "meeting")
    (row,) = world.traffic.ranks[0]
    assert 1.5 * 4 * S < row.wire < 1.51 * 4 * S


def test_two_ranks_may_have_the_same_port():
    """The system may give two connections the same port if they connect to different ones. Here ranks 0 and 2
    both connect from port 50000."""
    reports = [
        Report(wire={(50000, 4001): 10}),
        Report(wire={(4001, 50000): 20, (4001, 50007): 30}),
        Report(wire={(50007, 4001): 40, (50000, 4003): 50}),
        Report(wire={(4003, 50000): 60}),
    ]
    assert Traffic(reports).matrix == [[0, 10, 0, 0], [20, 0, 30, 0], [0, 40, 0, 50], [0, 0, 60, 0]]


@linux
def test_bytes_of_overlapping_kinds_are_known_only_in_total(world):
    def overlap():
        time.sleep(0.3 if dist.get_rank() == 3 else 0)  # none of the three can end before all are called
        a = dist.all_reduce(torch.ones(S), async_op=True)
        b = dist.all_reduce(torch.ones(S), async_op=True)
        c = dist.broadcast(torch.ones(S), 0, async_op=True)
        for work in (a, b, c):
            work.wait()
        dist.all_reduce(torch.ones(S), group=None)

    world.run(overlap)
    reduce, broadcast = world.traffic.ranks[0]
    assert reduce.calls == 3 and reduce.wire is None and broadcast.wire is None
    assert world.traffic.wire[0] == pytest.approx(3 * 1.5 * S * 4 + 2 * S * 4, rel=0.005)
    assert world.traffic.peak_in_flight[0] == 3 * S * 4


@pytest.mark.parametrize("waits, forgotten", [(slice(None), 0), (slice(-1, None), 2), (slice(0), 3)])
def test_a_late_wait_counts_as_a_wait(world, waits, forgotten):
    def in_turn():
        works = []
        for _ in range(3):
            works.append(dist.all_reduce(torch.ones(10), async_op=True))
            while not works[-1].is_completed():  # the next one begins when nothing is under way
                time.sleep(0.001)
        for work in works[waits]:
            work.wait()

    world.run(in_turn)
    assert world.traffic.not_waited == forgotten * len(world)


def test_without_tcp_counters_the_column_says_so(world, monkeypatch):
    def unavailable():
        from three_axes.count import wire

        wire.available = False

    world.run(unavailable)
    try:
        world.run(issue, "all_reduce", 1200)
        assert world.traffic.wire == [None] * 4 and world.traffic.matrix is None
        assert "n/a" in repr(world.traffic) and "n/a" in repr(world.traffic.against(7200))
    finally:
        world.run(lambda: setattr(__import__("three_axes.count.wire", fromlist=["wire"]), "available", True))


def test_the_table(world):
    world.run(issue, "all_reduce", S)
    assert "all_reduce  world      1  4.80 MB      7.20 MB      7.20 MB" in repr(world.traffic)
    table = world.traffic.against(7.2e6)
    assert table.rows[2] == ["2", "7.20 MB", "7.20 MB", "7.20 MB", "1.00"]
    assert "<table" in table._repr_html_()
    with pytest.raises(ValueError, match="3 predictions for 4 ranks"):
        world.traffic.against([1, 2, 3])
    world.run(lambda: None)
    assert "no bytes moved" in repr(world.traffic)


def test_bytes_for_people():
    sizes = [0, 999, 999.6, 9994, 9996, 99_960, 999_600, 1.12e12, None]
    shown = ["0 B", "999 B", "1.00 kB", "9.99 kB", "10.0 kB", "100 kB", "1.00 MB", "1.12 TB", "n/a"]
    assert list(map(human, sizes)) == shown


def test_memory_by_kind():
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 50, bias=False), torch.nn.ReLU(), torch.nn.Linear(50, 10, bias=False)
    )
    model[2].also = model[2].weight  # one tensor under two names
    optimizer = torch.optim.AdamW(model.parameters())
    with memory.saved_activations(model) as held:
        loss = model(torch.ones(8, 100)).sum()
    loss.backward()
    optimizer.step()
    weights = (100 * 50 + 50 * 10) * 4
    activations = (8 * 100 + 8 * 50) * 4  # the input, and ReLU's output, which the last layer shares
    known = dict(parameters=weights, gradients=weights, optimizer=2 * weights, activations=activations)
    assert memory.by_kind(model, optimizer, held.peak).items() >= known.items()


def test_collectives_inside_a_dtensor_operator_are_counted(world):
    def product():
        mesh = init_device_mesh("cpu", (4,))
        a, b = (DTensor.from_local(torch.ones(64, 64), mesh, [Shard(dim)]) for dim in (0, 1))
        return (a @ b).shape

    world.run(product)
    counted = world.traffic.counted[0]
    assert counted > 0 and world.traffic.wire[0] == pytest.approx(counted, rel=0.1, abs=3000)
