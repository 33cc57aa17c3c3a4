"""Drop 07, what its cells show: schedules on ranks and on paper."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from .... import toy
from ....runtime import clock, memory
from ....runtime.clock import Timeline
from ....runtime.traffic import Traffic
from ....runtime.world import World
from ....theory import schedules, simulation
from ....theory.schedules import Schedule
from ....theory.simulation import simulate

UNIT = 0.030  # seconds of a stand-in's forward; its backward takes two of them


def on_ranks(
    world: World,
    schedule: Schedule,
    tries: int = clock.TRIES,
    unit: float = UNIT,
    work: list[float] | None = None,
) -> Timeline:
    """A schedule run on real ranks with timed stand-ins for compute; a stage in v chunks takes 1/v of `unit`
    for each.

    work: how many times `unit` each stage takes, if they differ. tries: see `clock.shortest`.
    """

    def run():
        rank = dist.get_rank()
        chunks = {
            k: toy.StandIn(*[unit / schedule.v * (work[k] if work else 1)] * 3)
            for k, at in enumerate(schedule.rank_of)
            if at == rank
        }
        tokens, targets = toy.make_batch(schedule.m, 1)
        with memory.saved_activations(torch.nn.ModuleList(chunks.values())):
            dist.barrier()
            toy.run_schedule(
                chunks,
                schedule.ops[rank],
                schedule.rank_of,
                tokens.chunk(schedule.m),
                targets.chunk(schedule.m),
                around=clock.around,
            )

    def once():
        world.run(run)
        return world.timeline

    return clock.shortest(once, lambda t: t.makespan, tries)


def on_paper(schedule: Schedule, unit: float = UNIT) -> simulation.Timeline:
    """The same on paper, in seconds, so that both have one scale."""
    line = simulate(schedule)  # in whole units, which add up without rounding: ties stay ties
    return replace(line, start=unit * line.start, end=unit * line.end, unit="s")


def with_real_compute(world: World, schedule: Schedule, b: int = 16, s: int = 64) -> Timeline:
    """The toy itself, hidden 256, on this machine's cores."""

    def run():
        rank = dist.get_rank()
        model = toy.split_depth(toy.ToyTransformer(seed=0))
        tokens, targets = (t.chunk(schedule.m) for t in toy.make_batch(b, s))
        for record in (False, True):  # once to warm up
            dist.barrier()
            with memory.saved_activations(model):
                toy.run_schedule(
                    {rank: model},
                    schedule.ops[rank],
                    schedule.rank_of,
                    tokens,
                    targets,
                    **{"around": clock.around} if record else {},
                )

    world.run(run)
    return world.timeline


def bytes_of(world: World, m: int, by: str, b: int = 8, s: int = 32) -> Traffic:
    """The bytes of one 1F1B step of the toy in m microbatches, by this course's loop ('ours') or by PyTorch's
    ('torch').
    """
    schedule = schedules.one_f_one_b(len(world), m)

    def run():
        rank, p = dist.get_rank(), dist.get_world_size()
        stage = toy.split_depth(toy.ToyTransformer(seed=0))
        tokens, targets = toy.make_batch(b, s)
        if by == "ours":
            return toy.run_schedule(
                {rank: stage}, schedule.ops[rank], schedule.rank_of, tokens.chunk(m), targets.chunk(m)
            )
        losses: list = []
        pipe = Schedule1F1B(PipelineStage(stage, rank, p, torch.device("cpu")), m, loss_fn=toy.loss_of)
        pipe.step(
            *([tokens] if rank == 0 else []),
            **({"target": targets, "losses": losses} if rank == p - 1 else {}),
        )
        return sum(x.item() for x in losses) / m if losses else None

    world.run(run)
    return world.traffic
