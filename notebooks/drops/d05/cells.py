"""Functions for the cells of drop 05's notebook, and constants that its exercises use too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from drops import lines
from drops.measured import BUSY
from helpers import toy
from helpers.emulate import networks
from helpers.ranks import World, current, saved_activations, span
from three_axes.count import Span, Timeline, Traffic, shortest
from three_axes.table import Table, human

line = lines.shows  # the reader's, or the course's
# Emulated: four machines with one rank each, on 100 Mb/s Ethernet. Compute is emulated too, 20 and 40 ms a
# block.
NETWORK = networks.ETHERNET
FORWARD, BACKWARD = 0.020, 0.040
BUCKET = 100_000  # bytes of gradients that are sent together


def forward(world: World) -> Table:
    """A row for each layer of one forward pass: the shape of its output, the bytes kept for backward until
    then, and the bytes sent. Every rank takes its share of 16 sequences of 16 tokens. The last row has each
    rank's loss.
    """

    def follow():
        model = toy.ToyTransformer(hidden=64)
        rank, size = dist.get_rank(), dist.get_world_size()
        x, targets = (toy.my_share(t, rank, size) for t in toy.make_batch(16, 16))
        lines = []

        def note(name: str, has: str) -> None:
            sent = sum(row.payload for row in current.counted_so_far())
            lines.append([name, has, human(held.now), human(sent)])

        with saved_activations(model) as held:
            note("tokens", " × ".join(map(str, x.shape)))
            for name, layer in zip(("embedding", *(f"block {k}" for k in range(4)), "output layer"), model):
                x = layer(x)
                note(name, " × ".join(map(str, x.shape)))
            loss = toy.loss_of(x, targets)
            note("loss", f"{loss.item():.2f}")
        return lines

    ranks = world.run(follow)
    *rows, (loss, _, *more) = ranks[0]
    losses = " | ".join(lines[-1][1] for lines in ranks)
    columns = ["after", "a rank has", "kept for backward", "sent so far"]
    title = f"one forward on {len(ranks)} ranks, {16 // len(ranks)} sequences each"
    return Table(columns, [*rows, [loss, losses, *more]], title=title)


def paced_model() -> toy.ToyTransformer:
    """The toy with hidden 64, whose blocks take as long as if each rank had a device of its own."""
    model = toy.ToyTransformer(hidden=64)
    for block in model.blocks:
        toy.pace(block, FORWARD, BACKWARD)
    return model


def trace(world: World, how: str) -> tuple[Timeline, Traffic]:
    """The timeline of a data-parallel step, and its bytes: the shortest of a few.

    how: when gradients are sent: 'alone' (never), 'after' backward, in 'buckets' during backward, or 'DDP'
    (PyTorch's).
    """

    def steps():
        model, average = paced_model(), lambda: None
        if how == "after":
            average = partial(toy.average_gradients, model)
        elif how == "buckets":
            average = toy.overlap_gradients(model, BUCKET)
        elif how == "DDP":
            model = DistributedDataParallel(model, bucket_cap_mb=BUCKET / 2**20)
        optimizer = torch.optim.AdamW(model.parameters())
        rank, size = dist.get_rank(), dist.get_world_size()
        for i in range(3):  # DDP makes its buckets after the first step
            tokens, targets = (toy.my_share(t, rank, size) for t in toy.make_batch(16, 16, seed=i))
            current.count_from_here()  # so only the last step is counted
            dist.barrier()
            with span("F"):
                loss = toy.loss_of(model(tokens), targets)
            with span("B"):
                loss.backward()
            average()
            with span("step"):
                optimizer.step()
                optimizer.zero_grad()

    def once():
        world.run(steps)
        line = world.timeline
        line.streams = [[_as_lane(s) for s in row] for row in line.streams]
        # The barrier before the step is no part of the step.
        line.rows = [[s for s in row if not s.label.startswith("barrier")] for row in line.rows]
        return line, world.traffic

    return shortest(once, lambda pair: pair[0].makespan)


def _as_lane(sent: Span) -> Span:
    """A span; if it is an all-reduce, of the kind that a timeline draws in the network's lane."""
    return sent._replace(kind="reduce") if sent.label.startswith("all_reduce") else sent


def ready_last() -> float:
    """The share of the gradients that backward computes last: those of block 0 and of the embedding."""
    model = paced_model()
    size = lambda part: sum(p.numel() for p in part.parameters())
    return (size(model) - sum(map(size, model.blocks[1:])) - size(model[-1])) / size(model)


def exposed(timeline: Timeline, alone: Timeline) -> float:
    """Seconds by which communication makes a step longer than the same step without."""
    return timeline.makespan - alone.makespan


def on_networks(alone: Timeline) -> Table:
    """What the all-reduce adds to the step, in buckets, on this network, on one a quarter as fast, and on one
    an eighth as fast: by the line `shows`, under backward, and measured. alone: a step that sends nothing.
    """
    gradients, rows = 4 * sum(p.numel() for p in paced_model().parameters()), []
    for times in (1, 4, 8):
        speed = NETWORK.inter_node_bandwidth / times
        network = replace(NETWORK, name=f"1/{times} of {NETWORK.name}", inter_node_bandwidth=speed)
        with World(4, fabric=network) as world:
            buckets, _ = trace(world, "buckets")
        seconds = lines.all_reduce(gradients, 4) / speed
        shown = seconds, line(seconds, 4 * BACKWARD), round(exposed(buckets, alone), 2)
        rows.append([f"{speed / 1e6:.1f} MB/s", *(f"{1e3 * x:.0f} ms" for x in shown)])
    columns = ["network", "all-reduce", "predicted", "measured"]
    return line.below(Table(columns, rows, title="what the step grows by, in buckets"))


def begun_in_backward(timeline: Timeline) -> str:
    """How many of a rank's all-reduces began before its backward ended, on the rank with the fewest: "7 of
    7".

    This is an order of events on one rank, so a busy machine does not change it.
    """
    counts = []
    for row, stream in zip(timeline.rows, timeline.streams):
        ends = max(s.end for s in row if s.kind == "B")
        begins = [s.start for s in stream if s.label.startswith("all_reduce")]
        counts.append((sum(at < ends for at in begins), len(begins)))
    early, of = min(counts)
    return f"{early} of {of}"


def answer(after: Timeline, buckets: Timeline, alone: Timeline) -> tuple[str, str]:
    """The arguments of `guess.reveal`: how much of the all-reduce still makes the step longer."""
    share = exposed(buckets, alone) / exposed(after, alone)
    shows = "all of it" if share >= 0.98 else "a part of it" if share > 0.02 else "nothing"
    why = (
        "Backward hides the first buckets. The gradients of the first block and of the embedding come last,"
        " and no backward is left to hide them: they are the **tail**."
    )
    return shows, BUSY if shows == "all of it" else why
