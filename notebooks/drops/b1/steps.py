"""Functions for the cells of b1: FSDP's steps on ranks, their bytes (ours, PyTorch's), their timelines."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers import toy
from helpers.emulate import networks
from helpers.ranks import World, current
from three_axes.count import Span, Timeline, Traffic, clock
from three_axes.plan import CLUSTERS, Cluster, Estimate, Job, Layout, estimate, find_model, sent
from three_axes.table import Table, human

S = 16  # tokens of a sequence
model = lambda: toy.ToyTransformer(hidden=64, seq_len=S)
LAYERS = len(model())
# Emulated: a rank sends 12 MB/s inside its node, and a tenth of that out of it.
ONE_NODE, TWO_NODES = networks.four_ranks(12e6)
SECONDS = {"F": 3e-7, "B": 6e-7}  # emulated, for one parameter: a block takes 15 ms forward, 30 ms backward
WEIGHTS = 4 * sum(p.numel() for p in model().parameters())  # bytes of all weights
BLOCK = 4 * sum(p.numel() for p in model().blocks[0].parameters())


def mine(m: int) -> list[torch.Tensor]:
    """This rank's tokens and targets for m microbatches, each of the same size whatever m is."""
    return [toy.my_share(t, dist.get_rank(), dist.get_world_size()) for t in toy.make_batch(4 * m, S)]


def groups(mesh_shape: tuple[int, ...] | None) -> tuple:
    """(shard, replicate): this rank's groups of a mesh of shape (replicate, shard). (None, None) without a
    mesh: weights are sharded over all ranks.
    """
    if mesh_shape is None:
        return None, None
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    return mesh["shard"].get_group(), mesh["replicate"].get_group()


def step_traffic(world: World, mesh: tuple[int, ...] | None = None, m: int = 1, **how) -> Traffic:
    """The bytes of one step. mesh: (replicate, shard) for HSDP. how: arguments of `toy.fsdp_order`."""

    def run():
        layers = toy.shard_layers(model(), *groups(mesh))
        toy.run_order(layers, toy.fsdp_order(LAYERS, m, **how), *mine(m))

    world.run(run)
    return world.traffic


def step_by_pytorch(world: World, m: int = 1, reshard: bool = True, hold: bool = False) -> Traffic:
    """The bytes of one step of the same layers with PyTorch's `fully_shard`."""

    def run():
        wrapped = model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        for part in wrapped:
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(wrapped, mesh=mesh)
        for k, (tokens, targets) in enumerate(zip(*(t.chunk(m) for t in mine(m)))):
            last = k == m - 1 or not hold
            wrapped.set_is_last_backward(last)
            wrapped.set_reshard_after_backward(last)
            wrapped.set_requires_gradient_sync(last)
            (toy.loss_of(wrapped(tokens), targets) / m).backward()

    world.run(run)
    return world.traffic


def side_by_side(runs: dict[str, tuple[Traffic, Traffic]]) -> Table:
    """Calls and bytes of rank 0, by hand and by PyTorch. runs: name -> (by hand, by `fully_shard`)."""
    rows = []
    for name, (by_hand, by_pytorch) in runs.items():
        for name, way, traffic in ((name, "by hand", by_hand), ("", "fully_shard", by_pytorch)):
            calls = [str(traffic.calls(op)) for op in ("all_gather", "reduce_scatter")]
            rows.append([name, way, *calls, human(traffic.counted[0])])
    return Table(["one step", "", "all-gathers", "reduce-scatters", "counted"], rows)


def _watching(layers: list[toy.Layer], streams: list[Span], levels: list[tuple[float, int]]):
    """The `around` of `toy.run_order` that makes compute take its emulated time, adds the span of each
    collective to `streams`, and the bytes of whole weights to `levels`.
    """

    @contextmanager
    def around(what: str, i: int, k: int):
        start = time.monotonic()
        if what in SECONDS:
            with current.span(what, i):
                time.sleep(SECONDS[what] * layers[i].n)
                yield
            return
        yield
        levels.append((start, sum(layer.bytes_whole for layer in layers)))
        work = {"gather": layers[i].arriving, "reduce": layers[i].reducing}.get(what)
        if work:
            work.get_future().add_done_callback(
                lambda _: streams.append(Span(what, str(i), start, time.monotonic()))
            )

    return around


def run_on_clock(order, mesh: tuple[int, ...] | None = None) -> tuple[float, list, list, list[Span]]:
    """On a rank: run an order, with emulated compute. Returns (seconds, spans of compute, levels, spans of
    collectives).

    Collectives of a group follow one another, so the span of each begins when it was called or, if that is
    later, when the collective before it ended.
    """
    m = 1 + max(k for *_, k in order)
    layers, streams, levels = toy.shard_layers(model(), *groups(mesh)), [], []
    toy.run_order(layers, [("gather", 0, 0), ("F", 0, 0), ("free", 0, 0)], *mine(1))  # a warm-up
    dist.barrier()
    current.count_from_here()
    start = time.monotonic()
    toy.run_order(layers, order, *mine(m), around=_watching(layers, streams, levels))
    seconds = time.monotonic() - start
    while len(streams) < sum(what in ("gather", "reduce") for what, *_ in order):
        time.sleep(1e-3)  # another thread records the ends of the last collectives
    in_turn, until = [], 0.0
    for s in sorted(streams, key=lambda s: s.end):
        in_turn.append(s._replace(start=max(s.start, until)))
        until = s.end
    return seconds, current.spans_so_far(), levels, in_turn


def order_timeline(world: World, order: list[tuple], ranks: int = 4) -> Timeline:
    """The timeline of a step in this order: compute, gathers and reductions, bytes of whole weights; the
    shortest of a few. The world has an emulated network. ranks: number of ranks in the timeline, from rank 0
    on; all do the same.
    """
    once = lambda: Timeline(*list(zip(*world.run(run_on_clock, order)[:ranks]))[1:])
    return clock.shortest(once, lambda timeline: timeline.makespan)


def hybrid(meshes: dict[str, tuple[int, ...] | None]) -> tuple[dict[str, float], dict[str, Traffic]]:
    """Seconds and traffic of a step on two emulated nodes of two, for each mesh of (replicate, shard)."""
    seconds, traffic, order = {}, {}, toy.fsdp_order(LAYERS)
    with World(4, fabric=TWO_NODES) as world:
        for name, mesh in meshes.items():
            once = lambda mesh=mesh: max(rank[0] for rank in world.run(run_on_clock, order, mesh))
            seconds[name] = clock.shortest(once, float)
            traffic[name] = world.traffic
    return seconds, traffic


def between_nodes(traffic: Traffic) -> float | None:
    """Bytes that ranks 0 and 1 sent to ranks 2 and 3, and back. None if the system does not count them."""
    if traffic.matrix is None:
        return None
    return sum(traffic.matrix[a][b] for a in range(4) for b in range(4) if a // 2 != b // 2)


# -- a real model: what a GPU holds and sends ------------------------------------------------------

MODEL, CLUSTER, GPUS, SEQ = find_model("llama-2-13b"), CLUSTERS["dgx-h100"], 64, 512
CODE = {
    "DP": (Layout(dp=GPUS), "nothing"),
    "FSDP": (Layout(dp=GPUS, zero=3), "one call a layer"),
    "TP 8": (Layout(dp=8, tp=8), "every matrix is cut"),
    "PP 8": (Layout(dp=8, pp=8), "forward is cut in stages"),
}


def _step(layout: Layout, cluster: Cluster = CLUSTER, tokens: int = 4096) -> Estimate:
    """The planner's step with so many tokens on a rank, or in a microbatch of a pipeline."""
    b = tokens // SEQ
    return estimate(Job(MODEL, cluster, GPUS * b, SEQ), replace(layout, microbatch=b))


def why_default() -> Table:
    """For each way to split: states on a GPU, bytes that it sends in a step, and the change of the model's
    code.
    """
    rows = []
    for name, (layout, change) in CODE.items():
        e = _step(layout)
        states = sum(e.memory[kind] for kind in ("weights", "gradients", "optimizer"))
        rows.append([name, human(states), human(sum(sent(e.job, e.layout).values())), change])
    columns = ["", "states on a GPU", "sent by a GPU", "change of the model's code"]
    return Table(columns, rows, title=f"{MODEL.name} on {GPUS} H100s, 4,096 tokens a GPU")


def exposed() -> dict[str, list[tuple[int, float]]]:
    """Percent of a step by which FSDP's traffic makes it longer, by tokens on a GPU."""
    clusters = {"whole nodes of eight": CLUSTER, "one rank a node": replace(CLUSTER, gpus_per_node=1)}
    at = lambda cluster, n: _step(CODE["FSDP"][0], cluster, n)
    share = lambda e: 100 * e.time["data parallel"] / e.step_seconds
    tokens = [SEQ << k for k in range(6)]
    return {name: [(n, share(at(cluster, n))) for n in tokens] for name, cluster in clusters.items()}


def answer(early: Timeline) -> tuple[str, str]:
    """The arguments of `guess.reveal`: how many layers are whole at once."""
    whole = early.peak(0) / BLOCK
    option = {1: "one", 2: "two", 6: "all six"}.get(whole, f"none of these: {whole:g}")
    return option, "One layer computes, and the next one is on its way. That is the price of prefetch."
