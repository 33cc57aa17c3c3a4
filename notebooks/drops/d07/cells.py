"""Functions for the cells of drop 07's notebook; its exercises use some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from drops import lines
from drops.d04 import step_by, timed_step
from helpers import toy
from helpers.ranks import World, current, memory
from three_axes.count import Timeline, Traffic, clock
from three_axes.paper import SCHEDULES, Schedule, simulate, simulation
from three_axes.table import Table

line, stage_sends = lines.bubble, lines.stage_sends  # the reader's, or the course's

# Seconds of a forward in a `toy.StandIn`, a stage that only takes time; each half of backward takes as long.
UNIT = 0.030


def on_ranks(
    world: World, schedule: Schedule, unit: float = UNIT, work: Sequence[float] = (), again: bool = True
) -> Timeline:
    """A schedule run on real ranks, with timed stand-ins for compute. A forward takes `unit` seconds; with v
    chunks on a rank, a chunk's forward takes unit / v.

    work: how many times `unit` each stage takes, if they differ. again: run it a few times, and return the
    shortest run.
    """

    def run():
        chunks = {
            k: toy.StandIn(*[unit / schedule.v * (work[k] if work else 1)] * 3)
            for k, at in enumerate(schedule.rank_of)
            if at == dist.get_rank()
        }
        with memory.saved_activations(torch.nn.ModuleList(chunks.values())):
            dist.barrier()
            step_by(schedule, chunks, toy.make_batch(schedule.m, 1), around=current.around)

    def once():
        world.run(run)
        return world.timeline

    return clock.shortest(once, lambda t: t.makespan) if again else once()


def on_paper(schedule: Schedule, unit: float = UNIT) -> simulation.Timeline:
    """The simulated timeline in seconds, so that it can be drawn beside a measured one."""
    simulated = simulate(schedule)  # in whole units: sums are exact, so what ends together stays together
    return replace(simulated, start=unit * simulated.start, end=unit * simulated.end, unit="s")


def idle_shares(p: int, many: Sequence[int]) -> Table:
    """The bubble of p stages for several numbers of microbatches: by the line, and of the timelines."""
    rows = []
    for m in many:
        shares = line(m, p), *(simulate(SCHEDULES[name].make(p, m)).bubble for name in ("GPipe", "1F1B"))
        rows.append([str(m), *(f"{share:.1%}" for share in shares)])
    return line.below(Table(["microbatches", "predicted", "GPipe", "1F1B"], rows, title="idle share"))


def with_real_compute(world: World, schedule: Schedule) -> Timeline:
    """The timeline of one step of the toy model (hidden 256), computed on this machine's cores."""
    return timed_step(world, schedule, memory.saved_activations)


def bytes_of(world: World, m: int, by: str) -> Traffic:
    """The bytes of one 1F1B step of the toy in m microbatches, by this course's loop ('ours') or by PyTorch's
    ('torch').
    """

    def run():
        # Imported here: a rank has imported this already, and the notebook need not.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank, p = dist.get_rank(), dist.get_world_size()
        stage, batch = toy.split_depth(toy.ToyTransformer()), toy.make_batch()
        if by == "ours":
            step_by(SCHEDULES["1F1B"].make(p, m), {rank: stage}, batch)
            return
        pipe = Schedule1F1B(PipelineStage(stage, rank, p, torch.device("cpu")), m, loss_fn=toy.loss_of)
        last = {"target": batch[1], "losses": []} if rank == p - 1 else {}
        pipe.step(*[batch[0]] * (rank == 0), **last)

    world.run(run)
    return world.traffic


def answer(gpipe: simulation.Timeline, f1b1: simulation.Timeline) -> tuple[str, str, str]:
    """The arguments of `guess.reveal`: what is smaller in the second timeline, why, and how it was found."""
    time, held = f1b1.makespan < gpipe.makespan, f1b1.held < gpipe.held
    smaller = "both" if time and held else "the idle time" if time else "the memory"
    why = (
        "1F1B changes only the order on each stage. The first wait and the last wait stay, so the time is the"
        " same. But rank *r* holds *p* − *r* microbatches."
    )
    return smaller, why, "Computed"
