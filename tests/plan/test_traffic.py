"""The planner's list of operations has the bytes that PyTorch's collectives get and send on real ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from drops import d14
from helpers import World, toy
from helpers.ranks import current
from helpers.toy import experts
from helpers.train import Config
from three_axes.count.traffic import Traffic
from three_axes.paper import Placement
from three_axes.paper.collectives import algorithmic_bytes
from three_axes.paper.schedules import one_f_one_b
from three_axes.plan import MODELS, Job, Layout, operations
from three_axes.plan.frameworks import TEXTBOOK, TOY
from three_axes.plan.shape import Experts, ModelShape
from three_axes.plan.traffic import calls, sent


@pytest.fixture(scope="module")
def eight():
    with World(8, timeout=60) as world:
        yield world


def step(d: int, p: int, t: int, sequence: bool = False):
    """On a rank: one step of the toy on a grid of d·p·t ranks, which are the whole world, counted."""
    grid = toy.grid_groups(d, p, t)
    stage = toy.on_grid(toy.ToyTransformer(hidden=64, seed=0), grid, sequence)
    ops = one_f_one_b(p, 4).ops[grid["pp"].get_local_rank()]
    dist.barrier()
    current.count_from_here()
    toy.grid_step(stage, *toy.make_batch(32, 16), ops, 4, grid)


def by_axis(traffic: Traffic, rank: int, sizes: dict[str, int]) -> dict[str, float]:
    """Axis -> bytes that a rank must send. Bytes of "world" belong to the axis that has all ranks, if any."""
    alone = [axis for axis, size in sizes.items() if size == len(traffic.ranks)]
    name = lambda row: alone[0] if alone and row.axis == "world" else row.axis
    return {axis: sum(row.algorithmic for row in traffic.ranks[rank] if name(row) == axis) for axis in sizes}


slow = lambda *cases: [pytest.param(case, marks=pytest.mark.slow) for case in cases]
GRIDS = [(2, 2, 2), (1, 4, 2), *slow((8, 1, 1), (4, 2, 1), (2, 1, 4), (4, 1, 2), (2, 4, 1), (1, 2, 4))]


def predicted_bytes(d: int, p: int, t: int, rank: int) -> dict[str, float]:
    """Bytes that a rank sends along each axis in `step`, by the list."""
    layout = Layout(dp=d, tp=t, pp=p, sequence_parallel=False)
    model = replace(MODELS["toy"], hidden=64, layers=4, ffn=256, head_dim=16)
    stage = Placement(layout.sizes).coordinates(rank)["pp"]
    return sent(Job(model, global_batch=32, seq_len=16, framework=TOY), layout, stage)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_of_the_toy_sends_what_the_list_says(eight, grid):
    d, p, t = grid
    eight.run(step, *grid)
    sizes = {"dp": d, "pp": p, "tp": t}
    for rank in range(8):
        predicted = predicted_bytes(*grid, rank)
        assert by_axis(eight.traffic, rank, sizes) == pytest.approx(predicted), (rank, grid)
    if eight.traffic.wire[0] is not None:  # gloo's all-reduce is the book's; the rest is headers
        for rank in range(8):
            predicted = sum(predicted_bytes(*grid, rank).values())
            assert predicted <= eight.traffic.wire[rank] < 1.1 * predicted + 20_000, (rank, grid)


SIZES = [dict(tp=2, pp=2), dict(dp=8), dict(pp=4), dict(tp=4), dict(tp=4, pp=2)]
SIZES += [dict(pp=2, schedule="interleaved")]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_real_training_sends_what_the_list_says(eight, sizes):
    config = Config(**sizes, hidden=64, seq_len=32, batch=16, microbatch=2, steps=2).checked(8)
    kept = eight.run(d14.second_step, config)[0]
    counted = dict.fromkeys(("tp", "dp", "pp"), 0.0)
    axis = {"all_reduce": "tp", "all_gather": "dp", "reduce_scatter": "dp", "send": "pp"}
    for row in eight.traffic.ranks[0]:
        if row.op in axis:
            counted[axis[row.op]] += row.algorithmic
    predicted = d14.sent_by_first(config)
    assert counted["dp"] == pytest.approx(predicted["dp"]) and counted["pp"] == predicted["pp"]
    # The loss and the gradients' norm, two numbers that all ranks share.
    assert counted["tp"] - predicted["tp"] == pytest.approx(28, abs=30)
    states = kept["parameters"] + kept["optimizer"]
    assert states == pytest.approx(d14.states_of_first(config), rel=0.02)
    assert kept["gradients"] == kept["parameters"] and kept["activations"] > 0


@pytest.mark.parametrize(
    "schedule, v, at_ends, inside", [("1F1B", 1, 1, 2), ("interleaved", 2, 3, 4), ("ZB-V", 1, 2, 4)]
)
def test_chunks_send_more(schedule, v, at_ends, inside):
    """Each chunk sends a message forward and one backward, except at the ends. At the turn of a V both stages
    are on one rank, so no message is sent."""
    job = Job(MODELS["llama-3-8b"], global_batch=8, framework=TEXTBOOK)
    layout = Layout(pp=4, interleave=v, schedule=schedule)
    listed = [sum(c.calls for c in calls(job, layout, k) if c.axis == "pp") / 8 for k in range(4)]
    assert listed == [at_ends, inside, inside, at_ends]


def test_the_layouts_order_decides_which_ranks_send_to_each_other(eight):
    """If pp is outermost, rank 0 sends to rank 1 along tp, to rank 2 along dp, and to rank 4 along pp."""
    eight.run(step, 2, 2, 2)
    sizes = Layout(dp=2, tp=2, pp=2).sizes
    if eight.traffic.matrix:
        talked = {other for other, size in enumerate(eight.traffic.matrix[0]) if size > 10_000}
        assert talked == {1, 2, 4} == {Placement(sizes).group(0, axis)[1] for axis in sizes}


@pytest.fixture(scope="module")
def four():
    with World(4, timeout=60) as world:
        yield world


def counted_like(world: World, job: Job, layout: Layout, axis: str, run) -> None:
    """On every rank the collectives of `run` must equal those of the list along one axis of a layer."""
    world.run(run)
    paper = {}
    for one in (op.sends for op in operations.layer(job, layout)):
        if one and one.axis == axis:
            size = algorithmic_bytes(one.collective, one.calls * one.payload, 4)
            paper[one.collective] = paper.get(one.collective, 0.0) + size
    for rank in range(4):
        rows = [row for row in world.traffic.ranks[rank] if row.op in paper]
        counted = {op: sum(row.algorithmic for row in rows if row.op == op) for op in paper}
        assert counted == pytest.approx({op: size for op, size in paper.items() if size}), rank


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("way, toys", [("ring", "ring"), ("gather", "gather"), ("heads", "exchange")])
def test_attention_over_context_ranks_sends_what_the_list_says(four, way, toys, kv_heads):
    b, s, h = 2, 64, 32
    model = ModelShape("one layer", 1, h, 8, 256, kv_heads=kv_heads)
    job = Job(model, global_batch=b, seq_len=s, framework=TOY.but(context=way))

    def run():
        parts = [torch.randn(b, n, s // 4, h // 8, requires_grad=True) for n in (8, kv_heads, kv_heads)]
        current.count_from_here()
        getattr(toy, f"{toys}_attention")(*parts, toy.zigzag(s, 4)).sum().backward()

    counted_like(four, job, Layout(cp=4, microbatch=b), "cp", run)


def test_an_expert_layer_sends_what_the_list_says(four):
    b, s, h, k = 2, 64, 32, 2
    model = ModelShape("one layer", 1, h, 8, 256, experts=Experts(8, k, 4 * h))
    job = Job(model, global_batch=4 * b, seq_len=s, framework=TOY)

    class Even(experts.Experts):
        def route(self, x):
            """Route the same number of tokens to each expert."""
            choice = torch.arange(len(x) * self.k).view(len(x), self.k) % self.number
            return choice, super().route(x)[1]

    def run():
        layer = experts.split_experts(Even(h, 8, k))
        x = torch.randn(b * s, h, requires_grad=True)
        current.count_from_here()
        y, _ = experts.expert_parallel(layer, x)
        row = current.rank.recorder.rows["all_to_all", "world"]
        row.algorithmic -= 8 * 8 * 3 / 4  # how many rows will come
        y.sum().backward()

    counted_like(four, job, Layout(dp=4, ep=4, microbatch=b), "ep", run)
